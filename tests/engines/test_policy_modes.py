"""The update modes on a real engine, with updates that fall between two chosen tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from forgelite.policy.groups import GroupResult
from forgelite.types import Completion, GroupRequest, VersionSpan
from tests.engines.policy_process import (
    ENGINE,
    TOLERANCE,
    VOCABULARY,
    EngineHost,
    engine_process,
    furthest,
    group,
    read_checkpoint,
    reference_logprobs,
    sample,
    save_checkpoint,
)

pytestmark = pytest.mark.engine

MODES_AND_KV = [("in_flight", False), ("in_flight", True), ("drain", False), ("abort", False)]
PROMPT = [7 + index % 50 for index in range(150)]  # more than a block of the prefix cache
TOKENS = 12


class InterruptedEngine:
    """An engine during one of whose calls a command is given to the loop, so that it runs right after the call.

    Records what every step emitted, and with which weights.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.emitted: list[tuple[str, int, float, float]] = []  # sequence, token, logprob, a number of the weights
        self._steps_left: int | None = None
        self._command: Callable[[], Any] | None = None
        self._loop: Any = None
        self.outcome: Future[Any] = Future()

    def interrupt(self, loop: Any, steps: int, command: Callable[[], Any]) -> None:
        """Give `command` when the engine has made so many steps from now; 0: when it is given sequences."""
        self.emitted, self.outcome = [], Future()
        self._loop, self._steps_left, self._command = loop, steps, command

    def add(self, *args: Any, **options: Any) -> None:
        self._engine.add(*args, **options)
        self._count(0)

    def step(self) -> Any:
        weights = next(self._engine._model_runner.get_model().parameters()).sum().item()
        sampled = self._engine.step()
        for each in sampled:
            self.emitted += [
                (each.sequence_id, token, logprob, weights)
                for token, logprob in zip(each.token_ids, each.logprobs, strict=True)
            ]
        self._count(1)
        return sampled

    def _count(self, steps: int) -> None:
        if self._steps_left is None:
            return
        self._steps_left -= steps
        if self._steps_left == 0:
            self._steps_left = None
            threading.Thread(target=self._give, daemon=True).start()
            while self._loop._inbox.empty() and not self.outcome.done():
                pass

    def _give(self) -> None:
        try:
            self.outcome.set_result(self._command())
        except Exception as error:
            self.outcome.set_exception(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@dataclass(kw_only=True, slots=True, frozen=True)
class Interrupted:
    """What became of requests during which an update was made."""

    completions: list[Completion]  # of all requests
    emitted: list[tuple[str, int, float, float]]
    report: Any  # of the command


def sample_interrupted(
    loop: Any, requests: list[GroupRequest], steps: int, command: Callable[[Any], Any]
) -> Interrupted:
    """Runs in the engine's process: sample requests, and give `command` after so many steps."""
    engine = loop._engine
    engine.interrupt(loop, steps, partial(command, loop))
    assert loop.submit(requests) == [None] * len(requests)
    results: dict[str, list[Completion]] = {}
    while len(results) < len(requests):
        news = loop.collect(60.0)
        assert news
        results.update({each.request_id: each.outcome for each in news if isinstance(each, GroupResult)})
    return Interrupted(
        completions=[completion for request in requests for completion in results[request.request_id]],
        emitted=engine.emitted,
        report=engine.outcome.result(60.0),
    )


def update_to(checkpoint: Path, mode: str, keep_kv: bool, loop: Any) -> Any:
    """A command: the next version, with the weights of a checkpoint."""
    return loop.update(loop.version + 1, partial(read_checkpoint, checkpoint), mode=mode, keep_kv=keep_kv)


def abort_it(request_id: str, loop: Any) -> None:
    """A command: save what there is of a request."""
    loop.abort([request_id])


@dataclass(kw_only=True, slots=True, frozen=True)
class Policy:
    """An engine that serves `a`, and the checkpoint `b` whose greedy answers differ."""

    host: EngineHost
    a: Path
    b: Path

    def interrupted(self, steps: int, command: Callable[[Any], Any], *requests: GroupRequest) -> Interrupted:
        return self.host.run_with_loop(sample_interrupted, list(requests), steps, command)


def save_tokenizer(folder: Path) -> None:
    """One character for each token of the vocabulary."""
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.WordLevel({chr(0x30 + token): token for token in range(VOCABULARY)}, unk_token="0"))
    tokenizer.decoder = decoders.Fuse()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    folder = tmp_path_factory.mktemp("checkpoints")
    a = save_checkpoint(folder / "a", "llama", seed=1)
    b = save_checkpoint(folder / "b", "llama", seed=2)
    save_tokenizer(a)
    with engine_process() as host:
        host.build(a, ENGINE, wrap=InterruptedEngine)
        yield Policy(host=host, a=a, b=b)
        host.close()


