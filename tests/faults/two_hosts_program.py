"""Run on one of two hosts: publishes here, and has the other one fetch. Started by `test_weights_between_hosts`.

    python -m tests.faults.two_hosts_program FOLDER OWN_ADDRESS WORKER_ADDRESS DEVICE

Writes what it saw to FOLDER/seen.json. The hosts share a file system, by which they tell one another how far they are
while they cannot talk.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from monarch.actor import (
    Actor,
    attach_to_workers,
    concurrent_endpoint,
    default_bootstrap_cmd,
    enable_transport,
    this_host,
)

from forgelite.errors import WeightError
from forgelite.mesh.environment import station_environment
from forgelite.weights import SHARED_MEMORY, WeightStore, reclaim
from forgelite.weights.arena_peer import ArenaPeer
from forgelite.weights.manifest import Manifest
from forgelite.weights.remote import RemoteStore
from forgelite.weights.remote_puller import PullerSetup, WeightPuller
from forgelite.weights.remote_source import WeightSource
from tests.unit.weights_memory import MemoryDirectory

TIMEOUT_S = 4.0
SIZE = 16 << 20  # elements of each of two tensors


def filled(version: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((SIZE,), float(version)), "b": torch.full((4, SIZE // 4), version, dtype=torch.int32)}


class Reader(Actor):
    """A policy on the other host."""

    @concurrent_endpoint
    async def fetch(self, manifest: Manifest, puller: Any, note: str) -> None:
        """Fetch, and write to the file `note` how long it took and how it ended."""
        directory = MemoryDirectory()
        local = WeightStore(directory=directory, run_id="reader")
        store = RemoteStore(local=local, directory=directory, host="b", puller=puller, timeout_s=TIMEOUT_S)
        start = time.monotonic()
        result: dict[str, Any] = {}
        try:
            async with store.lease(manifest) as views:
                result["right"] = all(bool((view == manifest.version).all()) for view in views.values())
        except WeightError as error:
            result["error"] = f"{type(error).__name__}: {error}"
        store.close()
        write_note(Path(note), result | {"seconds": time.monotonic() - start})


def write_note(path: Path, result: dict[str, Any]) -> None:
    """As a whole or not at all: the other host waits for it."""
    work = path.with_suffix(".new")
    work.write_text(json.dumps(result))
    work.rename(path)


def set_link(device: str, state: str) -> None:
    subprocess.run(["ip", "link", "set", device, state], check=True)


def torn(run_id: str) -> bool:
    """Whether a version is being written into a segment of the run."""
    for path in SHARED_MEMORY.glob(f"forgelite-{run_id}-*.weights"):
        peer = ArenaPeer(path)
        if any(peer.is_torn(slot) for slot in range(peer.layout.slots)):
            return True
    return False


async def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not happen within {seconds} s")
        await asyncio.sleep(0.002)


async def run(folder: Path, own: str, other: str, device: str) -> dict[str, Any]:
    enable_transport(own)
    there = attach_to_workers(name="there", ca="trust_all_connections", workers=[other])
    await there.initialized

    def command(_: Any) -> Any:
        return default_bootstrap_cmd().with_env(station_environment(PYTHONPATH=os.getcwd()))

    run_id = f"two-hosts-{os.getpid()}"
    near = this_host().spawn_procs(per_host={"procs": 1}, bootstrap_command=command, name="near")
    far = there.spawn_procs(per_host={"procs": 1}, bootstrap_command=command, name="far")
    source = near.spawn("source", WeightSource)
    await source.ready.call()
    puller = far.spawn("puller", WeightPuller).slice(hosts=0)
    setup = PullerSetup(sources={"a": source}, run_id=run_id, folder=str(SHARED_MEMORY), retain=2, timeout_s=TIMEOUT_S)
    await puller.setup.call_one(setup)
    reader = far.spawn("reader", Reader).slice(hosts=0)
    directory = MemoryDirectory()
    local = WeightStore(directory=directory, run_id=f"{run_id}-source")
    store = RemoteStore(local=local, directory=directory, host="a", puller=None, timeout_s=TIMEOUT_S)

    async def fetched(version: int, *, cut: bool = False) -> dict[str, Any]:
        note = folder / f"{version}.json"
        manifest = await store.publish(version, filled(version))
        call = asyncio.ensure_future(asyncio.wait_for(reader.fetch.call_one(manifest, puller, str(note)), 60))
        if cut:
            await until(lambda: torn(run_id), 20, "the start of the transfer")
            set_link(device, "down")
        await until(note.exists, 30, f"an answer about version {version}")
        if cut:
            set_link(device, "up")
        await call
        return json.loads(note.read_text())

    try:
        seen: dict[str, Any] = {"before": [await fetched(1), await fetched(2)]}
        seen["cut"] = await fetched(3, cut=True)
        seen["after"] = [await fetched(4)]
        while "error" in seen["after"][-1] and len(seen["after"]) < 5:  # TCP is slow to try again
            seen["after"].append(await fetched(4 + len(seen["after"])))
        return seen
    finally:
        store.close()
        await near.stop()
        await there.shutdown()
        reclaim(SHARED_MEMORY, run_id)


if __name__ == "__main__":
    seen = asyncio.run(run(Path(sys.argv[1]), *sys.argv[2:5]))
    Path(sys.argv[1], "seen.json").write_text(json.dumps(seen))
