"""The real loop, queue and ledger under random schedules, on a virtual clock.

Nothing that a run can do or suffer breaks the account, the bound on age or its capacity.

A schedule holds failures, hung and slow members, slow scores, equal rewards, stale and cancelled groups, surplus and
stragglers, and a crash with a resume; in its second half the weather is calm. A wait that nothing can end is an error
of the clock (`Deadlock`), a slow one an error of the loop (`DeadlineExceeded`): neither hangs the test.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.virtual_clock import run_virtual
from forgelite.buffer.ledger import Ledger, State
from forgelite.buffer.staleness import StalenessPolicy
from forgelite.config import LoopConfig
from forgelite.errors import GenerationFailed
from forgelite.types import Failure, Score
from tests.unit.fakes import OFFSET, FakeRun, make_run

STEPS, B, N = 6, 3, 3


class Crash(Exception):
    """The process is gone."""


@contextmanager
def conservation_after_every_event() -> Iterator[None]:
    def checked(method):
        def call(self: Ledger, *arguments: Any) -> None:
            method(self, *arguments)
            self.check()
            states = [state for state in State if state in (State.IN_FLIGHT, State.QUEUED)]
            assert sum(self.count(state) for state in states) == len(self._open)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("issue", "move"):
            patch.setattr(Ledger, name, checked(getattr(Ledger, name)))
        yield


def stormy(run: FakeRun, rng: random.Random) -> None:
    """Members that fail, hang until their deadline, or straggle, until half of the steps are done."""
    calm_generate = run.policy._generate

    async def generate(request_id, request):
        draw = rng.random() if run.trainer.version < STEPS // 2 else 1.0
        if draw < 0.04:
            raise GenerationFailed("lost")
        if draw < 0.08:
            await asyncio.sleep(10_000)  # past rollout.timeout_s
        if draw < 0.2:
            await asyncio.sleep(rng.choice([3.0, 30.0]))
        await asyncio.sleep(rng.expovariate(1.0))
        return await calm_generate(request_id, request)

    async def train_step(batch):
        await asyncio.sleep(rng.expovariate(0.5))
        return await calm_train(batch)

    calm_train, run.trainer.train_step = run.trainer.train_step, train_step
    run.policy._generate = generate


def start(loop: dict[str, Any], *, seed: int, drop: bool, barrier: bool, crash_at: int | None, saved: list) -> FakeRun:
    rng = random.Random(seed)

    def reward(sample, _):
        draw = rng.random()
        return Failure(reason="raised", message="no") if draw < 0.1 else Score(reward=float(draw < 0.5))

    async def save(state):
        saved.append(json.loads(json.dumps(state)))
        if state["version"] == crash_at:
            raise Crash

    run = make_run(
        seed=seed,
        steps=STEPS,
        groups_per_step=B,
        group_size=N,
        filter_zero_variance=True,
        drop_group_on_failure=drop,
        reward=reward,
        barrier=barrier,
        save=save,
        save_every=1,
        loop={"batch_timeout_s": 20_000.0, "max_groups_in_flight": 12} | loop,
    )
    stormy(run, rng)
    return run


def ages(run: FakeRun) -> list[int]:
    """Of every trained token, told by the token itself: trainer version minus the version that sampled it."""
    return [
        age
        for trainer_version, batch in run.trainer.batches
        for age in (trainer_version - (batch.token_ids[batch.loss_mask] - OFFSET)).tolist()
    ]


@st.composite
def loops(draw: st.DrawFn) -> dict[str, Any]:
    depth = draw(st.sampled_from([0, 1, 2, 4, None]))
    age = draw(st.integers(0, 4))
    selection = draw(
        st.sampled_from(["fifo", "windowed", "freshest"] if depth is not None else ["windowed", "freshest"])
    )
    loop: dict[str, Any] = {
        "depth": depth,
        "max_policy_age": age,
        "selection": selection,
        "window": draw(st.sampled_from([None, 0, 2, 5])) if selection == "windowed" and depth is not None else None,
        "on_stale": draw(st.sampled_from(["drop_sample", "drop_group", "mask_tokens"])),
        "reissue": draw(st.booleans()),
        "sync_every": draw(st.integers(1, 1 + min(age, 2 if depth is None else depth))),
        "replace_filtered": draw(st.booleans()),
        "complete_at": draw(st.sampled_from([None, 2, 3])),
        "group_deadline_s": draw(st.sampled_from([None, 2.0, 20.0])),
        "max_groups_queued": 6 if depth is None else B * (depth + 1) + 6,
    }
    if selection != "fifo" and depth is not None and loop["window"] != 0 and draw(st.booleans()):
        loop |= {"oversample": draw(st.sampled_from([1.3, 2.0])), "surplus": draw(st.sampled_from(["keep", "cut"]))}
    return loop


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    loop=loops(),
    drop=st.booleans(),
    barrier=st.booleans(),
    crash_at=st.sampled_from([None, None, 1, 2, 4]),
)
def test_every_schedule_keeps_the_account_the_bound_and_the_capacity(seed, loop, drop, barrier, crash_at):
    saved: list[dict[str, Any]] = []
    with conservation_after_every_event():
        run = start(loop, seed=seed, drop=drop, barrier=barrier, crash_at=crash_at, saved=saved)
        runs = [run]
        try:
            run_virtual(run.loop.run())
        except Crash:
            resumed = start(loop, seed=seed + 1, drop=drop, barrier=barrier, crash_at=None, saved=saved)
            resumed.loop.load_state_dict(saved[-1])
            resumed.trainer.version = resumed.policy.version = saved[-1]["version"]
            runs.append(resumed)
            run_virtual(resumed.loop.run())
    ledger = runs[-1].loop.ledger
    assert ledger.count(State.IN_FLIGHT) == ledger.count(State.QUEUED) == 0
    assert [version for r in runs for version, _ in r.trainer.batches] == list(range(STEPS))  # it still trains
    trained = [t for r in runs for _, groups in r.recorder.groups for g in groups for t in g.trajectories]
    if crash_at is None:
        assert ledger.count(State.TRAINED) == len(trained)
    assert len({t.trajectory_id for t in trained}) == len(trained)  # nothing is trained twice
    for r in runs:
        assert 0 <= min(ages(r), default=0) <= max(ages(r), default=0) <= loop["max_policy_age"]
        assert crash_at is not None or r.loop._supply.flight.rolling_out == len(r.loop._supply.flight) == 0
    if barrier:
        assert all(len(t.spans) == 1 for t in trained)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    depth=st.integers(0, 3),
    window=st.sampled_from([None, 0, 1, 3, 4, 7]),
    surplus=st.sampled_from([0, 0, 1, 3]),
    crash_at=st.sampled_from([None, 3]),
)
def test_pacing_and_order_alone_keep_the_bound_that_they_prove(seed, depth, window, surplus, crash_at):
    loop = {"depth": depth, "max_policy_age": 99, "selection": "fifo" if window is None else "windowed"}
    loop |= {"window": window, "max_groups_in_flight": 50}
    surplus = surplus if window else 0  # refused where nobody may overtake
    loop |= {"oversample": 1 + surplus / B}
    saved: list[dict[str, Any]] = []
    runs = [start(loop, seed=seed, drop=False, barrier=False, crash_at=crash_at, saved=saved)]
    try:
        run_virtual(runs[0].loop.run())
    except Crash:
        runs.append(start(loop, seed=seed + 1, drop=False, barrier=False, crash_at=None, saved=saved))
        runs[1].loop.load_state_dict(saved[-1])
        runs[1].trainer.version = runs[1].policy.version = saved[-1]["version"]
        run_virtual(runs[1].loop.run())
    bound = StalenessPolicy(config=LoopConfig(steps=STEPS, groups_per_step=B, **loop)).age_bound
    assert bound == depth + math.ceil(((window or 0) + surplus) / B)
    assert max(max(ages(r)) for r in runs) <= bound
    assert runs[-1].loop.ledger.count(State.REJECTED) == 0


def test_without_a_window_a_straggler_outgrows_what_pacing_gives():
    """The bound above is one that can be broken: here the order alone bounds nothing."""
    loop = {"depth": 1, "max_policy_age": 99, "max_groups_in_flight": 50}
    oldest = []
    for seed in range(20):
        run = start(loop, seed=seed, drop=False, barrier=False, crash_at=None, saved=[])
        run_virtual(run.loop.run())
        oldest.append(max(ages(run)))
    assert max(oldest) > 2
