"""The end of a GRPO run for a person: a short table and a picture."""

from __future__ import annotations

import json
from pathlib import Path

from forgelite.observe.metrics import read_metrics
from forgelite.observe.report import age_histogram, draw_curves, print_summary


def report(folder: Path) -> None:
    """Print a table of the run in `folder` and draw `curves.png` there."""
    summary = json.loads((folder / "summary.json").read_text())
    lines = read_metrics(folder)
    draw_curves(lines, folder / "curves.png", title=f"{folder}: asynchronous GRPO")
    rows = [("steps", str(summary["steps"])), ("seconds, start-up included", f"{summary['seconds']:.1f}")]
    if "eval/reward" in summary:
        before, after = summary["eval/reward"]["before"], summary["eval/reward"]["after"]
        rows.append(("held-out greedy reward, before -> after", f"{before:.3f} -> {after:.3f}"))
    steps = [line for line in lines if "tokens/trained" in line]
    if steps:
        seconds = sum(line["time/step_s"] for line in steps)
        ages = ", ".join(f"{n} at {age}" for age, n in sorted(age_histogram(lines).items()))
        gaps = [line["mismatch/logprob_abs_max"] for line in steps if "mismatch/logprob_abs_max" in line]
        rows += [
            ("trained trajectories by age", ages),
            (
                "rejected / filtered / failed",
                " / ".join(str(summary[f"ledger/{s}"]) for s in ("rejected", "filtered", "failed")),
            ),
            (
                "generated tokens a second",
                f"{sum(line['tokens/generated'] for line in steps) / seconds:,.0f}",
            ),
        ]
        if gaps:
            rows.append(("largest logprob gap, policy to trainer", f"{max(gaps):.1e}"))
    rows.append(("curves", str(folder / "curves.png")))
    print_summary(str(folder), rows)
