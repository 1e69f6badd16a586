"""The real loop, buffer, ledger and rollouts on a policy that samples its own version as token."""

from __future__ import annotations

import asyncio
import re

import pytest

from forgelite.buffer.ledger import State
from forgelite.errors import DeadlineExceeded, ForgeliteError, StationDied
from forgelite.scoring.reward import PROCESS
from forgelite.types import Failure, Score
from tests.unit.fakes import OFFSET, make_run


def check_stamps_and_ages(run, max_policy_age):
    """Whatever was trained: token, version stamp and age agree, judged by the token itself."""
    for trainer_version, batch in run.trainer.batches:
        sampled = batch.versions >= 0
        assert (batch.token_ids[sampled] == OFFSET + batch.versions[sampled]).all()
        assert (sampled == (batch.token_ids >= OFFSET)).all()
        ages = trainer_version - (batch.token_ids[batch.loss_mask] - OFFSET)
        assert ages.min() >= 0
        assert ages.max() <= max_policy_age


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 4])
async def test_spans_ages_and_rejections_are_exact_at_every_depth(depth):
    run = make_run(depth=depth, max_policy_age=1, steps=12, seed=depth)
    await run.loop.run()
    assert len(run.trainer.batches) == 12
    check_stamps_and_ages(run, 1)
    for steps, groups in run.recorder.groups:
        for trajectory in (t for g in groups for t in g.trajectories):
            versions = [t - OFFSET for t, m in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if m]
            assert trajectory.age(steps - 1) == steps - 1 - min(versions)
            for span in trajectory.spans:
                assert set(trajectory.token_ids[span.start : span.end]) == {OFFSET + span.version}


async def test_an_unbounded_stream_is_bounded_by_rejection_alone():
    run = make_run(depth=None, max_policy_age=1, steps=12, loop={"max_groups_in_flight": 20})
    await run.loop.run()
    check_stamps_and_ages(run, 1)
    assert run.loop.ledger.metrics()["ledger/rejected/stale"] > 0


async def test_updates_arrive_in_the_middle_of_sequences():
    run = make_run(depth=2, max_policy_age=4, steps=12, max_tokens=12)
    await run.loop.run()
    mixed = [t for _, groups in run.recorder.groups for g in groups for t in g.trajectories if len(t.spans) > 1]
    assert mixed


async def test_the_reported_ages_are_those_of_what_was_trained():
    run = make_run(depth=2, max_policy_age=2, steps=8)
    await run.loop.run()
    for (steps, metrics), (_, groups) in zip(run.recorder.lines, run.recorder.groups, strict=True):
        ages = [t.age(steps - 1) for g in groups for t in g.trajectories]
        assert metrics["age/max"] == max(ages)
        assert metrics["age/mean"].value == pytest.approx(sum(ages) / len(ages))
        assert sum(metrics["age/histogram"].values()) == len(ages)


async def test_a_synchronous_run_trains_only_its_own_version():
    run = make_run(depth=0, max_policy_age=0, steps=8)
    await run.loop.run()
    for trainer_version, batch in run.trainer.batches:
        assert set(batch.versions[batch.loss_mask].tolist()) == {trainer_version}
    assert run.loop.ledger.count(State.REJECTED) == 0


async def test_a_synchronous_run_repeats_itself():
    batches = []
    for _ in range(2):
        run = make_run(depth=0, max_policy_age=0, steps=6, filter_zero_variance=True, reward=coin)
        await run.loop.run()
        batches.append([(v, b.token_ids.tolist(), b.advantages.tolist()) for v, b in run.trainer.batches])
    assert batches[0] == batches[1]


async def test_nothing_is_sampled_that_no_step_trains():
    run = make_run(depth=3, max_policy_age=9, steps=5)
    await run.loop.run()
    assert run.loop.ledger.issued == run.loop.ledger.count(State.TRAINED) == 5 * 3 * 2


