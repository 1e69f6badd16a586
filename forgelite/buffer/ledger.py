"""The account of every trajectory ever issued (law 3).

    issue ──> in_flight ──┬──> queued ──┬──> trained
                          │             ├──> rejected (reason)      too old, or no room
                          │             └──> cancelled (reason)     the run ended first
                          ├──> filtered (reason)                    its group teaches nothing
                          ├──> failed (reason)                      no completion, no score
                          └──> cancelled (reason)

A trajectory is in exactly one state; each arrow is one call; the three ends on the right and below are final.
At every moment issued = trained + rejected + filtered + failed + cancelled + queued + in flight, which holds
by construction, since an entry is only ever moved, and is checked by `check`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum


class State(StrEnum):
    """Where a trajectory stands. The values are the words used in metric names."""

    IN_FLIGHT = "in_flight"
    QUEUED = "queued"
    TRAINED = "trained"
    REJECTED = "rejected"
    FILTERED = "filtered"
    FAILED = "failed"
    CANCELLED = "cancelled"


_ALLOWED = {
    State.IN_FLIGHT: {State.QUEUED, State.FILTERED, State.FAILED, State.CANCELLED},
    State.QUEUED: {State.TRAINED, State.REJECTED, State.CANCELLED},
}


class Ledger:
    """Counts of trajectories by state and reason, and the state of those that are still open."""

    def __init__(self) -> None:
        self.issued = 0
        self._open: dict[str, State] = {}
        self._open_count: Counter[State] = Counter()  # of `_open`, which may hold 100,000 entries
        self._closed: Counter[tuple[State, str]] = Counter()

    def issue(self, trajectory_ids: Iterable[str]) -> None:
        """Open an entry for each id, in flight. An id that is already open is a ValueError."""
        for trajectory_id in trajectory_ids:
            if trajectory_id in self._open:
                raise ValueError(f"trajectory {trajectory_id} was issued twice")
            self._open[trajectory_id] = State.IN_FLIGHT
            self._open_count[State.IN_FLIGHT] += 1
            self.issued += 1

    def move(self, trajectory_ids: Iterable[str], to: State, reason: str = "") -> None:
        """Move entries to another state. Raises ValueError for an unknown id or a move that no arrow allows."""
        for trajectory_id in trajectory_ids:
            state = self._open.get(trajectory_id)
            if state is None:
                raise ValueError(f"trajectory {trajectory_id} is not open and cannot become {to}")
            if to not in _ALLOWED[state]:
                raise ValueError(f"trajectory {trajectory_id} cannot go from {state} to {to}")
            self._open_count[state] -= 1
            if to in _ALLOWED:
                self._open[trajectory_id] = to
                self._open_count[to] += 1
            else:
                del self._open[trajectory_id]
                self._closed[to, reason] += 1

    def close_open(self, reason: str) -> None:
        """Cancel whatever is still open: the run has ended."""
        self.move(list(self._open), State.CANCELLED, reason)

    def count(self, state: State) -> int:
        """How many trajectories are in `state`, whatever the reason."""
        if state in _ALLOWED:
            return self._open_count[state]
        return sum(n for (s, _), n in self._closed.items() if s is state)

    def check(self) -> None:
        """Raise AssertionError unless every trajectory ever issued is accounted for exactly once."""
        total = sum(self.count(state) for state in State)
        assert total == self.issued, f"ledger: {self.issued} issued but {total} accounted for: {self.metrics()}"

    def metrics(self) -> dict[str, int]:
        """`ledger/<state>` and `ledger/<state>/<reason>`, cumulative over the run."""
        out = {"ledger/issued": self.issued}
        out |= {f"ledger/{state}": self.count(state) for state in State}
        out |= {f"ledger/{state}/{reason}": n for (state, reason), n in sorted(self._closed.items()) if reason}
        return out

    def state_dict(self) -> dict[str, object]:
        """Plain data for a checkpoint. Entries in flight are saved as cancelled: nobody will finish them."""
        closed = Counter(self._closed)
        if in_flight := self.count(State.IN_FLIGHT):
            closed[State.CANCELLED, "resume"] += in_flight
        return {
            "issued": self.issued,
            "queued": [t for t, s in self._open.items() if s is State.QUEUED],
            "closed": [[str(s), reason, n] for (s, reason), n in sorted(closed.items())],
        }

    @classmethod
    def from_state(cls, saved: Mapping[str, object]) -> Ledger:
        """The ledger that `state_dict` described."""
        ledger = cls()
        ledger.issued = saved["issued"]
        ledger._open = dict.fromkeys(saved["queued"], State.QUEUED)
        ledger._open_count[State.QUEUED] = len(ledger._open)
        ledger._closed = Counter({(State(s), reason): n for s, reason, n in saved["closed"]})
        ledger.check()
        return ledger
