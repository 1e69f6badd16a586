"""The queue of ready groups."""

from __future__ import annotations

import asyncio

import pytest

from forgelite.buffer.ledger import Ledger, State
from forgelite.buffer.queue import GroupQueue
from tests.unit.trajectories import make_group


def make_queue(**options):
    ledger = Ledger()
    rejected = []
    settings = {"capacity": 10, "max_policy_age": 1, "on_stale": "drop_sample"} | options
    queue = GroupQueue(
        ledger=ledger, on_rejected=lambda group, reason: rejected.append((group.group_id, reason)), **settings
    )
    return queue, ledger, rejected


def put(queue, ledger, group):
    ledger.issue(t.trajectory_id for t in group.trajectories)
    queue.put(group)


async def test_groups_leave_in_the_order_in_which_they_came():
    queue, ledger, _ = make_queue()
    for name in ("g0", "g1", "g2"):
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
    queue, ledger, rejected = make_queue(capacity=2)
    for name in ("g0", "g1", "g2"):
        put(queue, ledger, make_group(name))
    assert [g.group_id for g in queue.groups()] == ["g1", "g2"]
    assert ledger.metrics()["ledger/rejected/overflow"] == 2
    assert rejected == [("g0", "overflow")]
