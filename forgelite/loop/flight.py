"""Groups in flight: from the moment when a group starts until it is scored or cancelled.

    start ──> rolling out ──> scoring ──┬──> on_scored
                  │              │      │
                  └──────────────┴──────┴──> cancelled (reason): its task ends, its members are closed in the ledger

All members of a group stay "in flight" in the ledger until the group leaves here, by one synchronous call, so a
cancellation finds either all of them or none.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from forgelite.buffer.ledger import Ledger, State
from forgelite.config import LoopConfig
from forgelite.errors import ForgeliteError
from forgelite.loop.members import first_members
from forgelite.loop.stations import RollOut, RollOutMember, ScoreGroup, ScoreMember
from forgelite.scoring.group import ScoredGroup
from forgelite.types import Failure, Prompt, Trajectory


@dataclass(kw_only=True, slots=True, eq=False)
class GroupInFlight:
    """One group on its way. Example: `GroupInFlight(group_id="g12", number=12, prompt=prompt, since=4.0, ...)`."""

    group_id: str  # "g<number>"
    number: int  # in the order in which groups start
    prompt: Prompt
    trajectory_ids: list[str]
    since: float  # the event loop's clock at its start, in seconds
    stage: Literal["rolling out", "scoring"] = "rolling out"
    first_version: int | None = None  # which sampled its first token; None: none that we know of
    task: asyncio.Task[None] | None = None


class GroupsInFlight:
    """Starts groups, takes them through rollout and scoring, and cancels them. Belongs to one event loop."""

    def __init__(
        self,
        *,
        config: LoopConfig,
        ledger: Ledger,
        roll_out: RollOut,
        score_group: ScoreGroup,
        roll_out_member: RollOutMember | None,
        score_member: ScoreMember | None,
        on_scored: Callable[[ScoredGroup], None],
        on_rolled_out: Callable[[], None],
        next_number: int = 0,
    ) -> None:
        """Args:
        config: group size, and when a group is complete.
        ledger: every move of a trajectory is written there.
        roll_out, score_group: make a whole group.
        roll_out_member, score_member: make one member; needed where groups are complete before all members are.
        on_scored: called when a group leaves flight with its scores. An exception ends the run.
        on_rolled_out: called when a group is no longer sampled.
        next_number: of the first group that starts.

        Raises:
            ValueError: the configuration cuts stragglers, and nothing makes members one by one.
        """
        cuts = config.complete_at is not None or config.group_deadline_s is not None
        if cuts and (roll_out_member is None or score_member is None):
            raise ValueError(
                f"loop.complete_at={config.complete_at} and loop.group_deadline_s={config.group_deadline_s} need "
                "members that are rolled out one by one, which this rollout does not offer: leave both null"
            )
        self._config = config
        self._ledger = ledger
        self._roll_out = roll_out
        self._score_group = score_group
        self._roll_out_member = roll_out_member if cuts else None
        self._score_member = score_member
        self._on_scored = on_scored
        self._on_rolled_out = on_rolled_out
        self.next_number = next_number
        self._groups: dict[str, GroupInFlight] = {}  # in the order of their numbers
        self._begun: dict[int, set[GroupInFlight]] = defaultdict(set)  # by the version of their first token, if known
        self.rolling_out = 0  # groups that are still sampled

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[GroupInFlight]:
        return iter(list(self._groups.values()))

    @property
    def first(self) -> GroupInFlight | None:
        """The oldest group; None: nothing is in flight."""
        return next(iter(self._groups.values()), None)

    def oldest(self, count: int) -> list[GroupInFlight]:
        """The `count` groups that started first."""
        return list(islice(self._groups.values(), count))

    def begun_by(self, is_hopeless: Callable[[int], bool]) -> list[GroupInFlight]:
        """The groups whose first token was sampled by a version of which `is_hopeless` is true."""
        return [group for version, groups in self._begun.items() if is_hopeless(version) for group in groups]

    def start(self, prompt: Prompt, tasks: asyncio.TaskGroup) -> None:
        """Start the next group of `prompt` in a task of `tasks`."""
        number, self.next_number = self.next_number, self.next_number + 1
        group = GroupInFlight(
            group_id=f"g{number}",
            number=number,
            prompt=prompt,
            trajectory_ids=[f"g{number}/{i}" for i in range(self._config.group_size)],
            since=asyncio.get_running_loop().time(),
        )
        self._ledger.issue(group.trajectory_ids)
        self._groups[group.group_id] = group
        self.rolling_out += 1
        group.task = tasks.create_task(self._make(group), name=group.group_id)

    def note_first_versions(self, first_versions: Mapping[str, int]) -> None:
        """Remember which version sampled the first token of a group, as the policy says while it samples it."""
        for session, version in first_versions.items():
            group = self._groups.get(session.partition("/")[0])  # the session of a group, or of one member of it
            if group is not None and group.first_version is None:
                group.first_version = version
                self._begun[version].add(group)

    def cancel(self, group: GroupInFlight, reason: str) -> None:
        """End a group once and for all, with all its members; `reason` is for the ledger."""
        self._leave(group)
        self._ledger.move(group.trajectory_ids, State.CANCELLED, reason)
        group.task.cancel()

    def end(self) -> None:
        """Cancel the tasks of all groups; the ledger is closed by whoever ends the run."""
        for group in self._groups.values():
            group.task.cancel()

    def describe(self) -> str:
        """How many groups are where, and the oldest one."""
        if not self._groups:
            return "0 in flight"
        first = self.first
        seconds = asyncio.get_running_loop().time() - first.since
        return (
            f"{len(self)} in flight, {self.rolling_out} rolling out and {len(self) - self.rolling_out} scoring "
            f"(oldest: {first.group_id}, {first.stage}, started {seconds:.3g} s ago)"
        )

    async def _make(self, group: GroupInFlight) -> None:
        try:
            await self._roll_out_and_score(group)
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():
                raise
            # To the task group it would look like a task that we have cancelled, and the group would never leave.
            raise ForgeliteError(
                f"group {group.group_id} was cancelled from inside while it was {group.stage}: what rolls out or "
                "scores a group ends with its members or with an error"
            ) from None

    async def _roll_out_and_score(self, group: GroupInFlight) -> None:
        members = await self._members(group)
        if group.group_id not in self._groups:
            return  # it was cancelled, and a user's code went on all the same
        group.stage = "scoring"
        self.rolling_out -= 1
        self._on_rolled_out()
        scored = await self._score_group(group.group_id, group.prompt, members)
        if group.group_id in self._groups:
            self._leave(group)
            self._on_scored(scored)

    def _leave(self, group: GroupInFlight) -> None:
        del self._groups[group.group_id]
        self.rolling_out -= group.stage == "rolling out"
        if group.first_version is not None:
            self._begun[group.first_version].discard(group)
            if not self._begun[group.first_version]:
                del self._begun[group.first_version]

    async def _members(self, group: GroupInFlight) -> Sequence[Trajectory | Failure | None]:
        size = self._config.group_size
        if self._roll_out_member is None:
            return await self._roll_out(group.group_id, group.prompt, size)
        return await first_members(
            [self._member(group, index) for index in range(size)],
            complete_at=self._config.complete_at or size,
            deadline_s=self._config.group_deadline_s,
        )

    async def _member(self, group: GroupInFlight, index: int) -> Trajectory | Failure:
        member = await self._roll_out_member(group.group_id, group.prompt, index)
        return member if isinstance(member, Failure) else await self._score_member(group.prompt, member)
