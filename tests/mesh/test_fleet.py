"""Real processes: spawned, told apart, heard when they fail, noticed when they die, ended together."""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from forgelite.mesh.environment import root_environment, station_environment

os.environ.update(root_environment(os.environ))  # before Monarch is imported: a death is noticed within a poll

import monarch.actor
from monarch.actor import Actor, MeshFailure, concurrent_endpoint

from forgelite.errors import ConfigError, DeadlineExceeded, StationDied
from forgelite.mesh.fleet import Fleet
from tests.apps import is_gone


class Worker(Actor):
    """Does what a test asks for."""

    @concurrent_endpoint
    async def process(self) -> tuple[int, str, str]:
        return os.getpid(), os.environ["FORGELITE_STATION"], os.environ["OMP_NUM_THREADS"]

    @concurrent_endpoint
    async def leave_a_note_at_exit(self, path: str) -> None:
        atexit.register(Path(path).write_text, "ended")

    @concurrent_endpoint
    async def refuse(self) -> None:
        raise ConfigError("model.path: nothing there")

    @concurrent_endpoint
    async def break_down(self) -> None:
        raise ZeroDivisionError("a bug")

    @concurrent_endpoint
    async def hang(self) -> None:
        await asyncio.Event().wait()


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with Fleet(stop_timeout_s=10) as fleet:
        yield fleet


def spawn(fleet: Fleet, name: str = "worker", **options):
    return fleet.spawn(name, Worker, environment=station_environment(PYTHONPATH=os.getcwd()), **options)


async def test_a_station_is_a_process_of_its_own_with_its_own_environment(fleet: Fleet):
    station = spawn(fleet)
    pid, name, threads = await station.call(station.actor.process.call_one(), 30, "process")
    assert pid != os.getpid()
    assert (name, threads) == ("worker", "1")


async def test_an_error_of_the_library_keeps_its_type_across_the_border(fleet: Fleet):
    station = spawn(fleet)
    with pytest.raises(ConfigError, match=r"model\.path: nothing there"):
        await station.call(station.actor.refuse.call_one(), 30, "refuse")


async def test_a_bug_in_an_actor_is_raised_and_the_actor_lives_on(fleet: Fleet):
    station = spawn(fleet)
    with pytest.raises(Exception, match="a bug"):
        await station.call(station.actor.break_down.call_one(), 30, "break_down")
    assert await station.call(station.actor.process.call_one(), 30, "process")


async def test_a_call_that_is_not_answered_ends_at_its_deadline_and_is_named(fleet: Fleet):
    station = spawn(fleet)
    with pytest.raises(DeadlineExceeded, match=r"0\.2 s for worker\.hang"):
        await station.call(station.actor.hang.call_one(), 0.2, "hang")


async def test_a_killed_station_ends_the_calls_to_it_and_is_noticed_by_everybody_else(fleet: Fleet):
    station = spawn(fleet)
    pid, *_ = await station.call(station.actor.process.call_one(), 30, "process")
    hanging = asyncio.ensure_future(station.call(station.actor.hang.call_one(), 30, "hang"))
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(StationDied, match=r"worker died: .*Killed"):
        await hanging
    with pytest.raises(StationDied, match=r"worker died: .*Killed"):
        await asyncio.wait_for(asyncio.shield(fleet.died), 10)


async def test_the_death_of_an_expendable_station_is_left_to_those_who_use_it(fleet: Fleet):
    station = spawn(fleet, "reward", expendable=True)
    pid, *_ = await station.call(station.actor.process.call_one(), 30, "process")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(StationDied):
        await station.call(station.actor.hang.call_one(), 30, "hang")
    assert not fleet.died.done()


async def test_a_death_during_set_up_ends_the_other_set_ups(fleet: Fleet):
    first, second = spawn(fleet, "first"), spawn(fleet, "second")
    pid, *_ = await first.call(first.actor.process.call_one(), 30, "process")
    setups = asyncio.ensure_future(
        fleet.together(second.call(second.actor.hang.call_one(), 60, "setup"), asyncio.Event().wait())
    )
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(StationDied, match="first died"):
        await asyncio.wait_for(setups, 15)


async def test_the_end_of_a_fleet_is_the_end_of_its_processes():
    async with Fleet(stop_timeout_s=10) as fleet:
        stations = [spawn(fleet, "first"), spawn(fleet, "second")]
        pids = [(await s.call(s.actor.process.call_one(), 30, "process"))[0] for s in stations]
    assert all(is_gone(process) for process in map(_process, pids) if process)
    assert not fleet.died.done()


async def test_what_a_station_has_registered_for_its_exit_is_called(tmp_path: Path):
    async with Fleet(stop_timeout_s=10) as fleet:
        station = spawn(fleet)
        await station.call(station.actor.leave_a_note_at_exit.call_one(str(tmp_path / "note")), 30, "leave_a_note")
    assert (tmp_path / "note").read_text() == "ended"


async def test_a_process_that_was_killed_on_purpose_ends_nobody_else_also_after_the_fleet():
    """Monarch reports it half a second later, and ends the controller where nobody listens any more."""
    async with Fleet(stop_timeout_s=10) as fleet:
        station = spawn(fleet, "replica", expendable=True)
        pid, *_ = await station.call(station.actor.process.call_one(), 30, "process")
        os.kill(pid, signal.SIGKILL)
        await fleet.stop(station)
    reported = monarch.actor.unhandled_fault_hook
    async with asyncio.timeout(10):
        heard: asyncio.Queue[str] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def hear(failure: MeshFailure) -> None:
            reported(failure)
            loop.call_soon_threadsafe(heard.put_nowait, failure.mesh_name)

        monarch.actor.unhandled_fault_hook = hear
        while not (await heard.get()).startswith("replica"):
            pass
    monarch.actor.unhandled_fault_hook = reported
    assert not fleet.died.done()


def _process(pid: int) -> psutil.Process | None:
    return psutil.Process(pid) if psutil.pid_exists(pid) else None
