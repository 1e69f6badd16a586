"""Outcomes of simulated runs as tables, in Markdown so that they can be pasted where they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.pipeline_simulation import Outcome

WIDTH = 180
SHOWN_AGES = 6

LEGEND = """\

efficiency    max(generation at its full rate, training) by the time taken, for the trained tokens
policy idle   share of the engine's full rate that is not used; trainer idle: share of the time in which no step runs
rejected      samples that were too old, had no room or were cancelled as too old, by these and the trained ones
cut           samples cancelled as stragglers or surplus, likewise
age           mean of the trained samples, in versions; beside it the share of each age, the last with all older ones
length        mean tokens of a trained sample"""


def print_outcomes(
    title: str, columns: Sequence[str], rows: Mapping[tuple[str, ...], Outcome], console: Console
) -> None:
    """Print one table: the parts of each label, then what the run was like."""
    table = Table(box=box.MARKDOWN)
    for column in columns:
        table.add_column(column, no_wrap=True)
    for column in ("efficiency", "policy idle", "trainer idle", "rejected", "cut", "age", "ages 0, 1, ... %", "length"):
        table.add_column(column, justify="right", no_wrap=True)
    for label, outcome in rows.items():
        table.add_row(*label, *_cells(outcome))
    console.print(f"\n{title}", style="bold", highlight=False)
    console.print(table)


def _cells(outcome: Outcome) -> Iterable[str]:
    yield f"{outcome.efficiency:.3f}"
    yield percent(outcome.policy_idle)
    yield percent(outcome.trainer_idle)
    yield percent(outcome.rejected_share)
    yield percent(outcome.cut_share)
    yield f"{outcome.mean_age:.2f}"
    yield histogram(outcome.ages)
    yield f"{outcome.mean_length:,.0f}"


def percent(share: float) -> str:
    """Example: `percent(0.0312)` is `"3.1 %"`."""
    return f"{100 * max(0.0, share):.1f} %"


def histogram(ages: Mapping[int, int]) -> str:
    """Shares of the ages 0, 1, ... in percent; the last one holds those that are older. Example: `"2 60 38"`."""
    total, oldest = sum(ages.values()), max(ages)
    shares = [ages.get(age, 0) for age in range(min(oldest, SHOWN_AGES) + 1)]
    shares[-1] += sum(n for age, n in ages.items() if age > SHOWN_AGES)
    return " ".join(f"{100 * n / total:.0f}" for n in shares)
