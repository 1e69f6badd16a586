"""Sample and score without training: the loop of a run, with a policy whose weights never change.

    prompts ──> roll out ──> score ──> queue ──take──> counted, recorded

Batches, order, failures, deadlines and the ledger are those of `forgelite.loop.Loop`, which runs as it is. Two things
stand where the trainer and the new weights would be. Step k is the batch that step k of a run would train, and since
version 0 has sampled it, its age there is k - 1. The record says just that: to train from it, `loop.max_policy_age`
must allow such ages. In the ledger what was recorded counts as trained, for it has gone all the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from forgelite.config import LoopConfig
from forgelite.loop import Usage
from forgelite.types import StepResult, TrainingBatch


class SamplesGroups(Protocol):
    """What generating alone needs of the policy, besides its rollouts."""

    async def cancel(self, group_id: str) -> None:
        """End whatever is sampled for this group."""
        ...

    async def usage(self) -> Usage:
        """What the engine has done so far."""
        ...


class BatchCounter:
    """Stands where the trainer does: counts the batches that it would have trained."""

    def __init__(self) -> None:
        self._batches = 0

    async def train_step(self, batch: TrainingBatch) -> StepResult:
        """Count. The loop goes on by this number; the version that is logged stays that of the weights."""
        self._batches += 1
        return StepResult(version=self._batches, metrics={"version": 0})

    async def publish(self) -> Mapping[str, Any]:
        """Nothing has changed, so there is nothing to publish."""
        return {}


class FrozenPolicy:
    """The policy, to which no update comes: the loop may go on, and every token stays stamped with version 0."""

    def __init__(self, policy: SamplesGroups) -> None:
        self._policy = policy

    async def update_weights(self, version: int) -> Mapping[str, Any]:
        """Acknowledge at once."""
        return {}

    async def cancel(self, group_id: str) -> None:
        """See `PolicyStation`."""
        await self._policy.cancel(group_id)

    async def usage(self) -> Usage:
        """See `PolicyStation`."""
        return await self._policy.usage()


def untrained(config: LoopConfig) -> LoopConfig:
    """The same loop with a bound that no batch exceeds: nothing that is sampled here is too old to be written down."""
    return config.model_copy(update={"max_policy_age": max(config.steps, config.max_policy_age)})
