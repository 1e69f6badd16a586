"""The policy service, beside the bare engine and beside vLLM's own server, in the same run.

    python -m benchmarks.policy [--quick]
    python -m benchmarks.policy --timeline docs/pictures/policy_modes.png

**What runs.** A `PolicyService` with real replicas in processes of their own, on the toy's model: so small that nearly
everything that is not the engine shows. The compared sides take turns in every round, so that a machine that drifts
drifts for both; a ratio is of medians. Pauses and the picture come from traces of a real engine under its
`EngineLoop`, with versions that are published to a store and served in place.

**Cases with a goal**: `service_vs_bare_32`, `service_vs_bare_128` (tokens per second by those of the bare engine on the
same batch), `pause_in_flight` (longest gap between two tokens of a running sequence, by the median step, with
`policy.update.kv=keep`; what recomputing the cache adds is in `pause_in_flight_recompute`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import policy_endpoint, policy_pauses, policy_recovery, policy_throughput, policy_timeline
from benchmarks.policy_model import MODEL, save_model
from benchmarks.policy_service import serve
from benchmarks.table import Row, print_report
from forgelite.mesh.environment import root_environment

_PARTS: dict[str, Callable[..., list[Row]]] = {
    "service": lambda folder, quick: asyncio.run(_service(folder, quick=quick)),
    "pauses": policy_pauses.rows,
    "endpoint": policy_endpoint.rows,
}


async def _service(folder: Path, *, quick: bool) -> list[Row]:
    async with serve(folder) as served:
        measured = await policy_throughput.rows(served, folder, quick=quick)
        return measured + await policy_recovery.rows(served, folder, quick=quick)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, or draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a rough answer in under a minute, without vLLM's server")
    parser.add_argument("--only", choices=_PARTS, nargs="+", default=list(_PARTS), help="some of the parts")
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="draw the four modes instead")
    options = parser.parse_args(arguments)
    os.environ.update(root_environment(os.environ))  # before Monarch is imported
    with tempfile.TemporaryDirectory() as work:
        folder = save_model(Path(work))
        if options.timeline is not None:
            policy_timeline.draw(folder, options.timeline)
            return
        rows = [row for part in options.only for row in _PARTS[part](folder, quick=options.quick)]
    print_report("policy", rows, title=f"The policy service on this machine. Model: {MODEL}")


if __name__ == "__main__":
    main()
