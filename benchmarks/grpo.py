"""Samples a second of forgelite's GRPO app beside TRL's GRPOTrainer, on the toy and on CPUs.

    python -m benchmarks.grpo [--quick] [--repeats 3] [--steps 40]      needs: make bench-trl-env, once

**What runs.** Ours: `apps.grpo.main` with `configs/grpo/toy.yaml`, the real engines in five processes. TRL:
one process without vLLM, in `.venv-trl`, by `benchmarks.trl_baseline`. Every run is a process of its own, one
after the other, and the five kinds of runs take turns, so that a machine that drifts drifts for all of them.
Equal on both sides, and taken from one resolved configuration: the warm-start weights, the prompts and their
order, groups x group size, steps, optimizer, loss (token mean, the two clip bounds, KL to the reference),
advantages, temperature, float32, one OpenMP thread a process. What TRL does otherwise stands in
`benchmarks.trl_baseline`. What forgelite does otherwise: it filters groups whose rewards are all equal and
samples others in their place, where TRL trains them with advantages of zero; and its samples are one version
old.

**What is measured.** Samples a second from the end of step 4 to the end of the last step; start-up and the
held-out evaluations are outside on both sides. A sample is a completion that was sampled and scored within
that span, those of filtered groups too: on TRL's side groups x group size a step. Steps a second stand beside
it, for a step trains groups x group size samples on both sides, whatever was filtered before.

**Cases**, medians of the repeats:

| case | what |
|---|---|
| `vs_trl` | samples a second, ours by TRL's; depth 1, both with a reference |
| `samples_per_s`, `trl_samples_per_s` | the two numbers behind it |
| `steps_per_s`, `trl_steps_per_s` | optimizer steps a second in the same span |
| `vs_trl_no_reference` | the same ratio where neither side has a reference |
| `no_reference_samples_per_s`, `trl_no_reference_samples_per_s` | the two numbers behind it |
| `depth0_samples_per_s` | ours, synchronous, with the reference |
| `greedy_accuracy`, `trl_greedy_accuracy` | held-out exact match after training, greedy, eos included |
| `wall_s`, `trl_wall_s` | the whole process, start-up and two evaluations included |
| `memory_mb`, `trl_memory_mb` | largest sum of PSS over all processes of a run, sampled every two seconds |
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.table import Row, median_row, print_report
from benchmarks.trl_baseline import Result, Spec
from forgelite.config import GRPOConfig, load_config
from forgelite.observe.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "configs/grpo/toy.yaml"
WARM_START = "runs/toy-sft/checkpoints/hf"
TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"

UNTIMED_STEPS = 4  # at the start: kernels are chosen, caches fill, the pipeline fills
KL_COEFFICIENT = 0.02
MEMORY_EVERY_S = 2.0
DEADLINE_S = 900.0  # of one run

WITH_REFERENCE = ("reference.enabled=true", f"loss.kl_coefficient={KL_COEFFICIENT}")
NO_REFERENCE = ("reference.enabled=false", "loss.kl_coefficient=0")
DEPTH_0 = (*WITH_REFERENCE, "loop.depth=0", "loop.max_policy_age=0")


@dataclass(kw_only=True, slots=True, frozen=True)
class Measured:
    """One run. Example: `samples_per_s=812.0, steps_per_s=5.1, accuracy=0.93, wall_s=21.0, memory_mb=1900.0`."""

    samples_per_s: float
    steps_per_s: float
    accuracy_before: float  # held out, greedy
    accuracy: float  # after training
    wall_s: float
    memory_mb: float


@dataclass(kw_only=True, slots=True, frozen=True)
class Finished:
    """A process that ended well."""

    wall_s: float
    memory_mb: float


Contestant = Callable[[Path], Measured]  # runs once, in an empty folder


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all cases and print them."""
    arguments = _parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run in progress ends, too
    if not TRL_PYTHON.exists():
        sys.exit(f"benchmarks.grpo: there is no {TRL_PYTHON.parents[1].name}: run `make bench-trl-env` first")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="forgelite-bench-") as folder:
        ensure_warm_start(Path(folder, "warm-start"))
        measured = take_turns(contestants(arguments.steps), arguments.repeats, Path(folder))
    title = f"GRPO on the toy, medians; {arguments.steps} steps, {os.cpu_count()} CPUs, load before {load:.1f}"
    print_report("grpo", report_rows(measured), title=title)


def contestants(steps: int) -> dict[str, Contestant]:
    """The kinds of runs, in the order in which they take turns."""
    return {
        "ours": lambda folder: run_ours(steps, WITH_REFERENCE, folder),
        "trl": lambda folder: run_trl(steps, WITH_REFERENCE, folder),
        "ours_no_reference": lambda folder: run_ours(steps, NO_REFERENCE, folder),
        "trl_no_reference": lambda folder: run_trl(steps, NO_REFERENCE, folder),
        "ours_depth0": lambda folder: run_ours(steps, DEPTH_0, folder),
    }


