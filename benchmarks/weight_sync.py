"""The movement of weights, beside a plain copy of the same bytes in the same run.

    python -m benchmarks.weight_sync [--quick] [--rounds 9]

**What runs.** `WeightStore` as the stations use it, in the environment of a station (`mesh.environment`). A publisher
computes the fingerprint of every byte; `fetch` compares a sample, `fetch_verify_all` every byte. `memcpy` is `copy_`
tensor by tensor between private buffers, one thread. All paths take turns in every round, so that a machine that
drifts drifts for all of them; a ratio is the median of a path by the median of memcpy. The swap is measured on a real
engine of 135M parameters that samples eight sequences. What others do with the same bytes, and what goes between hosts,
is in `benchmarks.weight_sync_peers`.

**Cases with a goal**: `publish`, `fetch`, `fetch_two_readers` (135M parameters, 300 tensors, float32), `swap_ms`
(median pause), `longest_step` (by the median step, over all steps from the first swap on), `cross_host_speedup`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import weight_sync_peers
from benchmarks.table import Row, print_report, spread
from benchmarks.weight_sync_arena import Case, Times, measure
from benchmarks.weight_sync_swap import SwapTimes, measure_swaps
from forgelite.mesh.environment import root_environment, station_environment

PARAMETERS = 135_000_000
TENSORS = 300
MEGABYTE = 1_000_000


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="a rough answer in under a minute, with a tenth of the bytes"
    )
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each path")
    options = parser.parse_args(arguments)
    _restart_as_a_station()
    torch.set_num_threads(1)
    parameters = PARAMETERS // 10 if options.quick else PARAMETERS
    rounds = min(options.rounds, 5) if options.quick else options.rounds
    rows = [
        *_goals(parameters, rounds),
        *_variants(parameters, rounds),
        *_swaps(options.quick),
        *weight_sync_peers.rows(options.quick),
    ]
    _print_growth(parameters, rounds=3, largest_mb=100 if options.quick else 2000)
    size = f"{parameters / MEGABYTE:g}M parameters as {TENSORS} tensors"
    print_report("weight_sync", rows, title=f"Weights on this machine: {size}, by memcpy of the same bytes")


def _restart_as_a_station() -> None:
    """Start this program again where the variables are missing that count only before a process starts."""
    wanted = station_environment() | root_environment({})
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        if os.environ.get("FORGELITE_BENCHMARK_RESTARTED"):
            raise SystemExit("the environment of a station does not survive a restart of this program")
        restarted = {"FORGELITE_BENCHMARK_RESTARTED": "1"}
        command = [sys.executable, "-m", "benchmarks.weight_sync", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | wanted | restarted)


def _goals(parameters: int, rounds: int) -> list[Row]:
    times = measure(Case(nbytes=4 * parameters, tensors=TENSORS), rounds=rounds, two_readers=True)
    milliseconds = [1e3 * seconds for seconds in times.memcpy]
    return [
        Row(case="memcpy_ms", value=statistics.median(milliseconds), unit="ms", note=spread(milliseconds)),
        _ratio("publish", times, "publish", goal=0.8),
        _ratio("fetch", times, "fetch", goal=0.6),
        _ratio("fetch_verify_all", times, "fetch_all"),
        _ratio("fetch_two_readers", times, "fetch_two", goal=1.2),
    ]


def _variants(parameters: int, rounds: int) -> list[Row]:
    rows = []
    for name, case in {
        "no_fingerprint": Case(nbytes=4 * parameters, tensors=TENSORS, fingerprint=False),
        "bf16": Case(nbytes=2 * parameters, tensors=TENSORS, dtype=torch.bfloat16),
        "20_tensors": Case(nbytes=4 * parameters, tensors=20),
        "5000_tensors": Case(nbytes=4 * parameters, tensors=5000),
    }.items():
        times = measure(case, rounds=rounds, two_readers=name == "bf16")
        rows += [_ratio(f"publish_{name}", times, "publish"), _ratio(f"fetch_{name}", times, "fetch")]
        if times.fetch_two:
            rows.append(_ratio(f"fetch_two_readers_{name}", times, "fetch_two"))
    return rows


def _swaps(quick: bool) -> list[Row]:
    in_place = measure_swaps("zero_copy", swaps=10, quick=quick)
    copied = measure_swaps("copy", swaps=4, quick=quick)
    return [
        _pause("swap_ms", in_place, goal=2.0),
        Row(
            case="longest_step",
            value=in_place.longest_step,
            unit="x",
            goal=2.0,
            at_most=True,
            note=f"by the median of {len(in_place.steps)} steps, {1e3 * statistics.median(in_place.steps):.1f} ms",
        ),
        _pause("copy_swap_ms", copied),
    ]


def _pause(case: str, times: SwapTimes, goal: float | None = None) -> Row:
    pauses = [1e3 * seconds for seconds in times.pauses]
    value = statistics.median(pauses)
    return Row(case=case, value=value, unit="ms", goal=goal, at_most=goal is not None, note=spread(pauses))


def _ratio(case: str, times: Times, name: str, goal: float | None = None) -> Row:
    seconds: list[float] = getattr(times, name)
    note = f"median of {len(seconds)}: {1e3 * min(seconds):.0f} to {1e3 * max(seconds):.0f} ms"
    return Row(case=case, value=times.ratio(name), unit="x", goal=goal, at_most=goal is not None, note=note)


def _print_growth(parameters: int, *, rounds: int, largest_mb: int) -> None:
    """Milliseconds, and the ratio to memcpy, as bytes and number of tensors grow."""
    sizes = [mb for mb in (10, 100, 540, 2000) if mb <= largest_mb]
    cases = [Case(nbytes=mb * MEGABYTE, tensors=TENSORS) for mb in sizes]
    cases += [Case(nbytes=4 * parameters, tensors=count) for count in (20, 1000, 5000)]
    table = Table(title="Growth with bytes and with the number of tensors (float32)", title_justify="left")
    for column in ("MB", "tensors", "memcpy ms", "publish ms", "fetch ms", "publish x", "fetch x"):
        table.add_column(column, justify="right")
    for case in cases:
        times = measure(case, rounds=rounds)
        medians = [1e3 * statistics.median(seconds) for seconds in (times.memcpy, times.publish, times.fetch)]
        ratios = [times.ratio("publish"), times.ratio("fetch")]
        table.add_row(
            f"{case.nbytes / MEGABYTE:.0f}",
            str(case.tensors),
            *(f"{value:.1f}" for value in medians),
            *(f"{value:.2f}" for value in ratios),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
