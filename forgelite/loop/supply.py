"""From prompts to batches: what starts, what waits, what is cancelled, and what a step trains.

    prompts ──admit──> flight ──scored──> queue ──take──> a batch
                 ^        │                 │
                 └─ room ─┴─ failed, filtered, cancelled, rejected, taken; another version is served

Which groups do what is decided by `StalenessPolicy`; here it is asked and obeyed. Everything that leaves a place makes
room at once and by one path (`_room`), so capacity is returned exactly once, whatever became of a group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from forgelite.buffer.ledger import Ledger
from forgelite.buffer.queue import GroupQueue
from forgelite.buffer.saved import group_from_data, group_to_data
from forgelite.buffer.staleness import Progress, StalenessPolicy
from forgelite.config import LoopConfig
from forgelite.loop.account import GroupAccount
from forgelite.loop.flight import GroupInFlight, GroupsInFlight
from forgelite.loop.stations import RollOut, RollOutMember, ScoreGroup, ScoreMember
from forgelite.rollout.dataset import PromptStream
from forgelite.scoring.group import ScoredGroup
from forgelite.types import Group, Score

Cancel = Callable[[Sequence[str]], Awaitable[None]]


class GroupSupply:
    """Keeps as many groups on their way as the staleness policy allows, and hands out batches of them."""

    def __init__(
        self,
        *,
        config: LoopConfig,
        prompts: PromptStream,
        roll_out: RollOut,
        score_group: ScoreGroup,
        roll_out_member: RollOutMember | None,
        score_member: ScoreMember | None,
        cancel: Cancel,
        on_note: Callable[[str], None],
        version: int,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        """Args:
        config: pacing and staleness.
        prompts: where prompts come from.
        roll_out, score_group, roll_out_member, score_member: see `GroupsInFlight`.
        cancel: ends, at the policy, whatever is left there of groups whose tasks were cancelled.
        on_note: told what the user should know.
        version: of the trainer, and served by the policy.
        saved: what `state_dict` gave, to go on from there.

        Raises:
            ValueError: the configuration cuts stragglers, and nothing makes members one by one.
        """
        self._config = config
        self._prompts = prompts
        self._cancel_at_policy = cancel
        self._staleness = StalenessPolicy(config=config)
        self._first_version = self._batches_taken = self._served_version = version
        self._held = False
        self._room = asyncio.Event()
        self._rollouts_changed = asyncio.Event()
        self.ledger = Ledger() if saved is None else Ledger.from_state(saved["ledger"])
        self._account = GroupAccount(ledger=self.ledger, groups_per_step=config.groups_per_step, on_note=on_note)
        self.flight = GroupsInFlight(
            config=config,
            ledger=self.ledger,
            roll_out=roll_out,
            score_group=score_group,
            roll_out_member=roll_out_member,
            score_member=score_member,
            on_scored=self._on_scored,
            on_rolled_out=self._rollouts_changed.set,
            next_number=0 if saved is None else saved["next_group"],
        )
        self._queue = GroupQueue(
            ledger=self.ledger,
            policy=self._staleness,
            first_in_flight=self._first_in_flight,
            on_rejected=self._on_rejected,
            on_skipped=self._room.set,
        )
        if saved is not None:
            prompts.load_state_dict(saved["prompts"])
            self._queue.restore([group_from_data(data, prompts.prompt) for data in saved["queue"]])

    def state_dict(self) -> dict[str, Any]:
        """Plain data to go on from: nothing that is queued is lost, nothing trained twice.

        Groups in flight are not finished anywhere else, so their prompts are given back.
        """
        prompts = self._prompts.state_dict()
        prompts["given_back"] = [*prompts["given_back"], *(int(group.prompt.prompt_id) for group in self.flight)]
        return {
            "next_group": self.flight.next_number,
            "prompts": prompts,
            "ledger": self.ledger.state_dict(),
            "queue": [group_to_data(group) for group in self._queue.groups()],
        }

    # ---- in ----

    async def admit(self, tasks: asyncio.TaskGroup) -> None:
        """Start groups, in tasks of `tasks`, whenever there is room. Never returns."""
        self._tasks = tasks
        while True:
            self._room.clear()
            for _ in range(self._groups_to_start()):
                self.flight.start(next(self._prompts), tasks)
            await self._room.wait()

    def hold(self) -> None:
        """Start nothing until another version is served."""
        self._held = True

    def serve(self, version: int) -> None:
        """The policy serves another version. Room is made by `open`."""
        self._served_version = version
        self._held = False

    def open(self) -> None:
        """Look for room again."""
        self._room.set()

    async def rollouts_ended(self) -> None:
        """Wait until nothing is sampled any more."""
        while self.flight.rolling_out:
            self._rollouts_changed.clear()
            await self._rollouts_changed.wait()

    # ---- out ----

    async def take(self, trainer_version: int) -> list[Group]:
        """Wait for a batch that the loss may take at `trainer_version`, and cancel what nobody needs any more."""
        groups = await self._queue.take(self._config.groups_per_step, trainer_version=trainer_version)
        # At once, with nothing awaited between: else the groups would be counted neither as ready nor as taken.
        self._batches_taken += 1
        self._room.set()
        self._cancel(self.flight.oldest(self._staleness.surplus_in_flight(self._progress())), "surplus")
        self.cancel_hopeless({})
        return groups

    def cancel_hopeless(self, first_versions: Mapping[str, int]) -> None:
        """Cancel groups in flight that can only become too old.

        Args:
            first_versions: what the policy says of the groups that it samples (`Usage.first_versions`).
        """
        self.flight.note_first_versions(first_versions)
        progress = self._progress()
        self._cancel(self.flight.begun_by(lambda version: self._staleness.is_hopeless(version, progress)), "stale")

    def take_left_out(self) -> list[Score]:
        """The scores of samples that were scored since the last call and will not be trained."""
        return self._account.take_left_out()

    def close(self) -> None:
        """The run is over: whatever is still open is cancelled in the ledger, which must then come out even."""
        self.ledger.close_open("run_ended")
        self.ledger.check()

    def describe(self) -> str:
        """How full the queue is, what is in flight, who holds it, and the account."""
        account = {k.removeprefix("ledger/"): v for k, v in self.ledger.metrics().items() if v}
        return (
            f"{len(self._queue)} of {self._config.groups_per_step} groups are queued, {self.flight.describe()}, "
            f"{self._holder()}; room for {self._groups_to_start()} more; policy serves {self._served_version}; "
            f"ledger: {account}"
        )

    # ---- between ----

    def _groups_to_start(self) -> int:
        return 0 if self._held else self._staleness.admit(self._progress())

    def _progress(self) -> Progress:
        ready = len(self._queue)
        return Progress(
            taken=self._batches_taken,
            finished=(self._batches_taken - self._first_version) * self._config.groups_per_step + ready,
            served=self._served_version,
            ready=ready,
            in_flight=len(self.flight),
        )

    def _first_in_flight(self) -> int | None:
        first = self.flight.first
        return None if first is None else first.number

    def _on_scored(self, scored: ScoredGroup) -> None:
        self._account.enter(scored)
        if scored.group.trajectories or (scored.filtered and not self._config.replace_filtered):
            self._queue.put(scored.group)
        self._on_left_flight()

    def _on_left_flight(self) -> None:
        self._queue.wake()  # the group may have held the line
        self._rollouts_changed.set()
        self._room.set()

    def _on_rejected(self, group: Group, reason: str) -> None:
        if self._config.reissue:
            self._prompts.give_back(group.prompt)
        self._room.set()

    def _cancel(self, groups: Sequence[GroupInFlight], reason: str) -> None:
        if not groups:
            return
        for group in groups:
            self.flight.cancel(group, reason)
            if reason == "stale" and self._config.reissue:
                self._prompts.give_back(group.prompt)
        self._tasks.create_task(self._cancel_at_policy([group.group_id for group in groups]))
        self._on_left_flight()

    def _holder(self) -> str:
        if self._held:
            return "held by the barrier: an update waits for running rollouts"
        if self.flight.first is None:
            return "held by nobody in flight"
        if self.flight.rolling_out:
            return "held by the policy or the environments"
        return "held by the rewards or the reference"
