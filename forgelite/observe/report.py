"""The end of a run: `summary.json`, a short table, and a picture of its curves."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

WINDOW = 5  # steps over which the curves average a rate


def write_text(path: Path, text: str) -> None:
    """Write a file all at once: a reader sees the old one or the new one."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file all at once."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def print_summary(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print (name, value) rows as a small table."""
    table = Table(title=title, show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    for name, value in rows:
        table.add_row(name, value)
    Console().print(table)


def series(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, where it was logged."""
    points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def windowed_rate(lines: Sequence[Mapping[str, Any]], name: str, window: int) -> tuple[list[int], list[float]]:
    """Steps and values of a rate over the last `window` steps: the sum of numerators over that of denominators."""
    steps, numerators = series(lines, f"{name}/numerator")
    _, denominators = series(lines, f"{name}/denominator")
    values = []
    for end in range(1, len(steps) + 1):
        span = slice(max(0, end - window), end)
        values.append(sum(numerators[span]) / (sum(denominators[span]) or 1.0))
    return steps, values


def age_histogram(lines: Sequence[Mapping[str, Any]]) -> Counter[int]:
    """Trained trajectories by age, over the whole run."""
    total: Counter[int] = Counter()
    for line in lines:
        for age, count in (line.get("age/histogram") or {}).items():
            total[int(age)] += count
    return total


def draw_curves(lines: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw reward and held-out accuracy over steps, the histogram of ages, and how idle each side was.

    Args:
        lines: the lines of metrics.jsonl.
        path: the PNG file to write.
        title: the heading.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    reward, ages, idle = figure.subplots(1, 3, width_ratios=(2, 1, 2))
    figure.suptitle(title)

    reward.plot(*series(lines, "reward/mean"), color="tab:blue", alpha=0.8, label="training reward, sampled")
    reward.plot(*series(lines, "eval/reward"), "o-", color="tab:green", label="held-out, greedy")
    reward.set(xlabel="step", ylim=(0, 1.02), title="reward")
    reward.legend(loc="lower right", fontsize="small")

    histogram = age_histogram(lines)
    ages.bar(list(histogram), list(histogram.values()), color="tab:purple", width=0.6)
    ages.set(xlabel="age at the loss, in versions", title="trained trajectories by age")
    ages.set_xticks(range(max(histogram, default=0) + 1))

    for name, label, colour in (("idle/trainer", "trainer", "tab:orange"), ("idle/policy", "policy", "tab:red")):
        idle.plot(*windowed_rate(lines, name, WINDOW), color=colour, label=label)
    idle.set(xlabel="step", ylim=(0, 1.02), title=f"idle share, over {WINDOW} steps")
    idle.legend(loc="upper right", fontsize="small")
    figure.savefig(path, dpi=110)
