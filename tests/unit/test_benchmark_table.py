"""What benchmarks print, and which part of a run `benchmarks.grpo` measures."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from benchmarks.grpo import our_rates
from benchmarks.table import Row, is_met, median_row, print_report


def test_the_last_line_is_one_json_object_however_narrow_the_terminal():
    rows = [
        Row(case="vs_peer", value=1.25, unit="x", goal=1.0, note="not in the JSON"),
        Row(case="pause_ms", value=float("nan"), unit="ms", goal=30.0, at_most=True),
    ]
    output = io.StringIO()
    print_report("demo", rows, title="A title", console=Console(file=output, width=40))
    assert json.loads(output.getvalue().splitlines()[-1]) == {
        "benchmark": "demo",
        "rows": [
            {"case": "vs_peer", "value": 1.25, "unit": "x", "goal": 1.0},
            {"case": "pause_ms", "value": None, "unit": "ms", "goal": 30.0},
        ],
    }


def test_a_case_that_stands_twice_is_refused():
    with pytest.raises(ValueError, match="the case a stands there twice"):
        print_report("demo", [median_row("a", [1.0], "s"), median_row("a", [2.0], "s")], title="")


@pytest.mark.parametrize(
    ("value", "goal", "at_most", "met"),
    [
        (1.0, 1.0, False, True),
        (0.99, 1.0, False, False),
        (31.0, 30.0, True, False),
        (29.0, 30.0, True, True),
        (None, 1.0, False, False),
        (5.0, None, False, None),
    ],
)
def test_a_goal_is_a_floor_or_a_ceiling(value, goal, at_most, met):
    assert is_met(Row(case="c", value=value, unit="", goal=goal, at_most=at_most)) is met


def test_a_median_comes_with_its_spread():
    row = median_row("samples_per_s", [1010.0, 812.0, 950.0], "samples/s")
    assert (row.value, row.note) == (950.0, "812 to 1,010 in 3")


def test_start_up_and_evaluation_are_outside_the_measured_span():
    def line(step: int, seconds: float, issued: int, **more: float) -> dict[str, float]:
        open_and_cancelled = {"ledger/in_flight": 8, "ledger/cancelled": 0}
        return {"step": step, "time/step_s": seconds, "ledger/issued": issued, **open_and_cancelled, **more}

    lines = [
        {"step": 0, "eval/reward": 0.2, "time/eval_s": 9.0},
        *(line(step, 50.0, 8 + 100 * step) for step in range(1, 5)),
        line(5, 0.5, 508),
        line(6, 4.5, 708, **{"time/eval_s": 4.0}),
    ]
    samples_per_s, steps_per_s = our_rates(lines)
    assert (samples_per_s, steps_per_s) == (300.0, 2.0)  # 300 samples and 2 steps in one second