def take_turns(runs: Mapping[str, Contestant], repeats: int, folder: Path) -> dict[str, list[Measured]]:
    """Run everybody once, then everybody again, `repeats` times."""
    measured: dict[str, list[Measured]] = {name: [] for name in runs}
    for turn in range(1, repeats + 1):
        for name, run in runs.items():
            place = folder / f"{turn}-{name}"
            place.mkdir()
            result = run(place)
            measured[name].append(result)
            print(
                f"{turn}/{repeats} {name:<18} {result.samples_per_s:5.0f} samples/s {result.steps_per_s:5.2f} steps/s  "
                f"greedy {result.accuracy_before:.3f} -> {result.accuracy:.3f}  "
                f"{result.wall_s:5.1f} s {result.memory_mb:6.0f} MB",
                flush=True,
            )
    return measured


def report_rows(measured: Mapping[str, Sequence[Measured]]) -> list[Row]:
    """The cases of the table."""

    def values(name: str, field: str) -> list[float]:
        return [getattr(result, field) for result in measured[name]]

    def ratio(case: str, ours: str, trl: str, goal: float | None) -> Row:
        quotient = statistics.median(values(ours, "samples_per_s")) / statistics.median(values(trl, "samples_per_s"))
        return Row(case=case, value=quotient, unit="x", goal=goal, note="ratio of medians")

    def row(case: str, name: str, field: str, unit: str) -> Row:
        return median_row(case, values(name, field), unit)

    return [
        ratio("vs_trl", "ours", "trl", 1.0),
        row("samples_per_s", "ours", "samples_per_s", "samples/s"),
        row("trl_samples_per_s", "trl", "samples_per_s", "samples/s"),
        row("steps_per_s", "ours", "steps_per_s", "steps/s"),
        row("trl_steps_per_s", "trl", "steps_per_s", "steps/s"),
        ratio("vs_trl_no_reference", "ours_no_reference", "trl_no_reference", None),
        row("no_reference_samples_per_s", "ours_no_reference", "samples_per_s", "samples/s"),
        row("trl_no_reference_samples_per_s", "trl_no_reference", "samples_per_s", "samples/s"),
        row("depth0_samples_per_s", "ours_depth0", "samples_per_s", "samples/s"),
        row("greedy_accuracy", "ours", "accuracy", "share"),
        row("trl_greedy_accuracy", "trl", "accuracy", "share"),
        row("wall_s", "ours", "wall_s", "s"),
        row("trl_wall_s", "trl", "wall_s", "s"),
        row("memory_mb", "ours", "memory_mb", "MB"),
        row("trl_memory_mb", "trl", "memory_mb", "MB"),
    ]


# ---- ours ----


def run_ours(steps: int, variant: Sequence[str], folder: Path) -> Measured:
    """One run of the app in this interpreter's environment."""
    run_folder = folder / "run"
    overrides = _overrides(steps, variant, run_folder)
    finished = run_process([sys.executable, "-m", "apps.grpo.main", "--config", CONFIG, *overrides], folder / "log.txt")
    lines = read_metrics(run_folder)
    samples_per_s, steps_per_s = our_rates(lines)
    return Measured(
        samples_per_s=samples_per_s,
        steps_per_s=steps_per_s,
        accuracy_before=lines[0]["eval/reward"],
        accuracy=lines[-1]["eval/reward"],
        wall_s=finished.wall_s,
        memory_mb=finished.memory_mb,
    )


