"""The account of trajectories."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgelite.buffer.ledger import Ledger, State


def test_every_state_is_counted_by_reason():
    ledger = Ledger()
    ledger.issue(["a", "b", "c", "d"])
    ledger.move(["a", "b"], State.QUEUED)
    ledger.move(["a"], State.TRAINED)
    ledger.move(["b"], State.REJECTED, "stale")
    ledger.move(["c"], State.FAILED, "timeout")
    metrics = ledger.metrics()
    assert metrics["ledger/issued"] == 4
    assert metrics["ledger/in_flight"] == 1
    assert metrics["ledger/trained"] == 1
    assert metrics["ledger/rejected/stale"] == 1
    assert metrics["ledger/failed/timeout"] == 1


def test_a_trajectory_cannot_end_twice():
    ledger = Ledger()
    ledger.issue(["a"])
    ledger.move(["a"], State.FAILED, "timeout")
    with pytest.raises(ValueError, match="a is not open"):
        ledger.move(["a"], State.CANCELLED, "run_ended")


def test_a_trajectory_cannot_be_trained_before_it_is_queued():
    ledger = Ledger()
    ledger.issue(["a"])
    with pytest.raises(ValueError, match="from in_flight to trained"):
        ledger.move(["a"], State.TRAINED)


def test_a_trajectory_cannot_be_issued_twice():
    ledger = Ledger()
    ledger.issue(["a"])
    with pytest.raises(ValueError, match="issued twice"):
        ledger.issue(["a"])


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(list(State))), max_size=60))
def test_nothing_is_lost_whatever_happens(events):
    """Conservation after every event, allowed or refused, and across save and resume."""
    ledger = Ledger()
    ledger.issue(map(str, range(10)))
    for number, state in events:
        with suppress(ValueError):
            ledger.move([str(number)], state, "why")
        ledger.check()
        Ledger.from_state(ledger.state_dict()).check()


def test_what_is_in_flight_when_a_run_is_saved_counts_as_cancelled_after_resume():
    ledger = Ledger()
    ledger.issue(["a", "b"])
    ledger.move(["a"], State.QUEUED)
    resumed = Ledger.from_state(ledger.state_dict())
    assert (resumed.count(State.QUEUED), resumed.count(State.CANCELLED)) == (1, 1)
