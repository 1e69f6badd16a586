"""kill -9 of the process that holds torchstore's volume."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from monarch.actor import default_bootstrap_cmd, this_host

from forgelite.errors import DeadlineExceeded, WeightError
from forgelite.mesh.environment import station_environment
from forgelite.mesh.processes import watch_faults
from forgelite.weights.carried import CarriedStore
from forgelite.weights.torchstore_carrier import TorchstoreCarrier
from forgelite.weights.torchstore_client import start_store
from tests.unit.weights_memory import MemoryDirectory

DEADLINE_S = 4.0


def volume_processes(name: str) -> Any:
    environment = station_environment(PYTHONPATH=os.getcwd(), FORGELITE_STATION=name)
    return this_host().spawn_procs(
        per_host={"procs": 1}, bootstrap_command=lambda _: default_bootstrap_cmd().with_env(environment), name=name
    )


def kill_9(station: str) -> None:
    """Kill the process with this FORGELITE_STATION in its environment."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        if child.environ().get("FORGELITE_STATION") == station:
            child.send_signal(signal.SIGKILL)
            child.wait(10)


async def started(name: str) -> tuple[CarriedStore, Any]:
    processes = volume_processes(name)
    await start_store(processes, name=name)
    carrier = TorchstoreCarrier(name=name, deadline_s=DEADLINE_S)
    return CarriedStore(carrier=carrier, directory=MemoryDirectory()), processes


@pytest.mark.slow
async def test_the_death_of_the_volume_is_an_error_within_a_bound_and_the_next_run_starts_clean() -> None:
    weights = {"w": torch.arange(1000.0)}
    with watch_faults(lambda mesh, cause: None):
        store, _ = await started(f"volume-{os.getpid()}-a")
        await store.publish(1, weights)
        into = {"w": torch.zeros(1000)}
        await store.fetch(1, into)
        kill_9(f"volume-{os.getpid()}-a")
        for attempt in (store.fetch(1, into), store.publish(2, weights)):
            start = time.monotonic()
            with pytest.raises((WeightError, DeadlineExceeded), match=r"torchstore volume-\d+-a: "):
                await attempt
            assert time.monotonic() - start < DEADLINE_S + 2
        successor, processes = await started(f"volume-{os.getpid()}-b")
        await successor.publish(1, weights)
        into = {"w": torch.zeros(1000)}
        await successor.fetch(1, into)
        assert torch.equal(into["w"], weights["w"])
        await processes.stop()