def our_rates(lines: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Samples and steps a second after step `UNTIMED_STEPS`, from the lines of metrics.jsonl.

    The `time/step_s` of the lines follow one another without a gap (writing a line counts for the next step). The
    evaluation after the last step is inside its `time/step_s`, with nothing beside it, and is taken off.
    """
    timed = [line for line in lines if line["step"] > UNTIMED_STEPS]
    start = next(line for line in lines if line["step"] == UNTIMED_STEPS)
    seconds = sum(line["time/step_s"] - line.get("time/eval_s", 0.0) for line in timed)
    return (_sampled(timed[-1]) - _sampled(start)) / seconds, len(timed) / seconds


def _sampled(line: Mapping[str, Any]) -> int:
    """Completions that had been sampled and scored by the end of a step, whatever became of them."""
    return line["ledger/issued"] - line["ledger/in_flight"] - line["ledger/cancelled"]


def _overrides(steps: int, variant: Sequence[str], run_folder: Path) -> list[str]:
    return [
        f"run.dir={run_folder}",
        f"model.path={ROOT / WARM_START}",
        f"loop.steps={steps}",
        "eval.every=0",
        "metrics.tensorboard=false",
        "metrics.progress=plain",
        "mesh.device=cpu",
        *variant,
    ]


# ---- TRL ----


def run_trl(steps: int, variant: Sequence[str], folder: Path) -> Measured:
    """One run of TRL with the numbers that the app would take from the same configuration."""
    spec_file, result_file = folder / "spec.json", folder / "result.json"
    spec = trl_spec(load_config(GRPOConfig, ROOT / CONFIG, _overrides(steps, variant, folder / "run")), folder)
    spec_file.write_text(json.dumps(asdict(spec)), encoding="utf-8")
    command = [str(TRL_PYTHON), "-m", "benchmarks.trl_baseline", str(spec_file), str(result_file)]
    finished = run_process(command, folder / "log.txt")
    result = Result(**json.loads(result_file.read_text(encoding="utf-8")))
    timed = result.step_ends[UNTIMED_STEPS - 1 :]
    steps_per_s = (len(timed) - 1) / (timed[-1] - timed[0])
    return Measured(
        samples_per_s=steps_per_s * spec.groups * spec.group_size,
        steps_per_s=steps_per_s,
        accuracy_before=result.accuracy_before,
        accuracy=result.accuracy,
        wall_s=finished.wall_s,
        memory_mb=finished.memory_mb,
    )


def trl_spec(config: GRPOConfig, folder: Path) -> Spec:
    """The same run for TRL: prompts in the order in which the app draws them."""
    from forgelite.preparation import prepare

    inputs = prepare(config)
    loop, optimizer, loss = config.loop, config.trainer.optimizer, config.loss
    return Spec(
        model=str(ROOT / WARM_START),
        rows=[dict(next(inputs.prompts).row) for _ in range(loop.steps * loop.groups_per_step)],
        held_out=[dict(prompt.row) for prompt in inputs.held_out],
        steps=loop.steps,
        groups=loop.groups_per_step,
        group_size=loop.group_size,
        max_tokens=config.policy.sampling.max_tokens,
        temperature=config.policy.sampling.temperature,
        learning_rate=optimizer.lr,
        betas=optimizer.betas,
        weight_decay=optimizer.weight_decay,
        max_norm=config.trainer.training.max_norm,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        beta=loss.kl_coefficient,
        seed=config.run.seed,
        folder=str(folder / "trl"),
    )


# ---- processes ----


def ensure_warm_start(folder: Path) -> None:
    """Make the warm start with the SFT app if it is not there, as `make demo` does; what is there stays."""
    if (ROOT / WARM_START / "config.json").exists():
        return
    print(f"{WARM_START} is missing: training it with apps.sft, once", flush=True)
    folder.mkdir()
    run_process([sys.executable, "-m", "apps.toy.main", str(folder / "base")], folder / "base.txt")
    overrides = [f"model.path={folder / 'base'}", f"run.dir={Path(WARM_START).parents[1]}"]
    command = [sys.executable, "-m", "apps.sft.main", "--config", "configs/sft/toy.yaml", *overrides]
    run_process(command, folder / "sft.txt")


def run_process(command: Sequence[str], log: Path, *, folder: Path = ROOT) -> Finished:
    """Run a command in a folder (the repository's root) and wait for it, sampling its memory.

    Exits with the end of its output if it fails or takes longer than `DEADLINE_S`.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    started, peak = time.monotonic(), 0.0
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            while process.poll() is None and time.monotonic() < started + DEADLINE_S:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(MEMORY_EVERY_S)
                    break
                peak = max(peak, tree_memory_mb(process.pid))
            wall = time.monotonic() - started
        finally:
            _end(process)
    if process.returncode != 0:
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
        why = f"exit code {process.returncode}" if wall < DEADLINE_S else f"not done after {DEADLINE_S:g} s"
        sys.exit("\n".join([*tail, f"benchmarks.grpo: {' '.join(command[:3])} failed: {why}"]))
    return Finished(wall_s=wall, memory_mb=peak)


def tree_memory_mb(pid: int) -> float:
    """The sum of PSS over a process and its descendants: pages that several share are counted once."""
    total = 0
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.Error):
                total += process.memory_full_info().pss
    return total / 1e6


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that is still there, cleanly if it does so soon; its stations end with it."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, how)
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grpo", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one run of each, 12 steps: about a minute, rough")
    parser.add_argument("--repeats", type=int, help="runs of each kind (default 3)")
    parser.add_argument("--steps", type=int, help="optimizer steps of a run (default 40)")
    arguments = parser.parse_args(argv)
    arguments.repeats = arguments.repeats or (1 if arguments.quick else 3)
    arguments.steps = arguments.steps or (12 if arguments.quick else 40)
    if arguments.repeats < 1 or arguments.steps <= UNTIMED_STEPS:
        parser.error(f"--repeats is at least 1, and --steps more than {UNTIMED_STEPS}, which are not timed")
    return arguments


if __name__ == "__main__":
    main()
