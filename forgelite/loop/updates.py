"""The way of a version to the policy: publish, wait for a barrier where there is one, update, serve."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from forgelite.loop.stations import PolicyStation, TrainerStation
from forgelite.observe.gates import OpenGates


class WeightUpdates:
    """One update at a time, beside the training that goes on. What goes wrong with it ends the run."""

    def __init__(
        self,
        *,
        trainer: TrainerStation,
        policy: PolicyStation,
        gates: OpenGates,
        on_served: Callable[[int], None],
        barrier: Callable[[int], Awaitable[None]] | None,
    ) -> None:
        """Args:
        trainer: publishes.
        policy: takes what was published.
        gates: where the waits are told.
        on_served: called with the version when every serving replica has acknowledged it.
        barrier: awaited, with the version, before the policy takes it; None: it takes it between two engine steps.
        """
        self._trainer = trainer
        self._policy = policy
        self._gates = gates
        self._on_served = on_served
        self._barrier = barrier
        self._task: asyncio.Task[None] | None = None
        self._metrics: Mapping[str, Any] = {}

    async def begin(self, version: int, tasks: asyncio.TaskGroup) -> None:
        """Publish the trainer's weights of this moment and give them to the policy, in a task of `tasks`.

        Waits for the update before it, and until the publication has been asked for.
        """
        await self.finish()
        self._task = tasks.create_task(self._publish_and_update(version))
        await asyncio.sleep(0)

    async def finish(self) -> None:
        """Wait until the version that was last begun is served."""
        if self._task is not None:
            await self._task
            self._task = None

    def take_metrics(self) -> Mapping[str, Any]:
        """The metrics of an update that is through; none when they were taken already."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    async def _publish_and_update(self, version: int) -> None:
        with self._gates.at(f"version {version} to be published (weights.timeout_s)", lambda: "held by the trainer"):
            published = await self._trainer.publish()
        if self._barrier is not None:
            await self._barrier(version)
        with self._gates.at(f"the policy to take version {version} (weights.timeout_s)", lambda: "held by the policy"):
            updated = await self._policy.update_weights(version)
        self._metrics = {**published, **updated}
        self._on_served(version)
