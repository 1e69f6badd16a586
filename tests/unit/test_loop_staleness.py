"""What the loop does with groups that nobody needs any more, on a virtual clock."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import re
import warnings

import pytest

from benchmarks.virtual_clock import run_virtual
from forgelite.buffer.ledger import State
from forgelite.types import Score
from tests.unit.fakes import OFFSET, FakeRun, make_run


def slow_members(run: FakeRun, seconds: dict[str, float], *, train_s: float = 1.0) -> None:
    """Each member takes a second before its first token, and some more after it, by the pattern of their ids."""
    generate = run.policy._generate

    async def timed(request_id, request):
        await asyncio.sleep(1)
        completion = await generate(request_id, request)
        await asyncio.sleep(next((s for pattern, s in seconds.items() if re.fullmatch(pattern, request_id)), 0.0))
        return completion

    async def train_step(batch):
        await asyncio.sleep(train_s)
        return await train(batch)

    train, run.trainer.train_step = run.trainer.train_step, train_step
    run.policy._generate = timed


def metrics(run: FakeRun) -> dict[str, int]:
    return {k.removeprefix("ledger/"): v for k, v in run.loop.ledger.metrics().items() if v}


def test_a_group_that_can_no_longer_be_young_enough_is_cancelled_once_and_its_prompt_sampled_again():
    run = make_run(depth=1, max_policy_age=1, steps=8, max_tokens=1)
    slow_members(run, {"g1/.*": 500.0})
    prompt_ids = []
    give_back = run.prompts.give_back
    run.prompts.give_back = lambda prompt: (prompt_ids.append(prompt.prompt_id), give_back(prompt))
    run_virtual(run.loop.run())
    assert metrics(run)["cancelled/stale"] == 2
    assert run.policy.cancelled == ["g1"]
    assert len(prompt_ids) == 1
    assert "g1" not in run.policy.first_versions  # its rollout has ended too
    trained = [g.prompt.prompt_id for _, groups in run.recorder.groups for g in groups]
    assert prompt_ids[0] in trained


def test_what_the_policy_says_of_one_member_counts_for_its_group():
    """A harness has a session for each member, `<group>/<member>`."""
    run = make_run(depth=1, max_policy_age=1, steps=8, max_tokens=1)
    slow_members(run, {"g1/.*": 500.0})
    usage = run.policy.usage

    async def by_member():
        told = await usage()
        return dataclasses.replace(told, first_versions={f"{name}/0": v for name, v in told.first_versions.items()})

    run.policy.usage = by_member
    run_virtual(run.loop.run())
    assert run.policy.cancelled == ["g1"]


def test_a_cancelled_prompt_is_given_up_if_so_configured():
    run = make_run(depth=1, max_policy_age=1, steps=8, max_tokens=1, reissue=False)
    slow_members(run, {"g1/.*": 500.0})
    run.prompts.give_back = lambda prompt: pytest.fail("it was given back")
    run_virtual(run.loop.run())
    assert metrics(run)["cancelled/stale"] == 2


def test_where_old_tokens_are_masked_nothing_is_cancelled_while_fresh_ones_may_come():
    run = make_run(depth=1, max_policy_age=1, steps=8, max_tokens=1, on_stale="mask_tokens")
    slow_members(run, {"g1/.*": 5.0})
    run_virtual(run.loop.run())
    assert run.policy.cancelled == []
    assert "cancelled" not in metrics(run)


def test_a_group_that_waits_for_the_engine_is_not_stale():
    """Nothing of it was sampled yet, so its first token may be fresh: the policy has said nothing about it."""
    run = make_run(depth=2, max_policy_age=2, steps=8, max_tokens=1)
    slow_members(run, {})
    run.policy.first_versions = NeverBegun()
    run_virtual(run.loop.run())
    assert run.policy.cancelled == []


class NeverBegun(dict):
    def setdefault(self, key, default=None):
        return default


@pytest.mark.parametrize(("depth", "age"), [(1, 1), (2, 2), (4, 4), (4, 1), (8, 2)])
@pytest.mark.parametrize("train_s", [0.3, 1.0, 3.0])
def test_steady_stations_reject_nothing_also_at_warm_start_and_where_the_bound_is_below_the_depth(depth, age, train_s):
    run = make_run(depth=depth, max_policy_age=age, steps=20, max_tokens=1)
    slow_members(run, {}, train_s=train_s)
    run_virtual(run.loop.run())
    assert metrics(run) == {"issued": 20 * 3 * 2, "trained": 20 * 3 * 2}


def test_a_warm_start_does_not_fill_the_window_with_the_first_version():
    """Balanced stations at depth 4: of the first batches only two are of version 0, as many as of any other version."""
    run = make_run(depth=4, max_policy_age=4, steps=20, max_tokens=1)
    slow_members(run, {}, train_s=1.0)
    run_virtual(run.loop.run())
    sampled_by = [t.spans[0].version for _, groups in run.recorder.groups for g in groups for t in g.trajectories]
    assert sampled_by.count(0) <= 2 * 3 * 2


def test_an_unbounded_stream_keeps_bounded_memory_and_counts_what_it_drops():
    run = make_run(
        depth=None, max_policy_age=50, steps=10, max_tokens=1, loop={"max_groups_in_flight": 5, "max_groups_queued": 7}
    )
    slow_members(run, {}, train_s=20.0)
    most = []
    put = run.loop._supply._queue.put
    run.loop._supply._queue.put = lambda group: (put(group), most.append(len(run.loop._supply._queue)))
    run_virtual(run.loop.run())
    assert max(most) == 7
    assert metrics(run)["rejected/overflow"] > 100
    assert run.trainer.version == 10


@pytest.mark.parametrize("surplus", ["keep", "cut"])
def test_a_batch_does_not_wait_for_its_slowest_group_where_more_were_started(surplus):
    loop = {"oversample": 4 / 3, "surplus": surplus}
    run = make_run(depth=0, max_policy_age=3, steps=4, max_tokens=1, loop=loop)
    slow_members(run, {"g1/.*": 3.5})
    run.prompts.give_back = lambda prompt: pytest.fail("nobody needed it")

    async def seconds():
        await run.loop.run()
        return asyncio.get_running_loop().time()

    assert run_virtual(seconds()) < 4 * 2 + 3
    first = [g.group_id for g in run.recorder.groups[0][1]]
    assert sorted(first) == ["g0", "g2", "g3"]
    trained = [g.group_id for _, groups in run.recorder.groups for g in groups]
    assert ("g1" in trained) == (surplus == "keep")
    assert metrics(run)["cancelled/surplus"] >= 2
    if surplus == "cut":
        assert "g1" in run.policy.cancelled


def test_a_finished_group_of_the_surplus_is_trained_by_the_next_batch():
    run = make_run(depth=0, max_policy_age=1, steps=2, max_tokens=1, loop={"oversample": 4 / 3, "surplus": "cut"})
    slow_members(run, {})
    take = run.loop._supply.take

    async def late(trainer_version):
        await asyncio.sleep(5)  # all four groups are ready by then
        return await take(trainer_version)

    run.loop._supply.take = late
    run_virtual(run.loop.run())
    assert [sorted(g.group_id for g in groups) for _, groups in run.recorder.groups] == [
        ["g0", "g1", "g2"],
        ["g3", "g4", "g5"],
    ]
    assert metrics(run)["trained"] == 2 * 3 * 2


def test_a_group_is_trained_without_its_stragglers():
    run = make_run(depth=0, max_policy_age=0, steps=3, group_size=4, max_tokens=1, loop={"complete_at": 3})
    slow_members(run, {r"g\d+/2/0": 900.0})
    run_virtual(run.loop.run())
    assert metrics(run) == {"issued": 36, "trained": 27, "cancelled": 9, "cancelled/straggler": 9}
    for _, groups in run.recorder.groups:
        for group in groups:
            assert [t.trajectory_id for t in group.trajectories] == [f"{group.group_id}/{i}" for i in (0, 1, 3)]
            assert sum(t.advantage for t in group.trajectories) == pytest.approx(0, abs=1e-5)


def test_slow_rewards_make_stragglers_too():
    run = make_run(depth=0, max_policy_age=0, steps=2, group_size=3, max_tokens=1, loop={"group_deadline_s": 30.0})
    score = run.loop._supply.flight._score_member

    async def slow(prompt, trajectory):
        await asyncio.sleep(1000 if trajectory.trajectory_id.endswith("/0") else 1)
        return await score(prompt, trajectory)

    run.loop._supply.flight._score_member = slow
    run_virtual(run.loop.run())
    assert metrics(run)["cancelled/straggler"] == 6


def test_without_members_one_by_one_a_straggler_cut_is_refused_by_name():
    with pytest.raises(ValueError, match=r"loop\.complete_at=2 .*rolled out one by one"):
        make_run(group_size=3, loop={"complete_at": 2}, roll_out_member=None)


def test_with_a_barrier_no_rollout_sees_two_versions_and_none_starts_while_an_update_is_due():
    run = make_run(depth=2, max_policy_age=4, steps=10, max_tokens=6, barrier=True)
    running, at_update = set(), []
    generate, update, start = run.policy.generate_group, run.policy.update_weights, run.loop._supply.flight.start

    def started(*arguments):
        assert not run.loop._supply._held
        start(*arguments)

    async def watched(request):
        running.add(request.request_id)
        completions = await generate(request)
        running.discard(request.request_id)
        return completions

    async def updated(version):
        at_update.append(set(running))
        return await update(version)

    run.policy.generate_group, run.policy.update_weights, run.loop._supply.flight.start = watched, updated, started
    run_virtual(run.loop.run())
    trained = [t for _, groups in run.recorder.groups for g in groups for t in g.trajectories]
    assert all(len(t.spans) == 1 for t in trained)
    assert at_update == [set()] * 10
    assert max(OFFSET + 9 - t.token_ids[-1] for t in trained) > 0  # generation does run ahead


def test_a_barrier_does_not_wait_for_a_rollout_that_was_cancelled():
    run = make_run(depth=1, max_policy_age=1, steps=2, max_tokens=1, barrier=True, loop={"oversample": 7 / 3})
    slow_members(run, {"g1/.*": 500.0, "g6/.*": 5.0})

    async def seconds():
        await run.loop.run()
        return asyncio.get_running_loop().time()

    assert run_virtual(seconds()) < 20
    assert run.policy.cancelled == ["g1"]  # by the last batch, while version 1 waits for it
    assert run.policy.held == [0, 1, 2]


@pytest.mark.parametrize("where", ["_roll_out", "_score_group"])
def test_code_that_goes_on_after_it_was_cancelled_counts_for_nothing(where):
    loop = {"oversample": 4 / 3, "surplus": "cut"}
    run = make_run(depth=0, max_policy_age=0, steps=3, max_tokens=1, reissue=False, loop=loop)
    slow_members(run, {})
    flight = run.loop._supply.flight
    calm = getattr(flight, where)

    async def stubborn(group_id, *arguments):
        result = await calm(group_id, *arguments)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(500 if group_id == "g1" else 0)
        return result

    setattr(flight, where, stubborn)
    run_virtual(run.loop.run())
    assert "g1" in run.policy.cancelled
    assert "g1" not in {g.group_id for _, groups in run.recorder.groups for g in groups}
    assert flight.rolling_out == len(flight) == 0
    assert metrics(run)["trained"] == 3 * 3 * 2


def test_the_reasons_are_in_the_metrics_of_the_step():
    run = make_run(depth=1, max_policy_age=1, steps=8, max_tokens=1)
    slow_members(run, {"g1/.*": 500.0})
    run_virtual(run.loop.run())
    assert run.recorder.lines[-1][1]["ledger/cancelled/stale"] == 2


def test_a_cancelled_group_leaves_no_coroutine_behind():
    def reward(sample, rng):
        return Score(reward=rng.random())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = make_run(depth=2, max_policy_age=2, steps=6, group_size=3, reward=reward, loop={"complete_at": 2})
        slow_members(run, {"g1/.*": 500.0, r"g\d+/1/0": 50.0})
        run_virtual(run.loop.run())
        gc.collect()
    assert run.loop.ledger.count(State.IN_FLIGHT) == 0
