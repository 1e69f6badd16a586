"""What became of the groups that were scored: the ledger, what the user is told, and when it is hopeless."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from forgelite.buffer.ledger import Ledger, State
from forgelite.errors import ForgeliteError
from forgelite.scoring.group import ScoredGroup
from forgelite.scoring.reward import PROCESS
from forgelite.types import Score

MANY_FAILURES = 32  # groups in a row without one scored sample that end a run, whatever the size of a batch


class GroupAccount:
    """Moves the members of scored groups that will not be trained, and counts what goes wrong in a row."""

    def __init__(self, *, ledger: Ledger, groups_per_step: int, on_note: Callable[[str], None]) -> None:
        """Args:
        ledger: where the members are moved.
        groups_per_step: groups in a batch; the unit in which the user is told of groups that teach nothing.
        on_note: told what the user should know.
        """
        self._ledger = ledger
        self._groups_per_step = groups_per_step
        self._on_note = on_note
        self._left_out: list[Score] = []
        self._filtered_in_a_row = 0
        self._failed_in_a_row = 0
        self._failures: Counter[str] = Counter()  # by reason

    def enter(self, scored: ScoredGroup) -> None:
        """Account for the members of one group that do not go on.

        Raises:
            ForgeliteError: nothing but failures for a long time; the message holds the last one.
        """
        for trajectory_id, failure in scored.failed.items():
            self._ledger.move([trajectory_id], State.FAILED, failure.reason)
        for trajectory_id, reason in scored.filtered.items():
            self._ledger.move([trajectory_id], State.FILTERED, reason)
        self._ledger.move(scored.cut, State.CANCELLED, "straggler")
        if not scored.group.trajectories:
            self._left_out += scored.scores
        self._note_failures(scored)
        self._count_failed_groups(scored)
        self._count_filtered_groups(scored)

    def take_left_out(self) -> list[Score]:
        """The scores of samples that were scored since the last call and will not be trained."""
        left_out, self._left_out = self._left_out, []
        return left_out

    def _note_failures(self, scored: ScoredGroup) -> None:
        for trajectory_id, failure in scored.failed.items():
            self._failures[failure.reason] += 1
            count = self._failures[failure.reason]
            if count.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ... of each kind: a notice, not a flood
                self._on_note(f"{trajectory_id} failed ({failure.reason}): {failure.message} [so far: {count}]")

    def _count_failed_groups(self, scored: ScoredGroup) -> None:
        if scored.scores:
            self._failed_in_a_row = 0
        elif any(f.reason != PROCESS for f in scored.failed.values()):
            self._failed_in_a_row += 1  # the death of the reward process is for its client to judge
        if self._failed_in_a_row >= max(2 * self._groups_per_step, MANY_FAILURES):
            raise ForgeliteError(
                f"all members of the last {self._failed_in_a_row} groups failed, the last one: {_first_failure(scored)}"
            )

    def _count_filtered_groups(self, scored: ScoredGroup) -> None:
        flat = "zero_variance" in scored.filtered.values()
        self._filtered_in_a_row = self._filtered_in_a_row + 1 if flat else 0
        if self._filtered_in_a_row and self._filtered_in_a_row % self._groups_per_step == 0:
            self._on_note(
                f"the last {self._filtered_in_a_row} groups had equal rewards within each group (the last one: "
                f"{scored.scores[0].reward:g}) and teach nothing; sampling goes on"
            )


def _first_failure(scored: ScoredGroup) -> str:
    trajectory_id, failure = next(iter(scored.failed.items()))
    more = f" (and {len(scored.failed) - 1} more)" if len(scored.failed) > 1 else ""
    return f"{trajectory_id} failed ({failure.reason}): {failure.message}{more}"