async def test_the_prompt_of_a_stale_group_is_sampled_again():
    run = make_run(depth=None, max_policy_age=0, steps=6, on_stale="drop_group", loop={"max_groups_in_flight": 12})
    given_back = []
    give_back = run.prompts.give_back
    run.prompts.give_back = lambda prompt: (given_back.append(prompt.prompt_id), give_back(prompt))
    await run.loop.run()
    assert given_back
    lost = run.loop.ledger.metrics()
    assert lost["ledger/rejected/stale"] + lost["ledger/cancelled/stale"] == 2 * len(given_back)


def coin(sample, rng):
    return Score(reward=float(rng.random() < 0.5))


async def test_groups_of_equal_rewards_are_filtered_and_replaced():
    run = make_run(depth=1, steps=6, filter_zero_variance=True, reward=coin)
    await run.loop.run()
    assert run.loop.ledger.metrics()["ledger/filtered/zero_variance"] > 0
    for _, groups in run.recorder.groups:
        assert len(groups) == 3
        assert all(len({t.score.reward for t in g.trajectories}) > 1 for g in groups)


async def test_filtered_groups_are_not_replaced_if_so_configured_and_no_batch_is_empty():
    def mostly_equal(sample, rng):
        return Score(reward=float(rng.random() < 0.2))

    run = make_run(steps=8, filter_zero_variance=True, reward=mostly_equal, loop={"replace_filtered": False})
    await run.loop.run()
    sizes = [sum(bool(g.trajectories) for g in groups) for _, groups in run.recorder.groups]
    assert len(sizes) == 8
    assert all(1 <= size <= 3 for size in sizes)
    assert min(sizes) < 3
    ledger = run.loop.ledger
    assert ledger.count(State.TRAINED) == 2 * sum(sizes)
    check_stamps_and_ages(run, 1)


async def test_a_run_whose_rewards_are_all_equal_says_so_and_ends_at_its_deadline_naming_the_gate():
    run = make_run(
        filter_zero_variance=True, reward=lambda sample, rng: Score(reward=1.0), loop={"batch_timeout_s": 0.2}
    )
    with pytest.raises(
        DeadlineExceeded, match=r"a training batch \(loop\.batch_timeout_s\): 0 of 3 groups are queued.*zero_variance"
    ):
        await run.loop.run()
    assert "equal rewards" in run.recorder.notes[0]
    assert run.trainer.batches == []


async def test_a_failed_sample_is_counted_and_the_rest_of_its_group_is_trained():
    def fail_first(sample, rng):
        if sample.sample_id.endswith("/0"):
            return Failure(reason="raised", message="no")
        return Score(reward=rng.random())

    run = make_run(steps=3, group_size=3, reward=fail_first)
    await run.loop.run()
    assert run.loop.ledger.metrics()["ledger/failed/raised"] >= 9
    assert all(len(g.trajectories) == 2 for _, groups in run.recorder.groups for g in groups)
    assert any(re.match(r"g\d+/0 failed \(raised\): no", note) for note in run.recorder.notes)


async def test_a_failed_sample_takes_its_group_along_if_asked():
    def fail_sometimes(sample, rng):
        if rng.random() < 0.3:
            return Failure(reason="timeout", message="late")
        return Score(reward=rng.random())

    run = make_run(steps=4, reward=fail_sometimes, drop_group_on_failure=True)
    await run.loop.run()
    assert run.loop.ledger.metrics()["ledger/filtered/group_failed"] > 0
    assert all(len(g.trajectories) == 2 for _, groups in run.recorder.groups for g in groups)


async def test_a_run_in_which_everything_fails_ends_with_the_reason():
    run = make_run(reward=lambda sample, rng: Failure(reason="raised", message="bad reward"))
    with pytest.raises(ForgeliteError, match=r"all members of the last 32 groups failed.*bad reward"):
        await run.loop.run()


