"""The processes that a carrier needs beside the trainer and the policy."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from typing import Any

from monarch.actor import Actor, concurrent_endpoint

from forgelite.config import MeshConfig
from forgelite.mesh.fleet import Fleet
from forgelite.weights import SHARED_MEMORY
from forgelite.weights.opening import StoreSettings
from forgelite.weights.remote_puller import PullerSetup, WeightPuller
from forgelite.weights.remote_source import WeightSource
from forgelite.weights.torchstore_client import start_store


class VolumeHost(Actor):
    """Keeps a process alive in which torchstore has its volume."""

    @concurrent_endpoint
    async def ready(self) -> None:
        """Answers when the process is up."""


async def start_carrier(
    fleet: Fleet,
    settings: StoreSettings,
    mesh: MeshConfig,
    environment: Mapping[str, str],
    on_phase: Callable[[str], None],
) -> Any | None:
    """Spawn what the carrier of a run needs; gives the puller, which the policy's store asks, where there is one.

    Args:
        fleet: in which the processes live and die.
        settings: of the store.
        mesh: the deadlines.
        environment: of the processes.
        on_phase: called with what was chosen.

    Raises:
        ConfigError: the carrier cannot be had here.
        StationDied, DeadlineExceeded: a process did not come up.
    """
    if settings.carrier == "torchstore":
        volume = fleet.spawn("weights-volume", VolumeHost, environment=environment)
        await volume.call(volume.actor.ready.call_one(), mesh.setup_timeout_s, "ready")
        await start_store(volume.processes, name=settings.volume)
    if settings.carrier != "rdma":
        return None
    source = fleet.spawn("weights-source", WeightSource, environment=environment)
    await source.call(source.actor.ready.call_one(), mesh.setup_timeout_s, "ready")
    puller = fleet.spawn("weights-puller", WeightPuller, environment=environment)
    setup = PullerSetup(
        sources={platform.node(): source.actor},
        run_id=settings.run_id,
        folder=str(SHARED_MEMORY),
        retain=settings.retain,
        served_in_place=settings.served_in_place,
        timeout_s=settings.timeout_s,
        fingerprint=settings.fingerprint,
    )
    backend = await puller.call(puller.actor.setup.call_one(setup), mesh.setup_timeout_s, "setup")
    on_phase(f"weights are pulled by RDMA over {backend}")
    return puller.actor
