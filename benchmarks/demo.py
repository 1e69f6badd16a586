"""What a newcomer waits for: the installation and `make demo`, in a fresh clone of what is committed.

    python -m benchmarks.demo [--quick] [--keep FOLDER]

**What runs.** `git clone` of this repository into a temporary folder; there `make setup`, `make setup` again, `make
demo`, and `make demo` again, each a process of its own. `--quick` takes the environment of this checkout instead of
installing one. Packages come from wherever pip finds them, its cache included, so `install_s` says as much of the
network as of the project.

**Cases**: `install_s`, `install_mb` (the size of `.venv`), `install_again_s`, `demo_s` and `demo_again_s` (the second
keeps the warm start), `demo_memory_mb` (largest sum of PSS over all processes, sampled every two seconds),
`accuracy_before` and `accuracy` (held out, greedy), `pause_ms` (median `sync/pause_s` of the second run),
`engine_step_ms` (its mean engine step), and their ratio `pause_by_engine_step`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.grpo import ROOT, Finished, run_process
from benchmarks.table import Row, print_report
from forgelite.observe.metrics import read_metrics


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all cases and print them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="install nothing: take this checkout's .venv")
    parser.add_argument("--keep", type=Path, help="clone into this folder, which must not exist, and leave it there")
    arguments = parser.parse_args(argv)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="forgelite-bench-") as folder:
        rows = measure(arguments.keep or Path(folder, "clone"), Path(folder), install=not arguments.quick)
    print_report("demo", rows, title=f"The demo in a fresh clone, {os.cpu_count()} CPUs, load before {load:.1f}")


def measure(clone: Path, logs: Path, *, install: bool) -> list[Row]:
    """Clone, install, run.

    Args:
        clone: a folder that does not exist.
        logs: where output goes.
        install: make an environment; otherwise take this checkout's.
    """
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    rows = []
    if install:
        rows.append(_row("install_s", _make("setup", clone, logs).wall_s, "s"))
        size = sum(file.lstat().st_size for file in (clone / ".venv").rglob("*") if file.is_file())
        rows.append(_row("install_mb", size / 1e6, "MB"))
    else:
        (clone / ".venv").symlink_to(ROOT / ".venv")
    rows.append(_row("install_again_s", _make("setup", clone, logs).wall_s, "s"))
    first, second = _make("demo", clone, logs), _make("demo", clone, logs)
    lines = read_metrics(clone / "runs" / "toy")
    pauses = [line["sync/pause_s"] for line in lines if "sync/pause_s" in line]
    steps = sum(line.get("time/engine_step_s/denominator", 0) for line in lines)
    busy_s = sum(line.get("time/engine_step_s/numerator", 0.0) for line in lines)
    pause_ms, step_ms = 1e3 * statistics.median(pauses), 1e3 * busy_s / steps
    return [
        *rows,
        _row("demo_s", first.wall_s, "s"),
        _row("demo_memory_mb", first.memory_mb, "MB"),
        _row("demo_again_s", second.wall_s, "s"),
        _row("accuracy_before", lines[0]["eval/reward"], "share"),
        _row("accuracy", lines[-1]["eval/reward"], "share"),
        Row(case="pause_ms", value=pause_ms, unit="ms", note=f"{len(pauses)} updates"),
        Row(case="engine_step_ms", value=step_ms, unit="ms", note=f"mean of {steps} steps"),
        Row(case="pause_by_engine_step", value=pause_ms / step_ms, unit="x", goal=1.0, at_most=True),
    ]


def _make(target: str, clone: Path, logs: Path) -> Finished:
    return run_process(["make", target, f"PYTHON={sys.executable}"], logs / f"{target}.txt", folder=clone)


def _row(case: str, value: float, unit: str) -> Row:
    return Row(case=case, value=value, unit=unit)


if __name__ == "__main__":
    main()
