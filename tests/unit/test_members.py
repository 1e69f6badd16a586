"""Groups that do not wait for their slowest members."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.virtual_clock import run_virtual
from forgelite.errors import StationDied
from forgelite.loop.members import first_members
from forgelite.types import Failure
from tests.unit.trajectories import make_trajectory


def finish(after_s: float, *, fails: bool = False, dies: bool = False, log: list | None = None):
    async def member():
        try:
            await asyncio.sleep(after_s)
        except asyncio.CancelledError:
            if log is not None:
                log.append(after_s)
            raise
        if dies:
            raise StationDied("the policy died")
        return Failure(reason="raised", message="no") if fails else make_trajectory(f"g0/{after_s:g}")

    return member()


def run(members, **options):
    """What the members end with (None: cut), and the seconds that it took."""

    async def main():
        begun = asyncio.get_running_loop().time()
        results = await first_members(members, **{"complete_at": len(members), "deadline_s": None} | options)
        return [r if r is None or isinstance(r, Failure) else r.trajectory_id for r in results], (
            asyncio.get_running_loop().time() - begun
        )

    return run_virtual(main())


def test_a_group_is_complete_when_so_many_members_are_scored_and_the_others_are_ended():
    log = []
    results, seconds = run([finish(1), finish(9, log=log), finish(3), finish(2)], complete_at=2)
    assert results == ["g0/1", None, None, "g0/2"]
    assert seconds == pytest.approx(2)
    assert log == [9]


def test_failures_do_not_count_as_members():
    results, seconds = run([finish(1, fails=True), finish(2), finish(3), finish(9)], complete_at=2)
    assert [type(r).__name__ for r in results] == ["Failure", "str", "str", "NoneType"]
    assert seconds == pytest.approx(3)


def test_a_group_that_cannot_be_complete_any_more_ends_with_its_last_member():
    results, _ = run([finish(1, fails=True), finish(2, fails=True), finish(3)], complete_at=2)
    assert results[2] == "g0/3"


def test_at_its_deadline_a_group_is_complete_with_what_it_has():
    results, seconds = run([finish(1), finish(2), finish(90), finish(80)], deadline_s=10)
    assert results == ["g0/1", "g0/2", None, None]
    assert seconds == pytest.approx(10)


def test_one_member_is_no_group_so_the_deadline_waits_for_a_second():
    results, seconds = run([finish(1), finish(20), finish(90)], deadline_s=10)
    assert results == ["g0/1", "g0/20", None]
    assert seconds == pytest.approx(20)


def test_a_group_that_is_complete_before_its_deadline_does_not_wait_for_it():
    assert run([finish(1), finish(2)], deadline_s=10)[1] == pytest.approx(2)


def test_the_death_of_a_station_passes_through_and_ends_the_others():
    log = []
    with pytest.raises(StationDied, match="the policy died"):
        run([finish(1, dies=True), finish(9, log=log)], complete_at=1)
    assert log == [9]


def test_a_cancelled_group_ends_its_members():
    log = []

    async def main():
        group = asyncio.ensure_future(
            first_members([finish(8, log=log), finish(9, log=log)], complete_at=2, deadline_s=5)
        )
        await asyncio.sleep(1)
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group

    run_virtual(main())
    assert sorted(log) == [8, 9]
