"""How far generation may run ahead, what makes a batch, and how old a sample may be: one object decides.

| decision | asked by               | answer                                                                           |
|----------|------------------------|----------------------------------------------------------------------------------|
| admit    | the loop, for room     | how many groups may start now                                                    |
| select   | the queue, for a batch | the order of the ready groups; whether the last one of a batch may be taken now  |
| evict    | the queue              | which trajectories are too old for the loss; which group goes where all is full  |
| cancel   | the loop, at a take    | which groups in flight can only become too old, and how many of them are surplus |

Loop and queue only ask. Numbers go in and numbers come out, so every rule is tested without either. B is
`loop.groups_per_step`, the version is the number of completed steps, and batch b is trained at version b.

Pacing. The *place* of a group is the number of groups ahead of it when it starts: taken, ready or in flight. Its turn
is batch place // B. It may start when

    place // B - served  <=  lead,    lead = min(depth, max_policy_age)    served: the version that the policy has

because a group of a later turn would be born too old. At warm start the lead is not there at once: it grows by one
place with each group that has been finished. So one batch is in flight at first, the first version does not fill the
whole window before the trainer has taken anything, and a straggler of the first batch is overtaken as any other. The
pace cannot close itself: the trainer waits for batch `taken`, `served` lags it by less than `sync_every` <= lead + 1
versions, and all groups that were taken had been finished.

The bound on age. Let a group start at version s in place p, hence p < (s + lead + 1) B + surplus (that of
`loop.oversample`). Groups that end without being trained only move those behind them forward, so the batch of the
group is at most (p + overtakers) // B, where overtakers are groups that started later and are trained earlier.

    fifo       Groups are trained in the order of their numbers: nobody overtakes, and there is no surplus. Its batch
               is at most s + lead, so its age is at most  lead.
    windowed   Oldest first among the ready. A ready group is overtaken by none. One in flight holds the line as soon
               as a taken group would be more than `window` numbers behind the first in flight, so at most `window`
               groups overtake it, and its batch is at most ((s + lead + 1) B + surplus - 1 + window) // B: its age is
               at most  lead + ceil((window + surplus) / B).  window=0 is fifo. Without a window a straggler holds up
               nobody, and the order alone bounds nothing.
    freshest   Newest first; an old group may wait for ever. The order alone bounds nothing.

What the order does not bound is bounded by rejection: whatever the order, depth and surplus, the queue asks `judge` for
each trajectory at the trainer's version when the loss takes the batch, and no queue or prefetch lies between the
judgement and the loss. A group of the unbounded stream (`depth: null`) is bounded by this alone.

Cancellation. The next batch is trained at version `taken` or later. What a version v with taken - v > max_policy_age
has begun can therefore only be rejected, so a group whose first token is of such a version is cancelled while it is
still sampled. Its members start together; with `drop_sample` one that got its slot in the engine a version later goes
with them. With `mask_tokens` nothing is cancelled: the tokens that are still to come may be young enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from forgelite.config import LoopConfig
from forgelite.types import Trajectory

OnStale = Literal["drop_sample", "drop_group", "mask_tokens"]


@dataclass(kw_only=True, slots=True, frozen=True)
class Progress:
    """Where the groups of a run are. Example: `Progress(taken=3, finished=68, served=2, ready=20, in_flight=12)`."""

    taken: int  # batches that the trainer has taken; the next one is trained at this version or a later one
    finished: int  # groups that were ready since this process began: taken, or waiting
    served: int  # the version that every serving replica has acknowledged
    ready: int  # scored groups that wait
    in_flight: int  # groups that are sampled or scored


@dataclass(kw_only=True, slots=True, frozen=True)
class StalenessPolicy:
    """Decides admit, select, evict and cancel from the keys of `LoopConfig`.

    Example: `StalenessPolicy(config).admit(Progress(taken=0, finished=0, served=0, ready=0, in_flight=0))` is
    `config.groups_per_step`.
    """

    config: LoopConfig

    @property
    def lead(self) -> int | None:
        """Batches that generation may run ahead; None: an unbounded stream."""
        depth = self.config.depth
        return None if depth is None else min(depth, self.config.max_policy_age)

    @property
    def window(self) -> int | None:
        """Groups that may overtake one that is in flight; None: any number."""
        return 0 if self.config.selection == "fifo" else self.config.window

    @property
    def age_bound(self) -> int | None:
        """The age that pacing and selection alone guarantee; None: they guarantee none, `max_policy_age` does."""
        if self.lead is None or self.window is None or self.config.selection == "freshest":
            return None
        return self.lead + math.ceil((self.window + self.config.surplus_groups) / self.config.groups_per_step)

    # ---- admit ----

    def admit(self, progress: Progress) -> int:
        """How many groups may start now.

        A surplus starts together with the groups of a batch and never alone, or at depth 0 it would be sampled by the
        version that is just being replaced.
        """
        config, surplus = self.config, self.config.surplus_groups
        if config.depth == 0 and surplus == 0 and progress.in_flight:
            # A synchronous run repeats bit for bit only if the replacements of filtered groups start together, not
            # in the order in which scores happen to arrive.
            return 0
        place, limit = self._place(progress), self._limit(progress)
        if progress.taken >= config.steps or place >= limit:
            return 0
        return max(0, min(limit + surplus - place, config.max_groups_in_flight - progress.in_flight))

    def _place(self, progress: Progress) -> int:
        """Of the next group that starts."""
        return progress.taken * self.config.groups_per_step + progress.ready + progress.in_flight

    def _limit(self, progress: Progress) -> int:
        """The first place that may not start; nothing is sampled that no step will train."""
        size = self.config.groups_per_step
        places = self.config.steps * size
        if self.lead is None:
            return places
        return min(places, (progress.served + 1) * size + min(self.lead * size, progress.finished))

    # ---- select ----

    def rank(self, number: int, oldest_version: int | None) -> tuple[float, int]:
        """Ready groups are taken in the order of their ranks, the lowest first.

        Args:
            number: of the group, in the order in which groups start.
            oldest_version: among its trained tokens; None: it has none, and fills its place at once.
        """
        if self.config.selection == "freshest":
            return (-math.inf if oldest_version is None else -oldest_version), -number
        return 0, number

    def may_take(self, number: int, first_in_flight: int | None) -> bool:
        """Whether a batch whose last group (by rank) has this number may be taken now.

        Args:
            number: of that group.
            first_in_flight: the lowest number in flight; None: nothing is.
        """
        if self.config.selection == "freshest" or self.window is None or first_in_flight is None:
            return True
        return number <= first_in_flight + self.window

    # ---- evict ----

    def is_stale(self, oldest_version: int | None, trainer_version: int) -> bool:
        """Whether the loss at `trainer_version` may not take a token of `oldest_version`."""
        return oldest_version is not None and trainer_version - oldest_version > self.config.max_policy_age

    def judge(
        self, trajectories: Sequence[Trajectory], trainer_version: int
    ) -> tuple[list[Trajectory], list[Trajectory]]:
        """What the loss may take of one group, and what it may not: see `drop_stale`."""
        return drop_stale(
            trajectories,
            trainer_version=trainer_version,
            max_policy_age=self.config.max_policy_age,
            on_stale=self.config.on_stale,
        )

    def overflow(self, ready: int) -> int | None:
        """Which of so many ready groups has to go because there are too many: the index of the oldest, by rank.

        None: there is room.
        """
        if ready <= self.config.max_groups_queued:
            return None
        return ready - 1 if self.config.selection == "freshest" else 0

    # ---- cancel ----

    def is_hopeless(self, first_version: int, progress: Progress) -> bool:
        """Whether what `first_version` has begun to sample can only be rejected."""
        return self.config.on_stale != "mask_tokens" and self.is_stale(first_version, progress.taken)

    def surplus_in_flight(self, progress: Progress) -> int:
        """How many groups in flight nobody needs, now that a batch was taken; the oldest ones go.

        Behind the last batch all; before it, with `loop.surplus: cut`, those beyond the pace.
        """
        if progress.taken >= self.config.steps:
            return progress.in_flight
        if self.config.surplus == "keep":
            return 0
        beyond = self._place(progress) - self._limit(progress)
        return max(0, min(beyond, progress.in_flight, self.config.surplus_groups))


def drop_stale(
    trajectories: Sequence[Trajectory], *, trainer_version: int, max_policy_age: int, on_stale: OnStale
) -> tuple[list[Trajectory], list[Trajectory]]:
    """Split one group into what the loss may take and what is too old.

    With `mask_tokens`, tokens older than the bound leave the loss mask (in place) and the trajectory stays as long
    as one trained token is left.

    Returns:
        (kept, rejected), together the trajectories that were given.
    """
    stale = [t for t in trajectories if t.age(trainer_version) > max_policy_age]
    if not stale:
        return list(trajectories), []
    if on_stale == "drop_group":
        return [], list(trajectories)
    if on_stale == "mask_tokens":
        for trajectory in stale:
            for span in trajectory.spans:
                if trainer_version - span.version > max_policy_age:
                    trajectory.loss_mask[span.start : span.end] = [False] * (span.end - span.start)
        stale = [t for t in stale if not any(t.loss_mask)]
    dropped = {t.trajectory_id for t in stale}
    return [t for t in trajectories if t.trajectory_id not in dropped], stale
