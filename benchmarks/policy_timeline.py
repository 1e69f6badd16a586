"""The four ways to take new weights as a picture, drawn from a trace of a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.policy_trace import LANES, Mode, Plan, Trace, Turn, trace

_PLANS = tuple(Plan(mode=mode, updates=2, tokens_between=1000) for mode in ("in_flight", "abort", "drain", "barrier"))
_SAYS: dict[Mode, str] = {
    "in_flight": "in_flight: swap between two steps, sequences go on under the new weights",
    "abort": "abort: cut, swap, resubmit with the tokens so far",
    "drain": "drain: running turns end first, newcomers are held; a rollout of several turns mixes versions",
    "barrier": "barrier: whole rollouts end first; no rollout mixes versions",
}
_COLOURS = ("#4477aa", "#ee8866", "#44aa99")  # told apart also by those who do not see all colours
_WAITING = "#dddddd"
_GAP_STEPS = 8.0  # a longer time between two tokens is shown as a gap


def draw(folder: Path, picture: Path) -> None:
    """Trace every mode on one engine and save a picture, in the format of its suffix."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    traces = trace(folder, [_PLANS[0], *_PLANS])[1:]  # the first one warms the engine up
    longest = max(max(turn.times[-1] for turn in run.turns) / run.step_s for run in traces)
    figure, axes = pyplot.subplots(len(traces), 1, figsize=(11, 9), sharex=True, layout="constrained")
    for axis, run in zip(axes, traces, strict=True):
        _draw_trace(axis, run)
        axis.set_xlim(0, longest)
    axes[-1].set_xlabel("time, in median steps of the engine")
    _add_legend(figure, axes[0])
    figure.savefig(picture, dpi=130)
    pyplot.close(figure)


def _draw_trace(axis: Any, run: Trace) -> None:
    first = run.swaps[0].version - 1
    for turn in run.turns:
        if turn.times[0] - turn.asked > _GAP_STEPS * run.step_s:
            _bar(axis, turn.lane, turn.asked, turn.times[0] - run.step_s, run.step_s, _WAITING)
        for begin, end, version in _stretches(turn, run.step_s):
            _bar(axis, turn.lane, begin, end, run.step_s, _COLOURS[(version - first) % len(_COLOURS)])
    for begin, end, lane in _between_rollouts(run):
        _bar(axis, lane, begin, end, run.step_s, _WAITING)
    for swap in run.swaps:
        axis.axvline(swap.asked / run.step_s, color="black", linewidth=0.8, linestyle=":")
        axis.axvline(swap.swapped / run.step_s, color="black", linewidth=1.2)
    axis.set_title(_SAYS[run.plan.mode], loc="left", fontsize=10)
    axis.set_yticks(range(LANES), [str(lane) for lane in range(LANES)], fontsize=7)
    axis.set_ylim(LANES - 0.4, -0.6)
    axis.set_ylabel("rollout slot", fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _stretches(turn: Turn, step_s: float) -> Iterator[tuple[float, float, int]]:
    """Runs of tokens of one version without a gap, as (begin, end, version); a token begins one step before it ends."""
    begin, previous, version = turn.times[0] - step_s, turn.times[0], turn.versions[0]
    for time, of in zip(turn.times[1:], turn.versions[1:], strict=True):
        if of != version or time - previous > _GAP_STEPS * step_s:
            yield begin, previous, version
            begin, version = (previous if time - previous <= _GAP_STEPS * step_s else time - step_s), of
        previous = time
    yield begin, previous, version


def _between_rollouts(run: Trace) -> Iterator[tuple[float, float, int]]:
    """Where a slot stood empty because no rollout was started."""
    for lane in range(LANES):
        turns = sorted((turn for turn in run.turns if turn.lane == lane), key=lambda turn: turn.asked)
        for before, after in pairwise(turns):
            if after.asked - before.times[-1] > _GAP_STEPS * run.step_s:
                yield before.times[-1], after.asked, lane


def _bar(axis: Any, lane: int, begin: float, end: float, step_s: float, colour: str) -> None:
    axis.barh(
        lane, (end - begin) / step_s, left=begin / step_s, height=0.72, color=colour, edgecolor="white", linewidth=0.5
    )


def _add_legend(figure: Any, axis: Any) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    labels = ("version v", "version v + 1", "version v + 2")
    marks = [Patch(color=colour, label=label) for colour, label in zip(_COLOURS, labels, strict=True)]
    marks.append(Patch(color=_WAITING, label="held"))
    marks.append(Line2D([], [], color="black", linestyle=":", label="update asked for"))
    marks.append(Line2D([], [], color="black", label="weights swapped"))
    figure.legend(handles=marks, loc="outside upper right", ncols=len(marks), fontsize=8, frameon=False)
