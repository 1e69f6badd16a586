"""Held-out accuracy after equally many samples, by the age of the samples and by what corrects for it.

    python -m benchmarks.staleness [--quick] [--seeds 5] [--steps 40] [--lr 2e-4] [--picture FILE]

**What runs.** The toy of `configs/grpo/toy.yaml` from its warm start, with real vLLM and torchtitan in one process
(`benchmarks.staleness_training`), in two processes side by side. Every batch has exactly the age of its run: batch b is
sampled by version b - age (the first ones by version 0) and trained by version b. For one seed, all runs see the
same prompts in the same order, and as many samples; groups of equal rewards teach nothing and are not replaced. No
divergence from the reference is in the loss, which would hold the policy back by itself. The evaluation is greedy,
on 256 held-out prompts.

**Methods**, all with the defaults of their keys:

| method | `loss` | |
|---|---|---|
| `none` | `reinforce` | no ratio, no trust region, no correction; the app refuses it for asynchronous runs |
| `token_tis` | `reinforce`, `corrections: [{name: token_tis}]` | a weight for each token, at most 2 |
| `decoupled_ppo` | `decoupled_ppo` | one step a batch, so the ratio is 1: only the weight acts, at most 5 |
| `opsm` | `reinforce`, `corrections: [{name: opsm}]` | leaves out bad samples that the policy has left behind |
| `gspo` | `gspo` | the ratio of a sequence, clipped within 0.0003 and 0.0004 of 1 |
| `clip` | `clip` | the library's default: the ratio of a token, clipped within 0.2 and 0.28 of 1 |

**Cases**: `accuracy_<method>_age_<age>`, the mean over the seeds after the last step, with the least and the largest
beside it; `warm_start` is the accuracy before. `--picture` draws them, and the course of the oldest age.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.grpo import CONFIG, ROOT, WARM_START
from benchmarks.table import Row, print_report, spread
from forgelite.config import GRPOConfig, load_config
from forgelite.config.corrections import OPSM, TokenTIS
from forgelite.config.loss import (
    ClipLossConfig,
    DecoupledPPOLossConfig,
    GSPOLossConfig,
    LossConfig,
    ReinforceLossConfig,
)
from forgelite.mesh.environment import station_environment
from forgelite.policy.environment import policy_environment

if TYPE_CHECKING:
    from benchmarks.staleness_training import Curve

METHODS: Mapping[str, LossConfig] = {
    "none": ReinforceLossConfig(),
    "token_tis": ReinforceLossConfig(corrections=[TokenTIS()]),
    "decoupled_ppo": DecoupledPPOLossConfig(),
    "opsm": ReinforceLossConfig(corrections=[OPSM()]),
    "gspo": GSPOLossConfig(),
    "clip": ClipLossConfig(),
}
AGES = (0, 1, 2, 4, 8)
PROCESSES = 2
EVALUATIONS = 4  # of a run, after the first one
DEADLINE_S = 3600.0  # of all runs together


@dataclass(kw_only=True, slots=True, frozen=True)
class Run:
    """One training run. Example: `Run(method="opsm", age=4, seed=0, steps=40, lr=2e-4)`."""

    method: str
    age: int
    seed: int
    steps: int
    lr: float


def main(argv: Sequence[str] | None = None) -> None:
    """Run everything and print the cases."""
    arguments = _parse(argv)
    if not (ROOT / WARM_START / "config.json").exists():
        sys.exit(f"benchmarks.staleness: there is no {WARM_START}: run `make demo` first")
    runs = [
        Run(method=method, age=age, seed=seed, steps=arguments.steps, lr=arguments.lr)
        for seed in range(arguments.seeds)
        for age in arguments.ages
        for method in METHODS
    ]
    started, load = time.monotonic(), os.getloadavg()[0]
    curves = run_all(runs)
    if arguments.picture is not None:
        draw(curves, arguments.picture)
    title = (
        f"Held-out accuracy after {arguments.steps} steps at lr {arguments.lr:g}, {arguments.seeds} seeds; "
        f"{os.cpu_count()} CPUs, load before {load:.1f}, {time.monotonic() - started:.0f} s"
    )
    print_report("staleness", report_rows(curves), title=title)


def run_all(runs: Sequence[Run]) -> dict[Run, Curve]:
    """Do all runs, in `PROCESSES` processes with an engine each.

    Raises:
        TimeoutError: they were not done by `DEADLINE_S`. What a run raises passes through.
    """
    # vLLM and OpenMP read it when the interpreter of a process starts.
    os.environ.update(station_environment() | policy_environment("cpu"))
    curves: dict[Run, Curve] = {}
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        for done in pool.map(do_runs, [runs[i::PROCESSES] for i in range(PROCESSES)], timeout=DEADLINE_S):
            curves |= done
    return {run: curves[run] for run in runs}


def do_runs(runs: Sequence[Run]) -> dict[Run, Curve]:
    """Do some runs one after the other, in this process."""
    import asyncio

    from benchmarks.staleness_training import start_policy, train_at_age

    curves: dict[Run, Curve] = {}
    if not runs:
        return curves
    engine = start_policy(configuration(runs[0]))
    try:
        for run in runs:
            every = max(1, run.steps // EVALUATIONS)
            training = train_at_age(engine, configuration(run), METHODS[run.method], age=run.age, evaluate_every=every)
            curves[run] = curve = asyncio.run(training)
            print(
                f"seed {run.seed} age {run.age} {run.method:<14} {curve.accuracy[0]:.3f} -> {curve.accuracy[-1]:.3f}  "
                f"effective samples {curve.ess:.2f}  {curve.seconds:4.1f} s",
                flush=True,
            )
    finally:
        engine.close()
    return curves


def configuration(run: Run) -> GRPOConfig:
    """The toy's, with depth 0: the age is the driver's doing."""
    overrides = [
        f"model.path={ROOT / WARM_START}",
        f"run.seed={run.seed}",
        f"loop.steps={run.steps}",
        "loop.depth=0",
        "loop.max_policy_age=0",
        f"trainer.optimizer.lr={run.lr}",
        "reference.enabled=false",
        "mesh.device=cpu",
    ]
    return load_config(GRPOConfig, ROOT / CONFIG, overrides)


def report_rows(curves: Mapping[Run, Curve]) -> list[Row]:
    """The cases of the table."""
    starts = [curve.accuracy[0] for curve in curves.values()]
    rows = [Row(case="warm_start", value=statistics.mean(starts), unit="share")]
    for method in METHODS:
        for age, values in _last(curves, method).items():
            case = f"accuracy_{method}_age_{age}"
            rows.append(Row(case=case, value=statistics.mean(values), unit="share", note=spread(values)))
    return rows


def draw(curves: Mapping[Run, Curve], path: Path) -> None:
    """Draw accuracy by age, and over the steps at the largest age; every line is a mean over the seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    by_age, course = figure.subplots(1, 2, sharey=True)
    oldest = max(run.age for run in curves)
    for method in METHODS:
        last = _last(curves, method)
        means = [statistics.mean(values) for values in last.values()]
        reach = [[m - min(v) for m, v in zip(means, last.values(), strict=True)]]
        reach.append([max(v) - m for m, v in zip(means, last.values(), strict=True)])
        by_age.errorbar(list(last), means, yerr=reach, marker="o", capsize=2, elinewidth=0.7, label=method)
        at_oldest = [curve for run, curve in curves.items() if run.method == method and run.age == oldest]
        points = [statistics.mean(values) for values in zip(*(c.accuracy for c in at_oldest), strict=True)]
        course.plot(at_oldest[0].steps, points, marker="o", label=method)
    by_age.set(
        xlabel="age of every sample, in versions", ylabel="held-out accuracy", ylim=(0, 1), title="after the last step"
    )
    by_age.set_xticks(sorted({run.age for run in curves}))
    by_age.legend(loc="lower left", fontsize="small")
    course.set(xlabel="step", title=f"at age {oldest}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _last(curves: Mapping[Run, Curve], method: str) -> dict[int, list[float]]:
    """The accuracy after the last step, for each age the values of all seeds."""
    values: dict[int, list[float]] = {}
    for run, curve in curves.items():
        if run.method == method:
            values.setdefault(run.age, []).append(curve.accuracy[-1])
    return values


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.staleness", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, 12 steps, ages 0 and 4: under a minute, rough")
    parser.add_argument("--seeds", type=int, help="runs of each kind (default 5)")
    parser.add_argument("--steps", type=int, help="optimizer steps of a run (default 40)")
    parser.add_argument("--lr", type=float, default=2e-4, help="learning rate (default 2e-4, the toy's own)")
    parser.add_argument("--picture", type=Path, help="a PNG file to draw the cases into")
    arguments = parser.parse_args(argv)
    arguments.seeds = arguments.seeds or (1 if arguments.quick else 5)
    arguments.steps = arguments.steps or (12 if arguments.quick else 40)
    arguments.ages = (0, 4) if arguments.quick else AGES
    if arguments.seeds < 1 or arguments.steps < 1 or arguments.lr <= 0:
        parser.error("--seeds and --steps are at least 1, and --lr is above 0")
    return arguments


if __name__ == "__main__":
    main()
