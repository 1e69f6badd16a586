"""Groups that are ready to be trained.

    put ──> [queued, by rank] ──take──> judged ──┬──> a batch of whole groups
                 │                               └──> rejected (stale), reported to `on_rejected`
                 └──> no room: the oldest is rejected (overflow)

An entry leaves the queue exactly once: into a batch, or rejected for its age at the moment when the loss takes the
batch, or pushed out when the queue is full. `take` alone removes entries for training, and holds no entry across
an await: what it returns was judged against the version passed to it. What the order is, who is too old and when a
straggler holds the line is for `StalenessPolicy` to say.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forgelite.buffer.ledger import Ledger, State
from forgelite.buffer.staleness import StalenessPolicy
from forgelite.types import Group, Trajectory


@dataclass(kw_only=True, slots=True, eq=False)
class _Ready:
    rank: tuple[float, int]
    number: int
    oldest_version: int | None  # among the trained tokens of the group
    group: Group


class GroupQueue:
    """Ready groups. Not thread-safe: it belongs to the controller's event loop.

    A group without trajectories (its members were filtered, and none is sampled in its place) takes its place in a
    batch and brings nothing to it.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        policy: StalenessPolicy,
        first_in_flight: Callable[[], int | None] = lambda: None,
        on_rejected: Callable[[Group, str], None] = lambda group, reason: None,
        on_skipped: Callable[[], None] = lambda: None,
    ) -> None:
        """Args:
        ledger: every move of a trajectory is written there.
        policy: orders the groups and judges their age.
        first_in_flight: the lowest number of the groups in flight; None: nothing is.
        on_rejected: called with a group of which nothing is left, and the reason.
        on_skipped: called when a batch without a trajectory was skipped.
        """
        self._ledger = ledger
        self._policy = policy
        self._first_in_flight = first_in_flight
        self._on_rejected = on_rejected
        self._on_skipped = on_skipped
        self._ready: list[_Ready] = []  # by rank
        self._arrived: list[_Ready] = []  # those of `_ready` that were not judged at version `_judged_at`
        self._judged_at = -1
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._ready)

    def groups(self) -> list[Group]:
        """The waiting groups, in the order in which they would be taken."""
        return [entry.group for entry in self._ready]

    def put(self, group: Group) -> None:
        """Queue a scored group whose trajectories are in flight."""
        self._ledger.move(_ids(group.trajectories), State.QUEUED)
        self._append(group)

    def restore(self, groups: Sequence[Group]) -> None:
        """Queue groups that the (restored) ledger already counts as queued."""
        for group in groups:
            self._append(group)

    def wake(self) -> None:
        """A group has left flight and is not coming: it holds the line no longer."""
        self._changed.set()

    async def take(self, count: int, *, trainer_version: int) -> list[Group]:
        """Wait for `count` groups that the loss may take at `trainer_version`.

        The trainer's version does not move while the caller waits here, so every group of the returned batch is
        within the bound, and the batch is not empty: `count` groups in a row without trajectories are skipped. Nothing
        else leaves the queue before the whole batch is there, so a cancelled wait loses nothing.
        In the ledger the groups stay queued until the step is done: a step that fails has trained nothing.
        """
        while True:
            self._judge(trainer_version)
            while len(self._ready) >= count and self._may_take(self._ready[count - 1]):
                batch = [entry.group for entry in self._ready[:count]]
                del self._ready[:count]
                if any(group.trajectories for group in batch):
                    return batch
                self._on_skipped()
            self._changed.clear()
            await self._changed.wait()

    def _may_take(self, last: _Ready) -> bool:
        return self._policy.may_take(last.number, self._first_in_flight())

    def _judge(self, trainer_version: int) -> None:
        """Reject what is too old; a new version judges everything anew."""
        anew = trainer_version != self._judged_at
        self._judged_at = trainer_version
        unjudged, self._arrived = (self._ready if anew else self._arrived), []
        for entry in [e for e in unjudged if self._policy.is_stale(e.oldest_version, trainer_version)]:
            self._remove(entry)
            kept, rejected = self._policy.judge(entry.group.trajectories, trainer_version)
            self._reject(entry.group, kept, rejected, "stale")
            if kept:
                self._insert(entry.group)

    def _append(self, group: Group) -> None:
        self._arrived.append(self._insert(group))
        if (index := self._policy.overflow(len(self._ready))) is not None:
            oldest = self._ready[index]
            self._remove(oldest)
            self._reject(oldest.group, [], oldest.group.trajectories, "overflow")
        self._changed.set()

    def _insert(self, group: Group) -> _Ready:
        oldest = min(
            (version for t in group.trajectories if (version := t.oldest_trained_version()) is not None), default=None
        )
        number = group_number(group.group_id)
        entry = _Ready(rank=self._policy.rank(number, oldest), number=number, oldest_version=oldest, group=group)
        insort(self._ready, entry, key=_rank)
        return entry

    def _remove(self, entry: _Ready) -> None:
        at = bisect_left(self._ready, entry.rank, key=_rank)
        assert self._ready[at] is entry
        del self._ready[at]
        if entry in self._arrived:
            self._arrived.remove(entry)

    def _reject(self, group: Group, kept: list[Trajectory], rejected: list[Trajectory], reason: str) -> None:
        self._ledger.move(_ids(rejected), State.REJECTED, reason)
        group.trajectories = kept
        if rejected and not kept:
            self._on_rejected(group, reason)


def group_number(group_id: str) -> int:
    """The place of a group in the order in which groups start; its id is `g<number>`."""
    return int(group_id.removeprefix("g"))


def _rank(entry: _Ready) -> tuple[float, int]:
    return entry.rank


def _ids(trajectories: Sequence[Trajectory]) -> list[str]:
    return [t.trajectory_id for t in trajectories]
