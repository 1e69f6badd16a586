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
    """Ready groups. Not thread-safe: it belongs to the controller's event loop.

    A group without trajectories (its members were filtered, and none is sampled in its place) takes its place in a
    batch and brings nothing to it.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        capacity: int,
        max_policy_age: int,
        on_stale: OnStale,
        on_rejected: Callable[[Group, str], None] = lambda group, reason: None,
        on_skipped: Callable[[], None] = lambda: None,
    ) -> None:
        """Args:
        ledger: every move of a trajectory is written there.
        capacity: most groups that wait; a further one pushes out the oldest.
        max_policy_age, on_stale: see `drop_stale`.
        on_rejected: called with a group of which nothing is left, and the reason.
        on_skipped: called when a batch without a trajectory was skipped.
        """
        self._ledger = ledger
        self._capacity = capacity
        self._max_policy_age = max_policy_age
        self._on_stale = on_stale
        self._on_rejected = on_rejected
        self._on_skipped = on_skipped
        self._arrived: deque[Group] = deque()  # not judged yet
        self._young: deque[Group] = deque()  # young enough at version `_judged_at`; older than all that arrived
        self._judged_at = -1
        self._arrival = asyncio.Event()

    def __len__(self) -> int:
        return len(self._young) + len(self._arrived)

    def groups(self) -> list[Group]:
        """The waiting groups, oldest first."""
        return [*self._young, *self._arrived]

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
        within the bound, and the batch is not empty: `count` groups in a row without trajectories are skipped. Nothing
        else leaves the queue before the whole batch is there, so a cancelled wait loses nothing.
        In the ledger the groups stay queued until the step is done: a step that fails has trained nothing.
        """
        while True:
            self._judge(trainer_version)
            while len(self._young) >= count:
                batch = [self._young.popleft() for _ in range(count)]
                if any(group.trajectories for group in batch):
                    return batch
                self._on_skipped()
            self._arrival.clear()
            await self._arrival.wait()

    def _judge(self, trainer_version: int) -> None:
        """Move what is young enough from `_arrived` to `_young`; a new version judges everything anew."""
        if trainer_version != self._judged_at:
            self._arrived.extendleft(reversed(self._young))
            self._young.clear()
            self._judged_at = trainer_version
        while self._arrived:
            group = self._arrived.popleft()
            if not group.trajectories:
                self._young.append(group)
                continue
            kept, rejected = drop_stale(
                group.trajectories,
                trainer_version=trainer_version,
                max_policy_age=self._max_policy_age,
                on_stale=self._on_stale,
            )
            self._reject(group, kept, rejected, "stale")
            if kept:
                self._young.append(group)

    def _append(self, group: Group) -> None:
        self._arrived.append(group)
        while len(self) > self._capacity:
            oldest = (self._young or self._arrived).popleft()
            self._reject(oldest, [], oldest.trajectories, "overflow")
        self._arrival.set()

    def _reject(self, group: Group, kept: list[Trajectory], rejected: list[Trajectory], reason: str) -> None:
        self._ledger.move(_ids(rejected), State.REJECTED, reason)
        group.trajectories = kept
        if rejected and not kept:
            self._on_rejected(group, reason)


def _ids(trajectories: Sequence[Trajectory]) -> list[str]:
    return [t.trajectory_id for t in trajectories]
