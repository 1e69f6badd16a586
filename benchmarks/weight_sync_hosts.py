"""A version from host to host, beside one plain RDMA read of the same bytes. Started by `weight_sync_peers`.

    python -m benchmarks.weight_sync_hosts MEGABYTES TENSORS REPEATS [OWN_ADDRESS WORKER_ADDRESS]

Without addresses everything runs on one host. Prints one line of JSON: the seconds of every repeat.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from forgelite.errors import VersionUnavailable
from forgelite.mesh.environment import root_environment, station_environment
from forgelite.weights.manifest import Manifest

SLOTS = 3  # of a store that retains two versions: memory is registered when a slot is read for the first time
ROOT = Path(__file__).resolve().parents[1]


class OneVersion:
    """A `Directory` that nobody else reads."""

    async def put_manifest(self, version: int, manifest: Manifest) -> None:
        """Forget it: manifests are handed over."""

    async def get(self, version: int) -> Manifest:
        """Nothing is known."""
        raise VersionUnavailable(f"version {version}")

    async def latest(self) -> Manifest:
        """Nothing is known."""
        raise VersionUnavailable("no version")

    async def drop(self, version: int) -> None:
        """Nothing is known."""


async def measure(nbytes: int, tensors: int, repeats: int, addresses: tuple[str, str] | None) -> dict[str, list[float]]:
    """Seconds of every pull and of every plain read, taking turns, once every slot has been used."""
    from monarch.actor import attach_to_workers, default_bootstrap_cmd, enable_transport, this_host

    from benchmarks.rdma_actors import PlainReader, PlainSource
    from forgelite.weights import SHARED_MEMORY, WeightStore, reclaim
    from forgelite.weights.remote import RemoteStore
    from forgelite.weights.remote_puller import PullerSetup, WeightPuller
    from forgelite.weights.remote_source import WeightSource

    def command(_: Any) -> Any:
        return default_bootstrap_cmd().with_env(station_environment(PYTHONPATH=str(ROOT)))

    if addresses is not None:
        enable_transport(addresses[0])
    here = there = this_host()
    if addresses is not None:
        there = attach_to_workers(name="there", ca="trust_all_connections", workers=[addresses[1]])
        await there.initialized
    run_id = f"bench-hosts-{os.getpid()}"
    near = here.spawn_procs(per_host={"procs": 1}, bootstrap_command=command, name="near")
    far = there.spawn_procs(per_host={"procs": 1}, bootstrap_command=command, name="far")
    try:
        source = near.spawn("source", WeightSource)
        await source.ready.call()
        puller = far.spawn("puller", WeightPuller)
        setup = PullerSetup(sources={"a": source}, run_id=run_id, folder=str(SHARED_MEMORY), retain=2, timeout_s=120.0)
        await puller.setup.call(setup)
        plain_source, plain_reader = near.spawn("plain_source", PlainSource), far.spawn("plain_reader", PlainReader)
        buffer = await _one(plain_source.hold.call(nbytes))
        weights = {f"w{i}": torch.randn(nbytes // 4 // tensors) for i in range(tensors)}
        local = WeightStore(directory=OneVersion(), run_id=run_id)
        store = RemoteStore(local=local, directory=OneVersion(), host="a", puller=None, timeout_s=120.0)
        seconds: dict[str, list[float]] = {"pull": [], "plain": []}
        for version in range(1, repeats + SLOTS + 1):
            manifest = await store.commit(version, weights)
            start = time.perf_counter()
            await puller.pull.call(manifest)
            seconds["pull"].append(time.perf_counter() - start)
            seconds["plain"].append(await _one(plain_reader.read.call(buffer)))
        store.close()
        await puller.close.call()
        return {name: times[SLOTS:] for name, times in seconds.items()}
    finally:
        await near.stop()
        await (far.stop() if addresses is None else there.shutdown())
        reclaim(SHARED_MEMORY, run_id)


async def _one(call: Any) -> Any:
    return next(value for _, value in await call)


def main(arguments: list[str]) -> None:
    """Measure and print."""
    megabytes, tensors, repeats = (int(text) for text in arguments[:3])
    addresses = (arguments[3], arguments[4]) if len(arguments) > 3 else None
    print(json.dumps(asyncio.run(measure(megabytes << 20, tensors, repeats, addresses))), flush=True)


if __name__ == "__main__":
    os.environ |= root_environment(os.environ)
    main(sys.argv[1:])
