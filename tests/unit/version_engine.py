"""An engine that samples the number of its weights, and what a test of the engine loop needs around it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from forgelite.errors import WeightError, WeightMismatch
from forgelite.policy.admission import Limits
from forgelite.policy.engine_loop import EngineLoop
from forgelite.policy.engine_protocol import Sampled
from forgelite.policy.groups import GroupProgress, GroupResult
from forgelite.types import Completion, Failure, GroupRequest, SamplingParams


class VersionEngine:
    """Samples the number of the weights it holds, one token of every sequence in a step.

    The logprob of a token is minus its position, prompt included, as the engine counts it: a token that is sampled
    twice or left out shows there. With a `gate`, each step waits inside for a permit: a test decides what is asked for
    during which step.
    """

    def __init__(self, *, gate: bool = False) -> None:
        self.limits = Limits(vocab_size=256, max_model_len=1000)
        self.weights = 0
        self.kv_drops = 0
        self.closed = False
        self.seeds: dict[str, int] = {}
        self.salts: dict[str, str] = {}
        self.prompts: dict[str, list[int]] = {}
        self.added: list[list[str]] = []  # the sequence ids of each call
        self.prepared: list[int] = []  # weights
        self.script: dict[str, dict[int, int]] = {}  # token by position, of a sequence that samples no versions
        self.not_numbers: set[str] = set()  # sequences whose logprobs are NaN
        self.fails: Exception | None = None
        self._left: dict[str, int] = {}  # tokens that each sequence may still sample
        self._positions: dict[str, int] = {}  # of the next token
        self._begun = threading.Semaphore(0)
        self._permits = threading.Semaphore(0) if gate else None

    def wait_inside_step(self) -> None:
        """Return when the next step has begun; it ends when it is allowed to."""
        assert self._begun.acquire(timeout=10.0)

    def allow(self, steps: int) -> None:
        self._permits.release(steps)

    def open(self) -> None:
        """From here on steps need no permit."""
        self._permits, gate = None, self._permits
        if gate is not None:
            gate.release()

    def add(self, sequence_ids, prompt_ids, sampling, seeds, cache_salt) -> None:
        if sampling.top_k == 77:
            raise ValueError("top_k=77 is refused")
        self.added.append(list(sequence_ids))
        assert sampling.max_tokens > 0
        for sequence_id, seed in zip(sequence_ids, seeds, strict=True):
            assert sequence_id not in self._left
            self._left[sequence_id] = sampling.max_tokens
            self.prompts[sequence_id] = list(prompt_ids)
            self.seeds[sequence_id] = seed
            self.salts[sequence_id] = cache_salt
            self._positions[sequence_id] = len(self.prompts[sequence_id])

    def abort(self, sequence_ids) -> None:
        for sequence_id in sequence_ids:
            self._left.pop(sequence_id, None)

    def step(self) -> list[Sampled]:
        self._begun.release()
        if (permits := self._permits) is not None:
            permits.acquire()
        if self.fails is not None:
            raise self.fails
        sampled = [self._sample(sequence_id) for sequence_id in self._left]
        self._left = {sequence_id: left for sequence_id, left in self._left.items() if left}
        return sampled

    def _sample(self, sequence_id: str) -> Sampled:
        position = self._positions[sequence_id]
        self._positions[sequence_id] += 1
        self._left[sequence_id] -= 1
        token = self.script.get(sequence_id, {}).get(position, self.weights)
        logprob = float("nan") if sequence_id in self.not_numbers else -float(position)
        return Sampled(sequence_id, [token], [logprob], None if self._left[sequence_id] else "length")

    def queue_lengths(self) -> tuple[int, int]:
        return len(self._left), 0

    def prepare_weights(self, tensors: Mapping[str, Any]) -> Callable[[], None]:
        if tensors.get("misfit"):
            raise WeightMismatch("missing: w")
        self.prepared.append(tensors["w"])

        def write() -> None:
            if tensors.get("refused"):
                raise WeightError("the ranks do not agree")
            self.weights = tensors["w"]
            if tensors.get("torn"):
                raise OSError("the disk is gone")

        return write

    def drop_kv(self) -> None:
        self.kv_drops += 1

    def close(self) -> None:
        self.closed = True


@contextmanager
def started_loops() -> Iterator[Callable[..., EngineLoop]]:
    """Starts engine loops, and closes them at the end whatever their engines wait for."""
    loops: list[tuple[EngineLoop, VersionEngine]] = []

    def start(engine: VersionEngine, **options: Any) -> EngineLoop:
        loops.append((EngineLoop(engine, **{"seed": 0, **options}), engine))
        return loops[-1][0]

    yield start
    for loop, engine in loops:
        engine.open()
        loop.close()


PROMPT = (1, 2)


def request(name: str, *, n: int = 1, max_tokens: int = 4, **options: Any) -> GroupRequest:
    """A request; options are fields of the request or of its sampling parameters."""
    own = {key: options.pop(key) for key in ("partials", "progress_s") if key in options}
    params = SamplingParams(max_tokens=max_tokens, **options)
    return GroupRequest(request_id=name, prompt_ids=PROMPT, sampling=params, n=n, **own)


def results(loop: EngineLoop, count: int = 1) -> dict[str, list[Completion | Failure] | Failure]:
    """The next `count` results, by request id; reports are passed over."""
    found: dict[str, list[Completion | Failure] | Failure] = {}
    while len(found) < count:
        news = loop.collect(10.0)
        assert news, f"only {sorted(found)} were finished"
        found.update({each.request_id: each.outcome for each in news if isinstance(each, GroupResult)})
    return found


def until_result(loop: EngineLoop) -> list[GroupProgress | GroupResult]:
    """Everything up to the next result."""
    news: list[GroupProgress | GroupResult] = []
    while not any(isinstance(each, GroupResult) for each in news):
        news += loop.collect(10.0)
    return news


def positions(count: int) -> list[float]:
    """The logprobs of a completion of `count` tokens of which none was sampled twice."""
    return [-float(len(PROMPT) + index) for index in range(count)]


def weights(value: int, **faults: bool) -> Callable[[], Mapping[str, Any]]:
    return lambda: {"w": value, **faults}


class Meanwhile:
    """A blocking command, given while the engine is inside a step. When made, it lies in the loop's inbox."""

    def __init__(self, loop: EngineLoop, command: Callable[[], Any]) -> None:
        before = loop._inbox.qsize()
        self._outcome: Future[Any] = Future()
        self._thread = threading.Thread(target=self._run, args=(command,), daemon=True)
        self._thread.start()
        while loop._inbox.qsize() == before and self._thread.is_alive():
            pass

    def _run(self, command: Callable[[], Any]) -> None:
        try:
            self._outcome.set_result(command())
        except Exception as error:
            self._outcome.set_exception(error)

    def result(self) -> Any:
        """What the command returned or raised."""
        return self._outcome.result(10.0)
