"""The pictures of docs/staleness.md, from the outcomes that the tables show."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.pipeline_simulation import Outcome
from benchmarks.pipeline_studies import Label

Outcomes = Mapping[str, Mapping[Label, Outcome]]  # by the name of the study


def draw(folder: Path, outcomes: Outcomes) -> None:
    """Write `staleness_throughput.png` and `staleness_ages.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    _throughput(outcomes).savefig(folder / "staleness_throughput.png", dpi=110)
    _ages(outcomes).savefig(folder / "staleness_ages.png", dpi=110)


def _throughput(outcomes: Outcomes) -> Any:
    """Efficiency by depth for each number of slots, and by age bound for each way of rejection."""
    figure, (by_depth, by_bound) = _figure()
    slots = outcomes["slots"]
    for count in dict.fromkeys(label[0] for label in slots):
        points = {int(depth): o.efficiency for (c, depth), o in slots.items() if c == count}
        by_depth.plot(list(points), list(points.values()), marker="o", label=f"{count} slots")
    by_depth.set(
        xlabel="loop.depth", ylabel="efficiency", title="512 samples a step, loop.max_policy_age 16", xscale="log"
    )
    by_depth.set_xticks([1, 2, 4, 8], labels=["1", "2", "4", "8"])
    by_depth.minorticks_off()
    bounds = outcomes["age_bound"]
    for on_stale in dict.fromkeys(label[1] for label in bounds):
        points = {int(bound): o.efficiency for (bound, s), o in bounds.items() if s == on_stale}
        by_bound.plot(list(points), list(points.values()), marker="o", label=f"efficiency, {on_stale}")
        points = {int(bound): o.rejected_share for (bound, s), o in bounds.items() if s == on_stale}
        by_bound.plot(list(points), list(points.values()), marker="o", linestyle=":", label=f"rejected, {on_stale}")
    by_bound.set(xlabel="loop.max_policy_age", title="128 slots, loop.depth 2")
    return _finish(figure)


def _ages(outcomes: Outcomes) -> Any:
    """Shares of the ages for each selection order: balanced at depth 2, and a slow trainer without a bound on depth."""
    figure, axes = _figure()
    for axis, name, depth, title in (
        (axes[0], "depth_and_selection", "2", "balanced stations, loop.depth=2"),
        (axes[1], "slow_trainer", "null", "a trainer at 0.7 of the policy's rate, loop.depth=null"),
    ):
        study = outcomes[name]
        orders = [selection for d, selection in study if d == depth]
        for place, selection in enumerate(orders):
            outcome = study[depth, selection]
            shares = [outcome.ages.get(age, 0) / outcome.trained_samples for age in range(max(outcome.ages) + 1)]
            left = [age + 0.27 * (place - 1) for age in range(len(shares))]
            axis.bar(left, shares, width=0.25, label=f"{selection}, {outcome.rejected_share:.0%} rejected")
        axis.set(xlabel="age of trained samples, in versions", title=title)
    axes[0].set_ylabel("share")
    return _finish(figure)


def _figure() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    return figure, figure.subplots(1, 2, sharey=True)


def _finish(figure: Any) -> Any:
    for axis in figure.axes:
        axis.set_ylim(0, 1.02)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    return figure
