"""What the loop needs of the stations that it connects, and of who watches it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from forgelite.scoring.group import ScoredGroup
from forgelite.types import Failure, Group, Prompt, StepResult, TrainingBatch, Trajectory

# group id, prompt, size -> member i is the trajectory `<group id>/<i>` or why there is none
RollOut = Callable[[str, Prompt, int], Awaitable[Sequence[Trajectory | Failure]]]
# group id, prompt, i -> member i alone
RollOutMember = Callable[[str, Prompt, int], Awaitable[Trajectory | Failure]]
# the trajectory with its score, or why it has none
ScoreMember = Callable[[Prompt, Trajectory], Awaitable[Trajectory | Failure]]
# group id, prompt, members (None: cut before it had finished)
ScoreGroup = Callable[[str, Prompt, Sequence[Trajectory | Failure | None]], Awaitable[ScoredGroup]]
Evaluate = Callable[[], Awaitable[Mapping[str, Any]]]
Save = Callable[[Mapping[str, Any]], Awaitable[None]]


@dataclass(kw_only=True, slots=True, frozen=True)
class Usage:
    """What the policy has done and is doing.

    Example: `Usage(busy_s=12.5, steps=900, generated_tokens=40960, first_versions={"g17": 3})`: of the
    groups that are being sampled one has tokens already, the first of which was sampled by version 3.
    """

    busy_s: float = 0.0  # seconds in which the engine computed
    steps: int = 0  # of the engine
    generated_tokens: int = 0
    first_versions: Mapping[str, int] = field(default_factory=dict)  # group id -> version of its oldest running token


class TrainerStation(Protocol):
    """What the loop needs of the trainer."""

    async def train_step(self, batch: TrainingBatch) -> StepResult:
        """One optimizer step."""
        ...

    async def publish(self) -> Mapping[str, Any]:
        """Make the weights of this moment available under their version; returns metrics.

        The next step may be asked for before this returns.
        """
        ...


class PolicyStation(Protocol):
    """What the loop needs of the policy."""

    async def update_weights(self, version: int) -> Mapping[str, Any]:
        """Take a published version; returns metrics once every replica serves it."""
        ...

    async def cancel(self, group_id: str) -> None:
        """End whatever is sampled or waits to be sampled for this group; nothing happens when there is nothing."""
        ...

    async def usage(self) -> Usage:
        """What the engine has done so far, and which groups it samples."""
        ...


class Observer(Protocol):
    """Who is told what happens."""

    async def on_step(self, steps: int, metrics: Mapping[str, Any], groups: Sequence[Group]) -> None:
        """`steps` steps are done; the last one trained `groups`, packed in this order (none before the first)."""
        ...

    def on_note(self, text: str) -> None:
        """Something that the user should know."""
        ...

    def on_end(self, metrics: Mapping[str, Any]) -> None:
        """The run is over, however it ended; `metrics` is the final account."""
        ...
