"""The engine loop with an engine that samples its own version number: spans, failures, ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest

from forgelite.errors import StationDied, WeightError, WeightMismatch
from forgelite.policy.engine_loop import EngineLoop
from forgelite.types import Failure
from tests.unit.version_engine import Meanwhile, VersionEngine, request, results, started_loops, weights

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def start() -> Iterator[Callable[..., EngineLoop]]:
    with started_loops() as start:
        yield start


def test_spans_reproduce_the_version_that_sampled_each_token(start) -> None:
    engine = VersionEngine(gate=True)
    loop = start(engine)
    loop.submit([request("g", n=3, max_tokens=12)])
    for version in (1, 2, 3):
        engine.wait_inside_step()
        engine.allow(1)
        engine.wait_inside_step()
        update = Meanwhile(loop, partial(loop.update, version, weights(version)))
        engine.allow(1)
        update.result()
    engine.open()

    for completion in results(loop)["g"]:
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

    found = results(loop, 2)
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
    assert results(loop)["g"][0].token_ids == [0] * 4


def test_weights_torn_in_the_middle_are_never_served(start) -> None:
    engine = VersionEngine(gate=True)
    loop = start(engine)
    loop.submit([request("waiting")])
    engine.wait_inside_step()
    update = Meanwhile(loop, partial(loop.update, 1, weights(1, torn=True)))
    engine.allow(1)

    with pytest.raises(StationDied, match="the disk is gone"):
        update.result()
    assert loop.version == 0
    assert results(loop)["waiting"].reason == "engine_dead"
    assert loop.submit([request("new")])[0].reason == "engine_dead"


def test_a_failed_step_gives_everybody_its_cause(start) -> None:
    engine = VersionEngine(gate=True)
    loop = start(engine)
    loop.submit([request("first", n=2), request("second")])
    engine.fails = IndexError("index out of range in self")
    engine.allow(1)

    for failure in results(loop, 2).values():
        assert failure.reason == "engine_dead"
        assert "IndexError: index out of range in self" in failure.message
    assert "IndexError" in loop.submit([request("newcomer")])[0].message
    with pytest.raises(StationDied, match="IndexError"):
        loop.update(1, weights(1))
    with pytest.raises(StationDied, match="IndexError"):
        loop.collect(10.0)


def test_a_logprob_that_is_not_a_number_fails_its_member_and_the_others_go_on(start) -> None:
    engine = VersionEngine()
    engine.not_numbers = {"g/1"}
    loop = start(engine)
    loop.submit([request("g", n=3)])
    first, failure, last = results(loop)["g"]

    assert isinstance(failure, Failure)
    assert failure.reason == "not_finite"
    assert "g/1" in failure.message
    assert len(first.token_ids) == len(last.token_ids) == 4


def test_parameters_that_only_the_engine_refuses_fail_alone(start) -> None:
    loop = start(VersionEngine())
    loop.submit([request("odd", top_k=77), request("even")])

    found = results(loop, 2)
    assert (found["odd"].reason, found["odd"].message) == ("rejected", "request odd: top_k=77 is refused")
    assert len(found["even"]) == 1


def test_an_id_in_use_is_refused_until_its_result_is_out(start) -> None:
    engine = VersionEngine(gate=True)
    loop = start(engine)
    assert loop.submit([request("g"), request("g")])[1].reason == "rejected"
    assert loop.submit([request("g")])[0].reason == "rejected"
    engine.open()
    results(loop)

    assert loop.submit([request("g")]) == [None]


def test_unseeded_members_have_seeds_of_their_own_that_follow_from_the_engine_seed(start) -> None:
    def seeds(engine_seed: int) -> list[dict[str, int]]:
        engine = VersionEngine()
        loop = start(engine, seed=engine_seed)
        drawn = []
        for _ in range(2):
            loop.submit([request("a", n=4), request("b", n=4)])
            results(loop, 2)
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
    results(loop)
    loop.update(1, weights(1), keep_kv=True)
    loop.submit([request("new")])
    results(loop)

    assert engine.kv_drops == 0
    assert engine.salts["old/0"] != engine.salts["new/0"]


def test_closing_ends_requests_as_aborted_and_frees_the_engine(start) -> None:
    engine = VersionEngine(gate=True)
    loop = start(engine)
    loop.submit([request("g", n=2)])
    engine.wait_inside_step()
    closing = Meanwhile(loop, loop.close)
    engine.allow(1)
    closing.result()

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
    results(loop)

    stats = loop.stats()
    assert (stats.version, stats.steps, stats.generated_tokens) == (7, 5, 15)
    assert (stats.running, stats.waiting) == (0, 0)
    assert 0 < stats.busy_s <= stats.alive_s


def test_the_age_of_the_last_step_grows_inside_a_step_that_hangs_and_is_zero_without_work(start) -> None:
    engine = VersionEngine(gate=True)
    loop = start(engine)
    loop.submit([request("g", max_tokens=1)])
    engine.wait_inside_step()
    first = loop.stats().last_step_age_s
    second = loop.stats().last_step_age_s
    engine.allow(1)
    results(loop)
    while loop.stats().last_step_age_s:  # the thread goes to sleep after it has delivered
        pass

    assert 0 < first < second


def test_requests_that_come_after_the_engine_broke_never_reach_it(start) -> None:
    engine = VersionEngine(gate=True)
    loop = start(engine)
    loop.submit([request("first")])
    engine.wait_inside_step()
    assert loop.submit([request("second")]) == [None]
    engine.fails = IndexError("index out of range")
    engine.allow(1)

    assert [failure.reason for failure in results(loop, 2).values()] == ["engine_dead"] * 2
    assert engine.added == [["first/0"]]
