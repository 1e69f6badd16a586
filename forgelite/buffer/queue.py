"""Groups that are ready to be trained, first in, first out.

    put ──> [queued] ──take──> age check ──┬──> a batch of whole groups
                                           └──> rejected, reported to `on_rejected`

An entry leaves the queue exactly once: into a batch, or rejected for its age at the moment when the loss takes the
batch, or pushed out when the queue is full. `take` alone removes entries for training, and holds no entry across
an await: what it returns was judged against the version passed to it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from forgelite.buffer.ledger import Ledger, State
from forgelite.buffer.staleness import OnStale, drop_stale
from forgelite.types import Group, Trajectory


class GroupQueue:
    """Ready groups. Not thread-safe: it belongs to the controller's event loop."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        capacity: int,
        max_policy_age: int,
        on_stale: OnStale,
        on_rejected: Callable[[Group, str], None] = lambda group, reason: None,
    ) -> None:
        """Args:
        ledger: every move of a trajectory is written there.
        capacity: most groups that wait; a further one pushes out the oldest.
        max_policy_age, on_stale: see `drop_stale`.
        on_rejected: called with a group of which nothing is left, and the reason.
        """
        self._ledger = ledger
        self._capacity = capacity
        self._max_policy_age = max_policy_age
        self._on_stale = on_stale
        self._on_rejected = on_rejected
        self._groups: deque[Group] = deque()
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        return len(self._groups)

    def groups(self) -> list[Group]:
        """The waiting groups, oldest first."""
        return list(self._groups)

    def put(self, group: Group) -> None:
        """Queue a scored group whose trajectories are in flight."""
        self._ledger.move(_ids(group.trajectories), State.QUEUED)
        self._append(group)

    def restore(self, groups: Sequence[Group]) -> None:
        """Queue groups that the (restored) ledger already counts as queued."""
        for group in groups:
            self._append(group)

    async def take(self, count: int, *, trainer_version: int) -> list[Group]:
        """Wait for `count` groups that the loss may take at `trainer_version`.

        The trainer's version does not move while the caller waits here, so every group of the returned batch is
        within the bound. Nothing leaves the queue before the whole batch is there, so a cancelled wait loses nothing.
        In the ledger the groups stay queued until the step is done: a step that fails has trained nothing.
        """
        while True:
            self._judge(trainer_version)
            if len(self._groups) >= count:
                return [self._groups.popleft() for _ in range(count)]
            self._arrived.clear()
            await self._arrived.wait()

    def _judge(self, trainer_version: int) -> None:
        for _ in range(len(self._groups)):
            group = self._groups.popleft()
            kept, rejected = drop_stale(
                group.trajectories,
                trainer_version=trainer_version,
                max_policy_age=self._max_policy_age,
                on_stale=self._on_stale,
            )
            self._reject(group, kept, rejected, "stale")
            if kept:
                self._groups.append(group)

    def _append(self, group: Group) -> None:
        self._groups.append(group)
        while len(self._groups) > self._capacity:
            oldest = self._groups.popleft()
            self._reject(oldest, [], oldest.trajectories, "overflow")
        self._arrived.set()

    def _reject(self, group: Group, kept: list[Trajectory], rejected: list[Trajectory], reason: str) -> None:
        self._ledger.move(_ids(rejected), State.REJECTED, reason)
        group.trajectories = kept
        if not kept:
            self._on_rejected(group, reason)


def _ids(trajectories: Sequence[Trajectory]) -> list[str]:
    return [t.trajectory_id for t in trajectories]
