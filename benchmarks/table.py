"""What every benchmark prints at its end: a table for a person, and one line of JSON for a program.

The line is the last one of the output: `{"benchmark": NAME, "rows": [{"case", "value", "unit", "goal"}, ...]}`.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(kw_only=True, slots=True, frozen=True)
class Row:
    """One measured number.

    Example: `Row(case="vs_trl", value=1.21, unit="x", goal=1.0, note="median of 3")`; for a number that should
    be small `Row(case="pause_ms", value=14.0, unit="ms", goal=30.0, at_most=True)`.
    """

    case: str  # as the issue or the docs name it
    value: float | None  # None, or a number that is not finite: it could not be measured
    unit: str
    goal: float | None = None  # None: the number is shown beside others, nothing is asked of it
    at_most: bool = False  # the goal is a ceiling, not a floor
    note: str = ""  # for the table only


def is_met(row: Row) -> bool | None:
    """Whether the goal is reached; None where there is none. What could not be measured has not reached it."""
    if row.goal is None:
        return None
    if row.value is None or not math.isfinite(row.value):
        return False
    return row.value <= row.goal if row.at_most else row.value >= row.goal


def spread(values: Sequence[float]) -> str:
    """A note on repeated measurements: the least, the largest, and how many. Example: `"812 to 1,010 in 3"`."""
    if len(values) < 2:
        return "measured once"
    return f"{_number(min(values))} to {_number(max(values))} in {len(values)}"


def median_row(case: str, values: Sequence[float], unit: str, *, goal: float | None = None) -> Row:
    """The median of repeated measurements as a row, with their spread as its note."""
    return Row(case=case, value=statistics.median(values), unit=unit, goal=goal, note=spread(values))


def print_report(benchmark: str, rows: Sequence[Row], *, title: str, console: Console | None = None) -> None:
    """Print the table, then the closing line of JSON.

    Args:
        benchmark: its name, that of its module.
        rows: in the order in which they are shown; no case twice.
        title: over the table: what is compared, and where.
        console: None: standard output.
    """
    if twice := {row.case for row in rows if sum(row.case == other.case for other in rows) > 1}:
        raise ValueError(f"benchmark {benchmark}: the case {sorted(twice)[0]} stands there twice")
    console = console or Console()
    console.print(_table(rows, title))
    # Straight into the file: the console would break the line at the width of the terminal.
    print(json_line(benchmark, rows), file=console.file, flush=True)


def json_line(benchmark: str, rows: Sequence[Row]) -> str:
    """The closing line. A number that is not finite is null, for JSON has none."""
    plain = [{"case": row.case, "value": _finite(row.value), "unit": row.unit, "goal": row.goal} for row in rows]
    return json.dumps({"benchmark": benchmark, "rows": plain}, allow_nan=False)


def _table(rows: Sequence[Row], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("case", min_width=max(len(row.case) for row in rows))
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    table.add_column("goal", justify="right", no_wrap=True)
    table.add_column("")
    for row in rows:
        goal = "" if row.goal is None else f"{'≤' if row.at_most else '≥'} {_number(row.goal)}"
        style = {True: "green", False: "red", None: ""}[is_met(row)]
        table.add_row(row.case, _number(row.value), row.unit, goal, row.note, style=style)
    return table


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _number(value: float | None) -> str:
    """Three significant digits, no exponent where a person would not use one."""
    if value is None or not math.isfinite(value):
        return "not measured"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
