"""What the policy's benchmark makes of a trace."""

from __future__ import annotations

import pytest

from benchmarks.policy_trace import Plan, Swap, Trace, Turn


def traced(turns: list[Turn], *, asked: float, swapped: float) -> Trace:
    swap = Swap(version=1, asked=asked, swapped=swapped, recomputed=0, recomputed_tokens=0, held=0)
    plan = Plan(mode="in_flight", updates=1, tokens_between=1)
    return Trace(plan=plan, turns=turns, swaps=[swap], steps=[0.5, 0.5, 0.5])


def test_a_pause_is_the_longest_gap_in_which_the_weights_changed_by_the_median_step() -> None:
    turns = [
        Turn(lane=0, asked=0.0, times=[1.0, 2.0, 5.0, 6.0]),  # 3 s around the swap
        Turn(lane=1, asked=0.0, times=[1.0, 3.9, 4.5]),  # 0.6 s around the swap; the longer gap was before
    ]
    assert traced(turns, asked=4.0, swapped=4.2).pauses() == [pytest.approx(6.0)]


def test_what_comes_long_after_the_swap_is_no_pause_of_it() -> None:
    turns = [Turn(lane=0, asked=0.0, times=[1.0, 1.5, 9.0])]
    assert traced(turns, asked=1.2, swapped=1.3).pauses() == [pytest.approx(1.0)]


def test_a_held_request_waits_and_does_not_pause() -> None:
    turns = [Turn(lane=0, asked=1.0, times=[4.0, 4.5])]
    trace = traced(turns, asked=0.5, swapped=3.5)
    assert trace.pauses() == [0.0]
    assert trace.waits() == [pytest.approx(6.0)]
