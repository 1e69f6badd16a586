"""A policy service as a run has it: replicas in processes of their own, and a store that they read."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.policy_model import ENGINE, replica_environment
from benchmarks.weight_sync_arena import ManifestsInMemory
from forgelite.weights import WeightStore

SETUP_S = 180.0
REQUEST_S = 120.0


@dataclass(kw_only=True, slots=True, frozen=True)
class Served:
    """A service that is up.

    Example: `async with serve(folder) as served: await served.service.generate_group(request)`.
    """

    service: Any  # forgelite.policy.service.PolicyService
    processes: dict[str, Any]  # by the name of the replica, the last that was started
    store: WeightStore  # of the trainer's side


@asynccontextmanager
async def serve(folder: Path, *, replicas: int = 1) -> AsyncIterator[Served]:
    """Start a service for the model in `folder`; everything of it is gone at the end."""
    from forgelite.mesh.fleet import Fleet  # imports Monarch, which reads the environment
    from forgelite.policy.replicas import ReplicaSettings
    from forgelite.policy.service import PolicyService
    from forgelite.policy_stations import ReplicaLauncher, ReplicaPlan

    run_id = f"bench-policy-{os.getpid()}"
    plan = ReplicaPlan(
        model_path=str(folder),
        engine=ENGINE,
        seed=0,
        swap="zero_copy",
        open_reader=partial(WeightStore, directory=ManifestsInMemory(), run_id=run_id),
        environment=replica_environment(),
        setup_timeout_s=SETUP_S,
    )
    processes: dict[str, Any] = {}
    store = WeightStore(directory=ManifestsInMemory(), run_id=run_id, retain=1, served_in_place=replicas)
    async with Fleet(stop_timeout_s=15.0) as fleet:
        launcher = ReplicaLauncher(fleet, plan)

        async def start(name: str) -> Any:
            processes[name] = await launcher.start(name)
            return processes[name]

        service = PolicyService(
            start,
            settings=ReplicaSettings(replicas=replicas),
            request_timeout_s=REQUEST_S,
        )
        try:
            await service.start()
            yield Served(service=service, processes=processes, store=store)
        finally:
            await service.close()
            store.close()
