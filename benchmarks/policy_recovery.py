"""How long a policy of one replica is without it: from the kill -9 of its process to the first completion after it."""

from __future__ import annotations

import os
import signal
import statistics
import time
from pathlib import Path

from benchmarks.policy_model import requests_of
from benchmarks.policy_service import Served
from benchmarks.table import Row, spread


async def rows(served: Served, folder: Path, *, quick: bool) -> list[Row]:
    """`recovery_s`, of a service of one replica."""
    from safetensors.torch import load_file

    manifest = await served.store.publish(1, load_file(folder / "model.safetensors"))
    await served.service.update_weights(1, manifest)
    seconds = [await _kill_and_wait(served, number) for number in range(1 if quick else 3)]
    note = f"{spread(seconds)}; notice, start an engine, take the version that is served, sample"
    return [Row(case="recovery_s", value=statistics.median(seconds), unit="s", note=note)]


async def _kill_and_wait(served: Served, number: int) -> float:
    (process,) = served.processes.values()
    (process_id,) = process.process_ids
    (request,) = requests_of(1, 8, f"after kill {number}")
    killed = time.monotonic()
    os.kill(process_id, signal.SIGKILL)
    (completion,) = await served.service.generate_group(request)
    seconds = time.monotonic() - killed
    if [span.version for span in completion.spans] != [1]:
        raise RuntimeError(f"the recovered replica sampled with {completion.spans}")
    return seconds
