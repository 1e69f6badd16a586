"""The queue of ready groups."""

from __future__ import annotations

import asyncio

import pytest

from forgelite.buffer.ledger import Ledger, State
from forgelite.buffer.queue import GroupQueue
from forgelite.buffer.staleness import StalenessPolicy
from forgelite.config import LoopConfig
from tests.unit.trajectories import make_group


def make_queue(in_flight=(), **options):
    ledger = Ledger()
    rejected = []
    config = LoopConfig(steps=10, groups_per_step=1, **{"max_policy_age": 1} | options)
    queue = GroupQueue(
        ledger=ledger,
        policy=StalenessPolicy(config=config),
        first_in_flight=lambda: min(in_flight, default=None),
        on_rejected=lambda group, reason: rejected.append((group.group_id, reason)),
    )
    return queue, ledger, rejected


def put(queue, ledger, group):
    ledger.issue(t.trajectory_id for t in group.trajectories)
    queue.put(group)


async def test_groups_leave_in_the_order_in_which_they_started():
    queue, ledger, _ = make_queue()
    for name in ("g2", "g0", "g1"):
        put(queue, ledger, make_group(name))
    assert [g.group_id for g in await queue.take(2, trainer_version=0)] == ["g0", "g1"]
    assert len(queue) == 1


async def test_a_group_that_is_too_old_when_the_loss_takes_it_is_rejected_and_counted():
    queue, ledger, rejected = make_queue()
    put(queue, ledger, make_group("g0", versions=(0, 0)))
    put(queue, ledger, make_group("g1", versions=(2, 2)))
    assert [g.group_id for g in await queue.take(1, trainer_version=2)] == ["g1"]
    assert ledger.metrics()["ledger/rejected/stale"] == 2
    assert rejected == [("g0", "stale")]


async def test_a_batch_waits_until_enough_young_groups_are_there():
    queue, ledger, _ = make_queue()
    put(queue, ledger, make_group("g0", versions=(0, 0)))
    taking = asyncio.ensure_future(queue.take(1, trainer_version=5))
    await asyncio.sleep(0)
    assert not taking.done()
    put(queue, ledger, make_group("g1", versions=(5, 5)))
    assert [g.group_id for g in await taking] == ["g1"]


async def test_a_cancelled_wait_loses_nothing():
    queue, ledger, _ = make_queue()
    put(queue, ledger, make_group("g0"))
    taking = asyncio.ensure_future(queue.take(2, trainer_version=0))
    await asyncio.sleep(0)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert [g.group_id for g in queue.groups()] == ["g0"]
    assert ledger.count(State.QUEUED) == 2


async def test_a_full_queue_pushes_out_the_oldest_group_and_counts_it():
    queue, ledger, rejected = make_queue(depth=None, max_groups_queued=2)
    for name in ("g0", "g1", "g2"):
        put(queue, ledger, make_group(name))
    assert [g.group_id for g in queue.groups()] == ["g1", "g2"]
    assert ledger.metrics()["ledger/rejected/overflow"] == 2
    assert rejected == [("g0", "overflow")]


async def test_in_fifo_a_batch_waits_for_the_straggler_and_goes_on_when_it_is_gone():
    in_flight = {0}
    queue, ledger, _ = make_queue(in_flight, selection="fifo")
    put(queue, ledger, make_group("g1"))
    taking = asyncio.ensure_future(queue.take(1, trainer_version=0))
    await asyncio.sleep(0)
    assert not taking.done()
    in_flight.clear()
    queue.wake()
    assert [g.group_id for g in await taking] == ["g1"]


async def test_in_a_window_a_straggler_is_overtaken_until_the_window_ends():
    queue, ledger, _ = make_queue({0}, window=2)
    for name in ("g1", "g2", "g3"):
        put(queue, ledger, make_group(name))
    assert [g.group_id for g in await queue.take(2, trainer_version=0)] == ["g1", "g2"]
    taking = asyncio.ensure_future(queue.take(1, trainer_version=0))
    await asyncio.sleep(0)
    assert not taking.done()
    taking.cancel()


async def test_freshest_first_leaves_the_old_ones_until_they_are_too_old():
    queue, ledger, rejected = make_queue(selection="freshest")
    for name, version in (("g0", 0), ("g1", 2), ("g2", 1)):
        put(queue, ledger, make_group(name, versions=(version, version)))
    assert [g.group_id for g in await queue.take(1, trainer_version=2)] == ["g1"]
    assert [g.group_id for g in await queue.take(1, trainer_version=2)] == ["g2"]
    assert rejected == [("g0", "stale")]


async def test_a_full_queue_of_the_freshest_pushes_out_the_oldest():
    queue, ledger, rejected = make_queue(selection="freshest", depth=None, max_groups_queued=2)
    for name, version in (("g0", 2), ("g1", 0), ("g2", 1)):
        put(queue, ledger, make_group(name, versions=(version, version)))
    assert rejected == [("g1", "overflow")]


async def test_a_group_that_was_young_enough_is_judged_again_by_the_next_version():
    queue, ledger, rejected = make_queue()
    put(queue, ledger, make_group("g0", versions=(0, 0)))
    put(queue, ledger, make_group("g1", versions=(1, 1)))
    assert [g.group_id for g in await queue.take(1, trainer_version=1)] == ["g0"]
    put(queue, ledger, make_group("g2", versions=(1, 3)))
    put(queue, ledger, make_group("g3", versions=(3, 3)))
    assert [g.group_id for g in await queue.take(1, trainer_version=3)] == ["g3"]
    assert [name for name, _ in rejected] == ["g1", "g2"]


async def test_masked_groups_are_taken_by_the_age_of_what_is_left():
    queue, ledger, _ = make_queue(selection="freshest", on_stale="mask_tokens")
    put(queue, ledger, make_group("g0", versions=(0, 3)))
    put(queue, ledger, make_group("g1", versions=(2, 3)))
    assert [g.group_id for g in await queue.take(2, trainer_version=3)] == ["g0", "g1"]


async def test_a_group_that_was_pushed_out_before_it_was_judged_is_gone_once():
    queue, ledger, rejected = make_queue(depth=None, max_groups_queued=1)
    taking = asyncio.ensure_future(queue.take(1, trainer_version=5))
    await asyncio.sleep(0)  # from here on only what arrives is judged
    put(queue, ledger, make_group("g0", versions=(0, 0)))
    put(queue, ledger, make_group("g1", versions=(5, 5)))
    assert [g.group_id for g in await taking] == ["g1"]
    assert rejected == [("g0", "overflow")]