async def test_the_death_of_the_reward_process_is_left_to_its_client():
    def dies(sample, rng):
        if int(sample.sample_id.partition("/")[0].removeprefix("g")) < 40:
            return Failure(reason=PROCESS, message="the process died")
        return Score(reward=rng.random())

    run = make_run(steps=2, depth=1, reward=dies)
    await run.loop.run()
    assert run.loop.ledger.metrics()["ledger/failed/process"] == 80


async def test_a_run_that_waits_says_what_it_waits_for(monkeypatch):
    monkeypatch.setattr("forgelite.loop.loop.NOTICE_S", 0.05)
    run = make_run(steps=1)
    arrived = asyncio.Event()
    generate = run.policy.generate_group

    async def slow(request):
        await arrived.wait()
        return await generate(request)

    run.policy.generate_group = slow
    run.recorder.on_note = lambda text: (run.recorder.notes.append(text), arrived.set())
    await run.loop.run()
    assert re.match(
        r"waiting for a training batch \(loop.batch_timeout_s\) for 0\.\d+ s: 0 of 3 groups are queued, 3 in flight, "
        r"3 rolling out and 0 scoring \(oldest: g0, rolling out, started 0\.\d+ s ago\), held by the policy or the ",
        run.recorder.notes[0],
    )


async def test_what_a_station_says_after_the_loop_is_still_heard():
    died = asyncio.get_running_loop().create_future()
    run = make_run(steps=2, station_died=died)
    await run.loop.run()
    assert not died.cancelled()


async def test_the_costs_of_an_update_are_reported_once():
    run = make_run(steps=6, depth=2, max_policy_age=4, sync_every=3)
    updates = iter(range(100))

    async def update(version):
        run.policy.version = version
        return {"sync/number": next(updates)}

    run.policy.update_weights = update
    await run.loop.run()
    assert [m["sync/number"] for _, m in run.recorder.lines if "sync/number" in m] == [0, 1]


async def test_the_final_account_is_told_however_the_run_ends():
    run = make_run(reward=lambda sample, rng: Failure(reason="raised", message="no"))
    with pytest.raises(ForgeliteError):
        await run.loop.run()
    assert run.recorder.final["ledger/in_flight"] == 0
    assert run.recorder.final["ledger/issued"] == sum(run.recorder.final[f"ledger/{s}"] for s in State)


async def test_the_death_of_a_station_ends_the_run_with_its_cause():
    died = asyncio.get_running_loop().create_future()
    run = make_run(steps=1000, station_died=died)
    asyncio.get_running_loop().call_later(0.05, died.set_exception, StationDied("the policy died: Killed(sig=9)"))
    with pytest.raises(StationDied, match="Killed"):
        await run.loop.run()
    assert run.loop.ledger.count(State.IN_FLIGHT) == 0


async def test_a_bug_in_a_rollout_is_not_swallowed():
    run = make_run()

    async def broken(*_):
        raise RuntimeError("a bug")

    run.policy.generate_group = broken
    with pytest.raises(RuntimeError, match="a bug"):
        await run.loop.run()


async def test_evaluation_runs_before_the_first_step_at_its_interval_and_after_the_last():
    async def evaluate():
        return {"eval/reward": 0.5}

    run = make_run(steps=5, evaluate=evaluate, evaluate_every=2)
    await run.loop.run()
    assert [steps for steps, metrics in run.recorder.lines if "eval/reward" in metrics] == [0, 2, 4, 5]


async def test_no_steps_is_an_evaluation_alone():
    async def evaluate():
        return {"eval/reward": 0.5}

    run = make_run(steps=0, evaluate=evaluate)
    await run.loop.run()
    assert run.recorder.lines == [(0, {"eval/reward": 0.5})]
    assert run.loop.ledger.issued == 0


async def test_the_policy_is_updated_every_sync_every_steps_and_at_the_end():
    run = make_run(steps=7, depth=2, max_policy_age=4, sync_every=3)
    await run.loop.run()
    assert run.policy.held == [0, 3, 6, 7]
    check_stamps_and_ages(run, 4)
