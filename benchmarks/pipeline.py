"""Staleness and throughput of the real loop on simulated stations, an hour of cluster time in seconds.

    python -m benchmarks.pipeline [--quick] [--pictures docs/pictures]
    python -m benchmarks.pipeline --advise --generate-tokens-per-s 40000 --train-tokens-per-s 25000 \\
        --lengths lognormal:800,1.0 [--gpus 8] [--max-length 32768]          see benchmarks.pipeline_advise

**What runs.** The real `Loop`, `GroupQueue`, `StalenessPolicy`, `Ledger`, `score_group` and `pack`, on an event loop
whose clock jumps (`benchmarks.virtual_clock`). An engine with continuous batching (`benchmarks.pipeline_policy`),
rewards and a trainer are simulated: they take time and return lengths, versions and random rewards. Nothing is learned
here, and the time of the controller itself counts as zero, but for `controller_us_per_sample`.

**The bound** of a run is the least time that its trained tokens need: `max(generation, training)`, generation with
every decode slot taken all the time and nothing sampled in vain, training without a pause. Efficiency is the bound by
the time taken. Four steps before the measured ones fill the pipeline, and four after them keep it full to the end.

**Cases**:

| case | what |
|---|---|
| `efficiency_depth2` | efficiency at depth 2, age bound 4; balanced stations, lognormal lengths |
| `async_over_sync_tail` | tokens/s at depth 4 by those at depth 0, the same stations; Pareto lengths up to 32k tokens |
| `async_over_colocated_sync_tail` | the same, where the synchronous run gives all GPUs to each phase in turn |
| `rejected_share_paced` | samples rejected at depth 2 with age bound 2; balanced stations, lengths of 1000 +- 100 |
| `controller_us_per_sample` | CPU time of the process by trained samples, 10,000 groups of 8 in flight |

The CPU time holds all that the process does, the simulated stations included, so it is an upper bound; records have one
entry for 64 tokens, so it holds a 64th of the time that packing takes for real tokens.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import pipeline_advise, pipeline_pictures, pipeline_studies
from benchmarks.pipeline_simulation import Outcome, simulate, simulate_all
from benchmarks.pipeline_studies import HOUR_S, Label
from benchmarks.pipeline_tables import LEGEND, WIDTH, print_outcomes
from benchmarks.table import Row, print_report
from forgelite.command import collect_garbage_less_often


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a rough answer in under a minute: a sixth of the time")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw the pictures of docs/staleness.md there")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="at once (default: one a CPU)")
    pipeline_advise.add_arguments(parser)
    options = parser.parse_args(arguments)
    console = Console(width=WIDTH)
    if options.advise:
        pipeline_advise.advise(pipeline_advise.question(parser, options), console, options.processes)
        return
    collect_garbage_less_often()  # as an app's controller does
    many = simulate(pipeline_studies.controller())  # first, alone on the machine
    seconds = HOUR_S / 6 if options.quick else HOUR_S
    goals = pipeline_studies.goals(seconds if options.quick else 4 * seconds)
    studies = [goals, *pipeline_studies.studies(seconds)]
    scenarios = [scenario for study in studies for scenario in study.rows.values()]
    found = iter(simulate_all(scenarios, options.processes))
    outcomes = {study.name: {label: next(found) for label in study.rows} for study in studies}
    for study in studies:
        print_outcomes(study.title, study.columns, outcomes[study.name], console)
    console.print(LEGEND, highlight=False)
    if options.pictures is not None:
        pipeline_pictures.draw(options.pictures, outcomes)
    title = f"The loop on simulated stations, {seconds:g} simulated seconds a run"
    print_report("pipeline", goal_rows(outcomes[goals.name], many), title=title, console=console)


def goal_rows(outcomes: Mapping[Label, Outcome], many: Outcome) -> list[Row]:
    """The cases of the report.

    Args:
        outcomes: of `pipeline_studies.goals`.
        many: of `pipeline_studies.controller`.
    """
    depth2, paced = outcomes["efficiency_depth2",], outcomes["rejected_share_paced",]
    tail, sync = outcomes["tail, asynchronous",], outcomes["tail, synchronous",]
    in_turn = outcomes["tail, synchronous, all GPUs in turn",]
    return [
        Row(
            case="efficiency_depth2",
            value=depth2.efficiency,
            unit="share",
            goal=0.95,
            note=f"{depth2.steps} steps; {depth2.rejected_share:.1%} of samples too old",
        ),
        Row(
            case="async_over_sync_tail",
            value=tail.tokens_per_s / sync.tokens_per_s,
            unit="x",
            goal=2.7,
            note=f"efficiency {tail.efficiency:.3f} by {sync.efficiency:.3f}",
        ),
        Row(
            case="async_over_colocated_sync_tail",
            value=tail.tokens_per_s / in_turn.tokens_per_s,
            unit="x",
            note="all GPUs generate, then all train",
        ),
        Row(case="rejected_share_paced", value=paced.rejected_share, unit="share", goal=0.01, at_most=True),
        Row(
            case="controller_us_per_sample",
            value=1e6 * many.controller_s / many.trained_samples,
            unit="us",
            goal=100.0,
            at_most=True,
            note=f"{many.trained_samples:,} samples, at most {many.most_groups_in_flight:,} groups in flight",
        ),
    ]


if __name__ == "__main__":
    main()
