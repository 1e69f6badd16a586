"""The process of a replica is ended for good, whatever state it is in."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator

import psutil
import pytest

from forgelite.mesh.environment import root_environment, station_environment

os.environ.update(root_environment(os.environ))  # before Monarch is imported: a death is noticed within a poll

from monarch.actor import Actor, concurrent_endpoint

from forgelite.mesh.fleet import Fleet
from forgelite.policy_stations import ProcessOfReplica
from tests.apps import is_gone


class Worker(Actor):
    """Says which process it is."""

    @concurrent_endpoint
    async def process_id(self) -> int:
        return os.getpid()


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with Fleet(stop_timeout_s=10) as fleet:
        yield fleet


@pytest.mark.parametrize("state", ["running", "stopped", "dead", "unknown"])
async def test_a_replica_is_killed_whether_it_runs_is_stopped_or_is_dead(fleet: Fleet, state: str):
    station = fleet.spawn("policy-0", Worker, environment=station_environment(PYTHONPATH=os.getcwd()), expendable=True)
    ended: list[str] = []
    process = ProcessOfReplica(station, fleet, on_end=lambda: ended.append("once"))
    pid = await station.call(station.actor.process_id.call_one(), 30, "process_id")
    if state != "unknown":  # it was lost before it told its process id
        process.watch(pid)
    if state == "stopped":
        os.kill(pid, signal.SIGSTOP)
    elif state == "dead":
        os.kill(pid, signal.SIGKILL)
    await process.kill()
    await process.kill()

    assert not psutil.pid_exists(pid) or is_gone(psutil.Process(pid))
    assert ended == ["once"]
