"""The engine loop with an engine that samples its own version number: spans, failures, ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest

from forgelite.errors import StationDied, WeightError, WeightMismatch
from forgelite.policy.admission import Limits
from forgelite.policy.engine_loop import EngineLoop
from forgelite.policy.engine_protocol import Sampled
from forgelite.types import Completion, Failure, GroupRequest, SamplingParams

pytestmark = pytest.mark.timeout(30)


class VersionEngine:
    """Samples the number of the weights it holds, one token of every sequence in a step.

    With a `gate`, each step waits inside for a permit: a test decides what is asked for during which step.
    """

    def __init__(self, *, gate: bool = False) -> None:
        self.limits = Limits(vocab_size=100, max_model_len=1000)
        self.weights = 0
        self.kv_drops = 0
        self.closed = False
        self.seeds: dict[str, int] = {}
        self.salts: dict[str, str] = {}
        self.fails: Exception | None = None
        self.logprob = -0.5
        self._left: dict[str, int] = {}
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
        for sequence_id, seed in zip(sequence_ids, seeds, strict=True):
            self._left[sequence_id] = sampling.max_tokens
            self.seeds[sequence_id] = seed
            self.salts[sequence_id] = cache_salt

    def abort(self, sequence_ids) -> None:
        for sequence_id in sequence_ids:
            self._left.pop(sequence_id, None)

    def step(self) -> list[Sampled]:
        self._begun.release()
        if (permits := self._permits) is not None:
            permits.acquire()
        if self.fails is not None:
            raise self.fails
        self._left = {sequence_id: left - 1 for sequence_id, left in self._left.items()}
        sampled = [
            Sampled(sequence_id, [self.weights], [self.logprob], None if left else "length")
            for sequence_id, left in self._left.items()
        ]
        self._left = {sequence_id: left for sequence_id, left in self._left.items() if left}
        return sampled

    def queue_lengths(self) -> tuple[int, int]:
        return len(self._left), 0

    def prepare_weights(self, tensors: Mapping[str, Any]) -> Callable[[], None]:
        if tensors.get("misfit"):
            raise WeightMismatch("missing: w")

        def write() -> None:
            self.weights = tensors["w"]
            if tensors.get("torn"):
                raise OSError("the disk is gone")

        return write

    def drop_kv(self) -> None:
        self.kv_drops += 1

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def start() -> Iterator[Callable[..., EngineLoop]]:
    loops: list[tuple[EngineLoop, VersionEngine]] = []

    def started(engine: VersionEngine, **options: Any) -> EngineLoop:
        loops.append((EngineLoop(engine, **{"seed": 0, **options}), engine))
        return loops[-1][0]

    yield started
    for loop, engine in loops:
        engine.open()
        loop.close()


def request(name: str, *, n: int = 1, max_tokens: int = 4, **sampling: Any) -> GroupRequest:
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return GroupRequest(request_id=name, prompt_ids=(1, 2), sampling=params, n=n)


def outcomes(loop: EngineLoop, count: int = 1) -> dict[str, list[Completion] | Failure]:
    found: dict[str, list[Completion] | Failure] = {}
    while len(found) < count:
        found.update({result.request_id: result.outcome for result in loop.collect(10.0)})
    return found


def weights(value: int, **faults: bool) -> Callable[[], Mapping[str, Any]]:
    return lambda: {"w": value, **faults}


def meanwhile(loop: EngineLoop, command: Callable[[], Any]) -> threading.Thread:
    """Give a blocking command while the engine is inside a step; returns when it lies in the loop's inbox."""
    thread = threading.Thread(target=command)
    thread.start()
    while loop._inbox.empty():
        pass
    return thread


def test_spans_reproduce_the_version_that_sampled_each_token(start) -> None:
    engine = VersionEngine(gate=True)
    loop = start(engine)
    loop.submit([request("g", n=3, max_tokens=12)])
    for version in (1, 2, 3):
        engine.wait_inside_step()
        engine.allow(1)
        engine.wait_inside_step()
        update = meanwhile(loop, partial(loop.update, version, weights(version)))
        engine.allow(1)
        update.join()
    engine.open()

    for completion in outcomes(loop)["g"]:
        assert [(span.version, span.end) for span in completion.spans] == [(0, 2), (1, 4), (2, 6), (3, 12)]
        assert completion.token_ids == [0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 3, 3]
    assert engine.kv_drops == 3


def test_a_group_has_its_result_when_its_last_member_ends(start) -> None:
    engine = VersionEngine()
    loop = start(engine)
    assert loop.submit([request("short", n=2, max_tokens=1), request("long", n=2, max_tokens=50)]) == [
        None,
        None,
    ]

    found = outcomes(loop, 2)
    assert [c.request_id for c in found["short"]] == ["short/0", "short/1"]
    assert [len(c.token_ids) for c in found["long"]] == [50, 50]


def test_a_load_that_raises_moves_nothing(start) -> None:
    engine = VersionEngine()
    loop = start(engine)

    def gone() -> Mapping[str, Any]:
        raise WeightError("version 1 was dropped")

    with pytest.raises(WeightError, match="was dropped"):
        loop.update(1, gone)
    with pytest.raises(WeightMismatch, match="missing: w"):
        loop.update(1, weights(1, misfit=True))

    assert (loop.version, engine.weights, engine.kv_drops) == (0, 0, 0)
    loop.submit([request("g")])
    assert outcomes(loop)["g"][0].token_ids == [0] * 4


