"""The end of a GRPO run for a person, replays and samples without training too: a short table and a picture."""

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
    elif "reward/mean" in summary:
        rows.append(("mean reward of all samples", f"{summary['reward/mean']:.3f}"))
    if any("tokens/trained" in line for line in lines):
        ages = ", ".join(f"{n} at {age}" for age, n in sorted(age_histogram(lines).items()))
        rows.append(("trained trajectories by age", ages))
    counts = " / ".join(str(summary.get(f"ledger/{s}", 0)) for s in ("rejected", "filtered", "failed"))
    rows.append(("rejected / filtered / failed", counts))
    if "tokens_per_s/generated" in summary:
        rows.append(("generated tokens a second", f"{summary['tokens_per_s/generated']:,.0f}"))
    gaps = [gap for line in lines if (gap := line.get("mismatch/logprob_abs_max")) is not None]
    if gaps:
        rows.append(("largest logprob gap, policy to trainer", f"{max(gaps):.1e}"))
    rows.append(("curves", str(folder / "curves.png")))
    print_summary(str(folder), rows)
