"""The engine loop around a real vLLM engine: version boundaries, failed updates, refusals, seeds, aborts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from forgelite.errors import ConfigError, StationDied, WeightError, WeightMismatch
from forgelite.types import Completion, Failure, VersionSpan
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
    wait_for_tokens,
)

pytestmark = pytest.mark.engine

LONG = 400  # tokens: far more than are sampled while a test gives its next command


@dataclass(kw_only=True, slots=True, frozen=True)
class Policy:
    """An engine that serves checkpoint `a` as version 0, and another one, `b`, for updates."""

    host: EngineHost
    a: Path
    b: Path
    capabilities: Any  # forgelite.policy.engine.Capabilities

    def serve(self, version: int, checkpoint: Path) -> None:
        self.host.update(version, partial(read_checkpoint, checkpoint))


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    folder = tmp_path_factory.mktemp("checkpoints")
    a = save_checkpoint(folder / "a", "llama", seed=1)
    b = save_checkpoint(folder / "b", "llama", seed=2)
    with engine_process() as host:
        yield Policy(host=host, a=a, b=b, capabilities=host.build(a, ENGINE))
        host.close()


@pytest.fixture
def served(policy: Policy) -> Policy:
    """The policy with checkpoint `a` as version 0, whatever the test before has done."""
    policy.serve(0, policy.a)
    return policy


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"max_model_length": 64}, r"policy\.engine\.max_model_length: vLLM's EngineArgs has no such"),
        ({"logprobs_mode": "raw_logprobs"}, r"policy\.engine\.logprobs_mode is set by forgelite"),
        (
            {"tensor_parallel_size": 2},
            r"policy\.engine\.tensor_parallel_size=2 needs as many processes in the replica, which has 1",
        ),
        ({"pipeline_parallel_size": 2}, r"policy\.engine\.pipeline_parallel_size=2: .* by tensor parallelism only"),
        ({"max_model_len": 100_000}, r"policy\.engine\.max_model_len=100000"),
        ({"dtype": "float33"}, r"policy\.engine\.dtype='float33'"),
    ],
    ids=["unknown", "reserved", "too few processes", "pipeline", "too long", "wrong value"],
)
def test_a_wrong_engine_argument_is_an_error_that_names_its_key(policy: Policy, engine: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        policy.host.build(policy.a, engine)


def test_a_folder_without_a_configuration_is_an_error_that_names_model_path(policy: Policy, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path=.* has no config\.json"):
        policy.host.build(tmp_path, ENGINE)


def test_the_kv_cache_holds_what_all_sequences_can_need_and_no_more(policy: Policy) -> None:
    assert policy.capabilities.kv_cache_tokens == 16 * 512 + 128  # one block of 128 is vLLM's null block


def interrupted(policy: Policy, *, keep_kv: bool) -> Completion:
    """A completion during which version 1 (checkpoint `b`) replaced version 0 (checkpoint `a`)."""
    policy.host.submit([group("long", max_tokens=LONG)])
    wait_for_tokens(policy.host, 20)
    policy.host.update(1, partial(read_checkpoint, policy.b), keep_kv=keep_kv)
    (result,) = policy.host.collect(60.0)
    return result.outcome[0]


def test_a_swap_in_mid_sequence_falls_exactly_on_the_recorded_token(served: Policy) -> None:
    completion = interrupted(served, keep_kv=False)

    old, new = completion.spans
    assert (old.version, new.version) == (0, 1)
    assert 20 <= old.end == new.start < new.end == LONG
    under_a, under_b = (reference_logprobs(folder, completion) for folder in (served.a, served.b))
    boundary = old.end
    assert furthest(completion.logprobs[:boundary], under_a[:boundary]) < TOLERANCE
    assert furthest(completion.logprobs[boundary:], under_b[boundary:]) < TOLERANCE
    # The boundary is exact: one token earlier or later, the other version would be wrong.
    assert furthest(completion.logprobs[boundary - 1 : boundary], under_b[boundary - 1 : boundary]) > 1e-2
    assert furthest(completion.logprobs[boundary : boundary + 1], under_a[boundary : boundary + 1]) > 1e-2


def test_with_kept_keys_the_tokens_after_a_swap_match_neither_policy(served: Policy) -> None:
    completion = interrupted(served, keep_kv=True)

    boundary = completion.spans[0].end
    after = completion.logprobs[boundary:]
    for folder in (served.a, served.b):
        assert furthest(after, reference_logprobs(folder, completion)[boundary:]) > 1e-2


def test_a_request_after_a_swap_with_kept_keys_finds_none_of_the_old_prefix(served: Policy) -> None:
    prompt = [7 + index % 50 for index in range(300)]  # two full blocks, which the prefix cache holds
    sample(served.host, group("old", prompt=prompt))
    served.host.update(1, partial(read_checkpoint, served.b), keep_kv=True)

    ((completion,),) = sample(served.host, group("new", prompt=prompt))

    assert furthest(completion.logprobs, reference_logprobs(served.b, completion)) < TOLERANCE


def no_weights() -> Mapping[str, torch.Tensor]:
    raise WeightError("version 7 has been dropped")


def without_a_tensor(checkpoint: Path) -> Mapping[str, torch.Tensor]:
    return {name: tensor for name, tensor in read_checkpoint(checkpoint).items() if "norm" not in name}


def with_a_stranger(checkpoint: Path) -> Mapping[str, torch.Tensor]:
    return {**read_checkpoint(checkpoint), "model.layers.0.mlp.extra.weight": torch.zeros(2)}


def transposed(checkpoint: Path) -> Mapping[str, torch.Tensor]:
    tensors = read_checkpoint(checkpoint)
    return {**tensors, "lm_head.weight": tensors["lm_head.weight"].T}


def halved(checkpoint: Path) -> Mapping[str, torch.Tensor]:
    tensors = read_checkpoint(checkpoint)
    return {**tensors, "model.norm.weight": tensors["model.norm.weight"].half()}


def not_a_number(checkpoint: Path) -> Mapping[str, torch.Tensor]:
    return {name: tensor * torch.nan for name, tensor in read_checkpoint(checkpoint).items()}


def unreadable(checkpoint: Path) -> Mapping[str, torch.Tensor]:
    """Right in every name, shape and dtype, but one tensor has no data to copy."""
    tensors = read_checkpoint(checkpoint)
    return {**tensors, "model.norm.weight": torch.empty_like(tensors["model.norm.weight"], device="meta")}


@pytest.mark.parametrize(
    ("load", "error", "message"),
    [
        (lambda b: no_weights, WeightError, "has been dropped"),
        (lambda b: partial(without_a_tensor, b), WeightMismatch, "missing: .*model.norm.weight"),
        (lambda b: partial(with_a_stranger, b), WeightMismatch, "unexpected: .*extra.weight"),
        (lambda b: partial(transposed, b), WeightMismatch, r"lm_head.weight is \(64, 96\), not \(96, 64\)"),
        (lambda b: partial(halved, b), WeightMismatch, "model.norm.weight is torch.float16"),
    ],
    ids=["load raises", "missing", "unexpected", "shape", "dtype"],
)
def test_an_update_that_fails_leaves_the_version_and_the_weights_as_they_were(
    served: Policy, load, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        served.host.update(7, load(served.b))

    ((completion,),) = sample(served.host, group("after the failure", max_tokens=16))
    assert completion.spans == [VersionSpan(version=0, start=0, end=16)]
    assert furthest(completion.logprobs, reference_logprobs(served.a, completion)) < TOLERANCE


def test_a_version_cannot_fall_while_a_request_is_being_sampled(served: Policy) -> None:
    served.serve(5, served.b)
    served.host.submit([group("running", max_tokens=LONG)])

    with pytest.raises(WeightError, match="version 3 is older than 5"):
        served.serve(3, served.a)

    served.host.abort(["running"])
    served.host.collect(60.0)
    served.serve(3, served.a)
    assert served.host.stats().version == 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt": [3, VOCABULARY]}, f"token {VOCABULARY} is outside the vocabulary of {VOCABULARY}"),
        ({"prompt": [3, -1]}, "token -1 is outside"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [3] * 500, "max_tokens": 20}, "500 prompt tokens and max_tokens=20 exceed .* 512"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": 0.001}, "use 0 for greedy"),
        ({"n": 0}, "n=0: a group has at least one member"),
    ],
    ids=["vocabulary", "negative", "empty", "too long", "negative temperature", "tiny temperature", "nobody"],
)
def test_a_wrong_request_fails_alone(served: Policy, wrong: dict, message: str) -> None:
    refused, (completion,) = sample(served.host, group("wrong", **wrong), group("right"))

    assert isinstance(refused, Failure)
    assert refused.reason == "rejected"
    assert re.search(message, refused.message)
    assert len(completion.token_ids) == 8


def test_a_prompt_that_just_fits_is_sampled_to_its_end(served: Policy) -> None:
    ((completion,),) = sample(served.host, group("full", prompt=[3] * 504, max_tokens=8))

    assert len(completion.token_ids) == 8
    assert completion.finish_reason == "length"


def test_a_stop_token_ends_a_completion_and_belongs_to_it(served: Policy) -> None:
    ((free,),) = sample(served.host, group("free", max_tokens=16, seed=3))
    stop = free.token_ids[5]
    ((stopped,),) = sample(served.host, group("stopped", max_tokens=16, seed=3, stop_token_ids=(stop,)))
    ((ignored,),) = sample(
        served.host, group("ignored", max_tokens=16, seed=3, stop_token_ids=(stop,), ignore_eos=True)
    )

    first = free.token_ids.index(stop)
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.finish_reason == "stop"
    assert ignored.token_ids == free.token_ids


def test_logprobs_are_of_the_distribution_after_temperature_and_top_k(served: Policy) -> None:
    ((completion,),) = sample(served.host, group("top", max_tokens=64, top_k=1, temperature=0.5))

    assert completion.logprobs == [0.0] * 64


def test_two_requests_without_a_seed_differ(served: Policy) -> None:
    first, second = sample(served.host, group("one", n=4, max_tokens=16), group("two", n=4, max_tokens=16))
    (again,) = sample(served.host, group("one", n=4, max_tokens=16))

    texts = [tuple(completion.token_ids) for completion in [*first, *second, *again]]
    assert len(set(texts)) == 12


def test_a_seeded_request_repeats_whatever_else_is_in_the_batch(served: Policy) -> None:
    (alone,) = sample(served.host, group("alone", n=4, seed=11))
    crowded, _ = sample(served.host, group("crowded", n=4, seed=11), group("crowd", n=8))

    assert [c.token_ids for c in alone] == [c.token_ids for c in crowded]


def test_neighbouring_seeds_share_no_member(served: Policy) -> None:
    first, second = sample(
        served.host, group("seed 5", n=8, seed=5, max_tokens=16), group("seed 6", n=8, seed=6, max_tokens=16)
    )

    assert not {tuple(c.token_ids) for c in first} & {tuple(c.token_ids) for c in second}


def test_an_abort_gives_the_tokens_so_far_and_ends_the_request_once(served: Policy) -> None:
    served.host.submit([group("aborted", n=2, max_tokens=LONG)])
    wait_for_tokens(served.host, 20)
    served.host.abort(["aborted"])
    served.host.abort(["aborted"])

    (result,) = served.host.collect(60.0)

    for completion in result.outcome:
        assert completion.finish_reason == "abort"
        assert 10 <= len(completion.token_ids) < LONG
        assert completion.spans[-1].end == len(completion.token_ids)
    assert served.host.collect(0.0) == []
    ((next_one,),) = sample(served.host, group("aborted"))  # its id is free again
    assert len(next_one.token_ids) == 8


def test_weights_that_are_not_numbers_fail_the_samples_and_not_the_engine(served: Policy) -> None:
    served.host.update(1, partial(not_a_number, served.a))
    (failures,) = sample(served.host, group("diverged", n=2))
    served.serve(2, served.a)
    ((completion,),) = sample(served.host, group("recovered"))

    assert [failure.reason for failure in failures] == ["not_finite"] * 2
    assert "diverged/1" in failures[1].message
    assert furthest(completion.logprobs, reference_logprobs(served.a, completion)) < TOLERANCE


@pytest.fixture
def fragile(served: Policy) -> Iterator[Policy]:
    """The policy, with a new engine afterwards."""
    yield served
    served.host.close()
    served.host.build(served.a, ENGINE)


def test_a_write_that_fails_half_way_breaks_the_engine_for_everybody(fragile: Policy) -> None:
    fragile.host.submit([group("waiting", max_tokens=LONG)])

    with pytest.raises(StationDied, match="writing version 9 failed half-way"):
        fragile.host.update(9, partial(unreadable, fragile.b))

    (result,) = fragile.host.collect(60.0)
    (newcomer,) = fragile.host.submit([group("newcomer")])
    for failure in (result.outcome, newcomer):
        assert failure.reason == "engine_dead"
        assert "writing version 9 failed half-way" in failure.message
    with pytest.raises(StationDied, match="half-way"):
        fragile.host.collect(60.0)
    with pytest.raises(StationDied, match="half-way"):
        fragile.serve(10, fragile.a)