def test_weights_torn_in_the_middle_are_never_served(start) -> None:
    engine = VersionEngine(gate=True)
    loop = start(engine)
    loop.submit([request("waiting")])
    engine.wait_inside_step()
    failed: list[Exception] = []

    def torn_update() -> None:
        try:
            loop.update(1, weights(1, torn=True))
        except StationDied as error:
            failed.append(error)

    update = meanwhile(loop, torn_update)
    engine.allow(1)
    update.join()

    assert "the disk is gone" in str(failed[0])
    assert loop.version == 0
    assert outcomes(loop)["waiting"].reason == "engine_dead"
    assert loop.submit([request("new")])[0].reason == "engine_dead"


def test_a_failed_step_gives_everybody_its_cause(start) -> None:
    engine = VersionEngine(gate=True)
    loop = start(engine)
    loop.submit([request("first", n=2), request("second")])
    engine.fails = IndexError("index out of range in self")
    engine.allow(1)

    for failure in outcomes(loop, 2).values():
        assert failure.reason == "engine_dead"
        assert "IndexError: index out of range in self" in failure.message
    assert "IndexError" in loop.submit([request("newcomer")])[0].message
    with pytest.raises(StationDied, match="IndexError"):
        loop.update(1, weights(1))
    with pytest.raises(StationDied, match="IndexError"):
        loop.collect(10.0)


def test_a_group_with_a_logprob_that_is_not_a_number_fails_and_others_go_on(start) -> None:
    engine = VersionEngine(gate=True)
    loop = start(engine)
    engine.logprob = float("nan")
    loop.submit([request("diverged", n=3)])
    engine.allow(1)
    failure = outcomes(loop)["diverged"]
    engine.logprob = -0.5
    loop.submit([request("fine")])
    engine.open()

    assert failure.reason == "not_finite"
    assert "diverged/0" in failure.message
    assert len(outcomes(loop)["fine"]) == 1


def test_parameters_that_only_the_engine_refuses_fail_alone(start) -> None:
    loop = start(VersionEngine())
    loop.submit([request("odd", top_k=77), request("even")])

    found = outcomes(loop, 2)
    assert (found["odd"].reason, found["odd"].message) == ("rejected", "request odd: top_k=77 is refused")
    assert len(found["even"]) == 1


def test_an_id_in_use_is_refused_until_its_result_is_out(start) -> None:
    engine = VersionEngine(gate=True)
    loop = start(engine)
    assert loop.submit([request("g"), request("g")])[1].reason == "rejected"
    assert loop.submit([request("g")])[0].reason == "rejected"
    engine.open()
    outcomes(loop)

    assert loop.submit([request("g")]) == [None]


def test_unseeded_members_have_seeds_of_their_own_that_follow_from_the_engine_seed(start) -> None:
    def seeds(engine_seed: int) -> list[dict[str, int]]:
        engine = VersionEngine()
        loop = start(engine, seed=engine_seed)
        drawn = []
        for _ in range(2):
            loop.submit([request("a", n=4), request("b", n=4)])
            outcomes(loop, 2)
            drawn.append(dict(engine.seeds))
        return drawn

    first, again = seeds(0)
    assert len({*first.values(), *again.values()}) == 16  # the same id asked for twice does not decode alike
    assert seeds(0) == [first, again]
    assert not set(seeds(1)[0].values()) & set(first.values())


def test_a_request_finds_cached_prefixes_of_its_own_version_only(start) -> None:
    engine = VersionEngine()
    loop = start(engine)
    loop.submit([request("old")])
    outcomes(loop)
    loop.update(1, weights(1), keep_kv=True)
    loop.submit([request("new")])
    outcomes(loop)

    assert engine.kv_drops == 0
    assert engine.salts["old/0"] != engine.salts["new/0"]


def test_closing_ends_requests_as_aborted_and_frees_the_engine(start) -> None:
    engine = VersionEngine(gate=True)
    loop = start(engine)
    loop.submit([request("g", n=2)])
    engine.wait_inside_step()
    closing = meanwhile(loop, loop.close)
    engine.allow(1)
    closing.join()

    (result,) = loop.collect(0.0)
    assert [(c.finish_reason, c.token_ids) for c in result.outcome] == [("abort", [0]), ("abort", [0])]
    assert engine.closed
    assert loop.submit([request("late")])[0].reason == "engine_dead"
    with pytest.raises(StationDied, match="was closed"):
        loop.collect(10.0)
    with pytest.raises(StationDied, match="was closed"):
        loop.update(1, weights(1))
    loop.close()


def test_a_poll_that_waits_is_woken_by_closing(start) -> None:
    loop = start(VersionEngine())
    woken: list[Exception] = []

    def poll() -> None:
        try:
            loop.collect(1e6)
        except StationDied as error:
            woken.append(error)

    thread = threading.Thread(target=poll)
    thread.start()
    loop.close()
    thread.join()
    assert "was closed" in str(woken[0])


def test_statistics_count_steps_and_tokens(start) -> None:
    loop = start(VersionEngine(), version=7)
    loop.submit([request("g", n=3, max_tokens=5)])
    outcomes(loop)

    stats = loop.stats()
    assert (stats.version, stats.steps, stats.generated_tokens) == (7, 5, 15)
    assert (stats.running, stats.waiting) == (0, 0)
    assert 0 < stats.busy_s <= stats.alive_s
