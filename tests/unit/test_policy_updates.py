"""The four ways to take new weights, with an engine that samples its own version number."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgelite.errors import DeadlineExceeded, StationDied, WeightError, WeightMismatch
from forgelite.policy.batch import Batch
from forgelite.policy.engine_loop import EngineLoop
from forgelite.policy.groups import GroupProgress
from forgelite.policy.updates import SwapFailed, Update, WeightUpdates
from forgelite.types import Completion, Failure
from tests.unit.version_engine import (
    PROMPT,
    Meanwhile,
    VersionEngine,
    positions,
    request,
    results,
    started_loops,
    weights,
)

pytestmark = pytest.mark.timeout(60)

MODES = ("in_flight", "drain", "abort")
MODES_AND_KV = [("in_flight", True), *((mode, False) for mode in MODES)]


@pytest.fixture
def start() -> Iterator[Callable[..., EngineLoop]]:
    with started_loops() as start:
        yield start


def update(loop: EngineLoop, version: int, mode: str = "in_flight", *, faults: dict | None = None, **options: Any):
    """A command that updates to weights which sample `version`."""
    return partial(loop.update, version, weights(version, **(faults or {})), mode=mode, **options)


def sampling(loop: EngineLoop, engine: VersionEngine, tokens: int, **options: Any) -> None:
    """Submit request `g` and return inside the step that samples the token after its first `tokens`."""
    loop.submit([request("g", **options)])
    engine.wait_inside_step()
    for _ in range(tokens):
        engine.allow(1)
        engine.wait_inside_step()


@pytest.mark.parametrize(("mode", "keep_kv"), MODES_AND_KV)
def test_tokens_flip_exactly_at_the_recorded_boundary(start, mode: str, keep_kv: bool) -> None:
    engine = VersionEngine(gate=True)
    loop = start(engine)
    sampling(loop, engine, 2, n=2, max_tokens=8)
    asked = Meanwhile(loop, update(loop, 1, mode, keep_kv=keep_kv))
    loop.submit([request("later")])
    engine.open()
    report = asked.result()
    found = results(loop, 2)

    boundary = 8 if mode == "drain" else 3
    for completion in found["g"]:
        assert completion.token_ids == [0] * boundary + [1] * (8 - boundary)
        assert [span.end for span in completion.spans] == sorted({boundary, 8})
        assert completion.logprobs == positions(8)
    assert found["later"][0].token_ids == [1] * 4
    assert (report.version, report.mode, report.held) == (1, mode, 1 if mode == "drain" else 0)
    assert report.recomputed == (0 if keep_kv or mode == "drain" else 2)
    assert engine.kv_drops == (0 if keep_kv else 1)


@pytest.mark.parametrize("tokens", range(7))
@pytest.mark.parametrize(("mode", "keep_kv"), MODES_AND_KV)
def test_an_interrupt_at_any_token_changes_nothing_when_the_weights_are_the_same(
    start, mode: str, keep_kv: bool, tokens: int
) -> None:
    engine = VersionEngine(gate=True)
    loop = start(engine)
    loop.submit([request("other", max_tokens=20)])
    engine.wait_inside_step()
    loop.submit([request("g", n=2, max_tokens=6)])
    for _ in range(tokens):
        engine.allow(1)
        engine.wait_inside_step()
    asked = Meanwhile(loop, partial(loop.update, 1, weights(0), mode=mode, keep_kv=keep_kv))
    engine.open()
    asked.result()

    for completion in results(loop, 2)["g"]:
        assert completion.token_ids == [0] * 6
        assert completion.logprobs == positions(6)
        assert completion.finish_reason == "length"


def test_a_drain_admits_what_it_held_in_order_when_the_last_running_request_has_ended(start) -> None:
    engine = VersionEngine(gate=True)
    loop = start(engine)
    sampling(loop, engine, 1, max_tokens=5)
    asked = Meanwhile(loop, update(loop, 1, "drain"))
    assert loop.submit([request("first"), request("second", n=2)]) == [None, None]
    assert loop.submit([request("third")]) == [None]
    for _ in range(3):  # of the five tokens, one is sampled and one is being sampled
        engine.allow(1)
        engine.wait_inside_step()
    assert engine.added == [["g/0"]]
    engine.open()

    assert asked.result().held == 3
    results(loop, 4)
    assert engine.added == [["g/0"], ["first/0"], ["second/0", "second/1"], ["third/0"]]


def test_a_drain_with_nothing_running_is_made_at_once(start) -> None:
    engine = VersionEngine()
    loop = start(engine)
    assert update(loop, 1, "drain", drain_timeout_s=0.0)().version == 1


def test_a_drain_past_its_deadline_says_who_still_runs_and_the_old_version_serves_on(start) -> None:
    engine = VersionEngine(gate=True)
    loop = start(engine)
    sampling(loop, engine, 1, n=3, max_tokens=9)
    asked = Meanwhile(loop, update(loop, 1, "drain", drain_timeout_s=0.0))
    loop.submit([request("held")])
    engine.allow(2)  # the one in which the update was asked for, and the first of the drain
    with pytest.raises(
        DeadlineExceeded, match=r"drain_timeout_s=0 passed and 3 sequences of 1 requests .*\(g\); version 0 still"
    ):
        asked.result()
    engine.open()

    found = results(loop, 2)
    assert found["held"][0].token_ids == [0] * 4
    assert found["g"][2].token_ids == [0] * 9
    assert update(loop, 1, "drain")().version == loop.version == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_request_can_be_aborted_while_it_is_held_running_or_resubmitted(start, mode: str) -> None:
    engine = VersionEngine(gate=True)
    loop = start(engine)
    sampling(loop, engine, 1, n=2, max_tokens=9)
    asked = Meanwhile(loop, update(loop, 1, mode))
    loop.submit([request("later")])
    engine.allow(1)
    engine.wait_inside_step()  # the update lies behind, or, with drain, the requests are held
    loop.abort(["g", "later"])
    engine.allow(1)
    found = results(loop, 2)
    asked.result()

    assert [c.finish_reason for c in [*found["g"], *found["later"]]] == ["abort"] * 3
    assert [c.logprobs for c in found["g"]] == [positions(3)] * 2


@pytest.mark.parametrize("mode", MODES)
def test_a_swap_that_is_refused_leaves_the_old_version_serving(start, mode: str) -> None:
    engine = VersionEngine(gate=True)
    loop = start(engine)
    sampling(loop, engine, 2, n=2, max_tokens=6)
    asked = Meanwhile(loop, update(loop, 1, mode, faults={"refused": True}))
    loop.submit([request("later")])
    engine.open()
    with pytest.raises(WeightError, match="do not agree"):
        asked.result()

    found = results(loop, 2)
    assert [c.token_ids for c in found["g"]] == [[0] * 6] * 2
    assert [c.logprobs for c in found["g"]] == [positions(6)] * 2
    assert found["later"][0].token_ids == [0] * 4
    assert (loop.version, engine.kv_drops) == (0, 0)
    assert update(loop, 1, mode)().version == 1


@pytest.mark.parametrize("mode", MODES)
def test_weights_that_do_not_fit_never_interrupt_anybody(start, mode: str) -> None:
    engine = VersionEngine(gate=True)
    loop = start(engine)
    sampling(loop, engine, 1)
    with pytest.raises(WeightMismatch):
        update(loop, 1, mode, faults={"misfit": True})()
    engine.open()

    assert results(loop)["g"][0].token_ids == [0] * 4
    assert engine.added == [["g/0"]]


@pytest.mark.parametrize("mode", MODES)
def test_a_write_that_fails_half_way_ends_the_update_and_everybody_who_waits(start, mode: str) -> None:
    engine = VersionEngine(gate=True)
    loop = start(engine)
    sampling(loop, engine, 1)
    asked = Meanwhile(loop, update(loop, 1, mode, faults={"torn": True}))
    loop.submit([request("later")])
    engine.open()
    with pytest.raises(StationDied, match="writing version 1 failed half-way: OSError: the disk is gone"):
        asked.result()

    found = results(loop, 2)
    assert found["later"].reason == "engine_dead"
    assert loop.version == 0
    if mode != "drain":  # a drained request had ended before
        assert found["g"].reason == "engine_dead"


@pytest.mark.parametrize("ends_by", ["close", "step"])
def test_a_loop_that_ends_ends_a_drain_and_what_it_held(start, ends_by: str) -> None:
    engine = VersionEngine(gate=True)
    loop = start(engine)
    sampling(loop, engine, 1)
    asked = Meanwhile(loop, update(loop, 1, "drain"))
    loop.submit([request("held")])
    engine.allow(1)
    engine.wait_inside_step()
    if ends_by == "close":
        closing = Meanwhile(loop, loop.close)
    else:
        engine.fails = OSError("a rank is gone")
    engine.open()
    with pytest.raises(StationDied, match="was closed" if ends_by == "close" else "a rank is gone"):
        asked.result()

    found = results(loop, 2)
    if ends_by == "close":
        closing.result()
        assert [found["held"][0].finish_reason, found["g"][0].finish_reason] == ["abort", "abort"]
    else:
        assert found["held"].reason == found["g"].reason == "engine_dead"
    with pytest.raises(StationDied):
        update(loop, 2)()


def test_a_second_update_waits_for_the_first(start) -> None:
    engine = VersionEngine(gate=True)
    loop = start(engine)
    sampling(loop, engine, 1)
    first = Meanwhile(loop, update(loop, 1, "drain"))
    begun: list[int] = []

    def load() -> dict[str, int]:
        begun.append(loop.version)
        return {"w": 2}

    second = threading.Thread(target=partial(loop.update, 2, load))
    second.start()
    engine.allow(1)
    engine.wait_inside_step()  # draining still
    assert begun == []
    engine.open()
    assert first.result().version == 1
    second.join(10.0)

    assert begun == [1]
    assert engine.prepared == [1, 2]
    assert loop.version == 2


@pytest.mark.parametrize("mode", MODES)
def test_an_update_to_the_version_that_an_update_has_put_in_use_does_nothing(start, mode: str) -> None:
    engine = VersionEngine(gate=True)
    loop = start(engine)
    update(loop, 3)()
    sampling(loop, engine, 1)
    report = update(loop, 3, mode)()

    assert engine.prepared == [3]
    assert (report.version, report.mode, report.paused_s) == (3, mode, 0.0)


def test_the_version_that_the_engine_was_built_with_is_replaced_by_the_published_one(start) -> None:
    engine = VersionEngine()
    loop = start(engine, version=3)
    update(loop, 3)()

    assert engine.prepared == [3]


@pytest.mark.parametrize("mode", MODES)
def test_the_version_does_not_fall_while_requests_are_sampled(start, mode: str) -> None:
    engine = VersionEngine(gate=True)
    loop = start(engine, version=5)
    sampling(loop, engine, 1)
    asked = Meanwhile(loop, update(loop, 4, mode))
    engine.open()
    with pytest.raises(WeightError, match="version 4 is older than 5, and 1 requests"):
        asked.result()

    assert results(loop)["g"][0].logprobs == positions(4)
    assert update(loop, 4, mode)().version == 4


@pytest.mark.parametrize(("mode", "keep_kv"), [("drain", True), ("abort", True), ("barrier", False)])
def test_a_mode_that_means_nothing_is_refused(start, mode: str, keep_kv: bool) -> None:
    loop = start(VersionEngine())
    with pytest.raises(WeightError, match=mode):
        update(loop, 1, mode, keep_kv=keep_kv)()


def test_a_resubmitted_sequence_has_its_tokens_its_budget_and_a_seed_of_its_own(start) -> None:
    engine = VersionEngine(gate=True)
    loop = start(engine)
    loop.submit([request("other", max_tokens=40)])
    engine.wait_inside_step()
    loop.submit([request("g", seed=7)])
    engine.allow(1)
    engine.wait_inside_step()
    before = dict(engine.seeds)
    loop.submit([request("queued", seed=7)])  # is cut before its first token
    asked = Meanwhile(loop, update(loop, 1, "abort"))
    engine.open()
    asked.result()
    results(loop, 2)

    assert engine.prompts["g/0"] == [*PROMPT, 0]
    assert engine.prompts["queued/0"] == [*PROMPT]
    assert engine.seeds["g/0"] != before["g/0"]  # or it would draw the numbers of its first token again
    assert engine.seeds["queued/0"] == before["g/0"]
    assert engine.salts["g/0"] == engine.salts["queued/0"] == "version 1"


class Schedule:
    """Batch and updates without their thread, and a record of what was asked and told."""

    def __init__(self) -> None:
        self.engine = VersionEngine()
        self.batch = Batch(self.engine, seed=0, version=0, stop_texts=None)
        self.updates = WeightUpdates(self.engine, self.batch)
        self.asked: list[Update] = []
        self.submitted: dict[str, Any] = {}
        self.saved: list[Completion] = []  # unfinished ones, to be resumed
        self.results: dict[str, list[Any]] = {}
        self.told: dict[tuple[str, int], list[int]] = {}  # tokens of the reports, by request and member
        self.numbers = count()

    def submit(self, n: int, max_tokens: int, progress: bool, resume: bool) -> None:
        name, partials = f"r{next(self.numbers)}", None
        fitting = [c for c in self.saved if len(c.token_ids) <= max_tokens and not self._newer(c)]
        if resume and fitting:
            partials, n = (fitting[-1],), 1
        options = {"partials": partials, "progress_s": 0.0 if progress else None}
        asked = request(name, n=n, max_tokens=max_tokens, **options)
        self.submitted[name] = asked
        self.batch.admit([asked])

    def _newer(self, completion: Completion) -> bool:
        return any(span.version > self.batch.version for span in completion.spans)

    def abort(self, which: int) -> None:
        self.batch.abort([f"r{which}"])

    def update(self, mode: str, keep_kv: bool, fault: str | None) -> None:
        if self.asked and not self.asked[-1].outcome.done():  # the caller lets in one at a time
            return
        version = self.batch.version + 1
        prepared = self.engine.prepare_weights(weights(version, **({fault: True} if fault else {}))())
        keep = keep_kv and mode == "in_flight"
        wanted = Update(version=version, put_in_use=prepared, mode=mode, keep_kv=keep, drain_timeout_s=1e6)
        self.asked.append(wanted)
        self.updates.begin(wanted)

    def steps(self, number: int) -> None:
        for _ in range(number):
            if self.batch.live:
                self.batch.step()
            self.updates.advance()
            self.hear()

    def hear(self) -> None:
        for news in self.batch.take_news():
            if isinstance(news, GroupProgress):
                assert news.request_id not in self.results
                for member in news.members:
                    told = self.told.setdefault((news.request_id, member.index), [])
                    partials = self.submitted[news.request_id].partials or ()
                    assert member.start == len(told) + sum(len(p.token_ids) for p in partials)
                    told.extend(member.token_ids)
                    end = member.start + len(member.token_ids)
                    assert (member.spans[0].start, member.spans[-1].end) == (member.start, end)
            else:
                self.results.setdefault(news.request_id, []).append(news.outcome)
                if isinstance(news.outcome, list):
                    self.saved += [c for c in news.outcome if c.finish_reason == "abort"]

    def end(self, how: str) -> None:
        if how == "broken":
            self.batch.fail_all(Failure(reason="engine_dead", message="broken"))
            self.updates.cancel(StationDied("broken"))
        elif how == "closed":
            self.batch.abort_all()
            self.updates.cancel(StationDied("closed"))
        while self.batch.live or self.batch.held:
            self.steps(1)
        self.updates.advance()
        self.hear()


OPERATIONS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 3), st.integers(1, 6), st.booleans(), st.booleans()),
    st.tuples(st.just("abort"), st.integers(0, 8)),
    st.tuples(st.just("update"), st.sampled_from(MODES), st.booleans(), st.sampled_from([None, None, "refused"])),
    st.tuples(st.just("steps"), st.integers(1, 4)),
)


@settings(max_examples=400, deadline=None)
@given(operations=st.lists(OPERATIONS, max_size=25), how=st.sampled_from(["run out", "closed", "broken"]))
def test_over_any_schedule_every_request_ends_once_with_every_token_once(operations: list[tuple], how: str) -> None:
    schedule = Schedule()
    for name, *arguments in operations:
        getattr(schedule, name)(*arguments)
    schedule.hear()
    schedule.end(how)

    assert {name: len(each) for name, each in schedule.results.items()} == dict.fromkeys(schedule.submitted, 1)
    assert all(each.outcome.done() for each in schedule.asked)
    for name, (outcome,) in schedule.results.items():
        asked = schedule.submitted[name]
        if isinstance(outcome, Failure):
            assert how == "broken"
            continue
        for index, completion in enumerate(outcome):
            assert completion.token_ids == [s.version for s in completion.spans for _ in range(s.start, s.end)]
            assert completion.logprobs == positions(len(completion.token_ids))
            budget = asked.sampling.max_tokens
            whole = len(completion.token_ids) == budget
            assert len(completion.token_ids) <= budget
            assert completion.finish_reason == ("length" if whole else "abort")
            if asked.progress_s is not None:
                given = len(asked.partials[0].token_ids) if asked.partials else 0
                assert schedule.told.get((name, index), []) == completion.token_ids[given:]


def test_the_engine_is_broken_when_its_weights_are_undefined() -> None:
    schedule = Schedule()
    schedule.submit(2, 4, True, False)
    with pytest.raises(SwapFailed, match="writing version 1"):
        schedule.update("abort", False, "torn")
    schedule.end("broken")

    with pytest.raises(StationDied):
        schedule.asked[0].outcome.result(0)
    assert schedule.results["r0"][0].reason == "engine_dead"