@pytest.fixture
def served(policy: Policy) -> Policy:
    """The policy with the weights `a`, whatever the test before has done."""
    policy.host.run_with_loop(partial(_serve, policy.a))
    return policy


def _serve(checkpoint: Path, loop: Any) -> None:
    update_to(checkpoint, "in_flight", False, loop)


def greedy(request_id: str, *, tokens: int = TOKENS, **options: Any) -> GroupRequest:
    return group(request_id, **{"prompt": PROMPT, "max_tokens": tokens, "temperature": 0.0, **options})


@torch.no_grad()
def greedy_choices(folder: Path, completion: Completion) -> list[int]:
    """The token that a fresh forward pass finds likeliest at every place of a completion."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([[*completion.prompt_ids, *completion.token_ids]])
    return model(ids).logits[0, len(completion.prompt_ids) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize(("mode", "keep_kv"), MODES_AND_KV)
def test_tokens_flip_exactly_at_the_recorded_boundary(served: Policy, mode: str, keep_kv: bool) -> None:
    found = served.interrupted(5, partial(update_to, served.b, mode, keep_kv), greedy("g", n=2))

    boundary = TOKENS if mode == "drain" else 5
    for completion in found.completions:
        emitted = [(token, logprob) for name, token, logprob, _ in found.emitted if name == completion.request_id]
        assert list(zip(completion.token_ids, completion.logprobs, strict=True)) == emitted
        computed_by = [weights for name, _, _, weights in found.emitted if name == completion.request_id]
        assert len(computed_by) == TOKENS
        assert len({*computed_by[:boundary]}) == 1
        assert computed_by[0] not in computed_by[boundary:]
        assert [span.end for span in completion.spans] == sorted({boundary, TOKENS})
        assert completion.spans[-1].version - completion.spans[0].version == (0 if mode == "drain" else 1)
    assert (found.report.mode, found.report.version) == (mode, served.host.stats().version)


@pytest.mark.parametrize("mode", ["in_flight", "drain", "abort"])
def test_logprobs_are_those_of_a_fresh_forward_on_both_sides_of_the_boundary(served: Policy, mode: str) -> None:
    (completion,) = served.interrupted(5, partial(update_to, served.b, mode, False), greedy("g")).completions
    ((later,),) = sample(served.host, greedy("later"))

    boundary = completion.spans[0].end
    by_a, by_b = greedy_choices(served.a, completion), greedy_choices(served.b, completion)
    assert completion.token_ids == by_a[:boundary] + by_b[boundary:]
    assert all(old != new for old, new in zip(by_a, by_b, strict=True))
    under_a, under_b = (reference_logprobs(folder, completion) for folder in (served.a, served.b))
    assert furthest(completion.logprobs[:boundary], under_a[:boundary]) < TOLERANCE
    if mode != "drain":
        assert furthest(completion.logprobs[boundary:], under_b[boundary:]) < TOLERANCE
    assert later.token_ids == greedy_choices(served.b, later)
    assert furthest(later.logprobs, reference_logprobs(served.b, later)) < TOLERANCE


def test_kept_keys_give_logprobs_of_neither_version(served: Policy) -> None:
    (completion,) = served.interrupted(5, partial(update_to, served.b, "in_flight", True), greedy("g")).completions

    for folder in (served.a, served.b):
        under = reference_logprobs(folder, completion)
        assert furthest(completion.logprobs[5:], under[5:]) > 1e-2


@pytest.mark.parametrize(("mode", "keep_kv"), MODES_AND_KV)
def test_an_interrupt_at_any_token_changes_nothing_when_the_weights_are_the_same(
    served: Policy, mode: str, keep_kv: bool
) -> None:
    ((whole,),) = sample(served.host, greedy("whole"))
    for steps in range(TOKENS):
        command = partial(update_to, served.a, mode, keep_kv)
        (completion,) = served.interrupted(steps, command, greedy("g")).completions

        assert completion.token_ids == whole.token_ids
        assert furthest(completion.logprobs, whole.logprobs) < TOLERANCE
        assert completion.finish_reason == "length"
        edges = {steps, TOKENS} - {0} if mode != "drain" else {TOKENS}
        assert [span.end for span in completion.spans] == sorted(edges)


@pytest.mark.parametrize("mode", ["in_flight", "abort"])
def test_sequences_that_wait_for_a_place_get_their_whole_budget(served: Policy, mode: str) -> None:
    command = partial(update_to, served.b, mode, False)
    found = served.interrupted(5, command, greedy("g", n=20))  # the engine samples 16 at once

    assert {len(completion.token_ids) for completion in found.completions} == {TOKENS}
    new = served.host.stats().version
    late = [c for c in found.completions if c.spans == [VersionSpan(version=new, start=0, end=TOKENS)]]
    assert len(late) == 4
    assert all(completion.token_ids == late[0].token_ids for completion in late)


@pytest.mark.parametrize("tokens", [1, 6, 11])
def test_a_saved_rollout_goes_on_as_if_it_had_not_been_interrupted(served: Policy, tokens: int) -> None:
    ((whole,),) = sample(served.host, greedy("whole"))
    (saved,) = served.interrupted(tokens, partial(abort_it, "g"), greedy("g")).completions
    asked = greedy("g")
    resumed_request = GroupRequest(
        request_id="resumed", prompt_ids=asked.prompt_ids, sampling=asked.sampling, partials=(saved,)
    )
    ((resumed,),) = sample(served.host, resumed_request)

    assert (saved.finish_reason, len(saved.token_ids)) == ("abort", tokens)
    assert resumed.token_ids == whole.token_ids
    assert furthest(resumed.logprobs, whole.logprobs) < TOLERANCE
    assert resumed.spans == whole.spans
    assert resumed.finish_reason == "length"


def test_a_sampled_continuation_does_not_repeat_the_random_numbers_of_its_first_part(served: Policy) -> None:
    """At a temperature where the model hardly matters, equal numbers would give equal tokens."""
    options = {"prompt": [5], "temperature": 2.0, "seed": 3, "tokens": 60, "n": 8}
    command = partial(update_to, served.a, "abort", False)
    found = served.interrupted(30, command, greedy("g", **options)).completions

    for completion in found:
        assert len(completion.token_ids) == 60
        same = sum(a == b for a, b in zip(completion.token_ids[:30], completion.token_ids[30:], strict=True))
        assert same < 15


def test_a_completion_ends_at_a_stop_text_with_its_tokens(served: Policy) -> None:
    ((free,),) = sample(served.host, greedy("free"))
    text = "".join(chr(0x30 + token) for token in free.token_ids)
    stop = text[4:7]
    ((stopped,),) = sample(served.host, greedy("stopped", stop=(stop,)))

    end = text.index(stop) + len(stop)
    assert stopped.token_ids == free.token_ids[:end]
    assert stopped.finish_reason == "stop"
    assert len(stopped.logprobs) == end
