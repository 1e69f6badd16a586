"""What an update costs running sequences, by mode: the longest gap between two of their tokens, in median steps.

`pause_in_flight` is the swap alone (`policy.update.kv=keep`); with `kv=recompute`, the default, the step after it also
prefills everything that runs, which is `pause_in_flight_recompute`.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.policy_trace import Mode, Plan, Trace, trace
from benchmarks.table import Row, spread

_LANES = 32  # sequences, as in `service_vs_bare_32`
_CASES: dict[str, tuple[Mode, bool]] = {  # the mode, and whether running sequences keep their cache
    "pause_in_flight": ("in_flight", True),
    "pause_in_flight_recompute": ("in_flight", False),
    "pause_drain": ("drain", False),
    "pause_abort": ("abort", False),
}


def rows(folder: Path, *, quick: bool) -> list[Row]:
    """`pause_in_flight`, `pause_drain` and `pause_abort`; after each, what else the mode costs."""
    plans = [
        Plan(mode=mode, keep_kv=keep, updates=3 if quick else 8, tokens_between=4000, lanes=_LANES)
        for mode, keep in _CASES.values()
    ]
    traces = trace(folder, [plans[0], *plans])[1:]  # the first one warms the engine up
    return [_row(case, run) for case, run in zip(_CASES, traces, strict=True)]


def _row(case: str, run: Trace) -> Row:
    pauses, waits = run.pauses(), run.waits()
    recomputed = statistics.mean(swap.recomputed_tokens for swap in run.swaps)
    note = f"{spread(pauses)}; a step is {1e3 * run.step_s:.1f} ms; recomputed {recomputed:.0f} tokens, lost none"
    if any(swap.held for swap in run.swaps):
        note += f"; newcomers waited {statistics.median(waits):.0f} steps"
    goal = 2.0 if case == "pause_in_flight" else None
    return Row(case=case, value=statistics.median(pauses), unit="steps", goal=goal, at_most=goal is not None, note=note)
