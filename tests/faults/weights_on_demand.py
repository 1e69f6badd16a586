"""A publisher and readers in processes of their own that do what they are told, until they are killed."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection

import torch

from forgelite.errors import VersionUnavailable, WeightError
from forgelite.weights import SHARED_MEMORY, Manifest, WeightStore
from forgelite.weights.arena_writer import ArenaWriter
from tests.faults.weights_processes import filled, is_whole
from tests.unit.weights_memory import MemoryDirectory

RETAIN = 2
TENSORS = {"tensors": 4, "size": 1 << 16}
NBYTES = 4 << 16  # of one version


def publish_on_demand(pipe: Connection, run_id: str) -> None:
    """Answer each `(version, None)` with its manifest or an error, and stop for ever at byte n of `(version, n)`."""
    writer = ArenaWriter.create(
        filled(0, **TENSORS),
        folder=SHARED_MEMORY,
        run_id=run_id,
        slots=RETAIN + 2,
        retained=RETAIN,
        fingerprinted=True,
    )
    pipe.send(writer.path)

    def copy_up_to(limit: int, source: dict[str, torch.Tensor], slot: dict[str, torch.Tensor]) -> None:
        for name, tensor in source.items():
            elements = max(0, min(limit, tensor.nbytes)) // 8
            slot[name][:elements].copy_(tensor[:elements])
            limit -= tensor.nbytes
        pipe.send("stopped")
        pipe.recv()

    while True:
        version, limit = pipe.recv()
        if limit is not None:
            writer._copy = lambda source, slot, limit=limit: copy_up_to(limit, source, slot)
        try:
            pipe.send(writer.write(version, filled(version, **TENSORS), timeout_s=0.05))
        except WeightError as error:
            pipe.send(error)


def read_on_demand(pipe: Connection, run_id: str) -> None:
    """Answer with the version that was found to `("fetch", manifest)`, to `("hold", manifest)`, which keeps the lease,
    and to `("look", manifest)`, which looks again at what is held."""
    store = WeightStore(directory=MemoryDirectory(), run_id=run_id)
    into = filled(0, **TENSORS)
    held, held_views = AsyncExitStack(), {}

    async def answer(action: str, manifest: Manifest | None) -> object:
        nonlocal held, held_views
        try:
            if action == "fetch":
                await store.fetch(manifest, into)
                return manifest.version if is_whole(into, manifest.version) else "torn"
            if action == "look":
                return manifest.version if is_whole(held_views, manifest.version) else "torn"
            await held.aclose()
            held = AsyncExitStack()
            if action == "hold":
                held_views = await held.enter_async_context(store.lease(manifest))
                return manifest.version if is_whole(held_views, manifest.version) else "torn"
            return "released"
        except VersionUnavailable:
            return "unavailable"

    with asyncio.Runner() as runner:
        pipe.send("ready")
        while True:
            pipe.send(runner.run(answer(*pipe.recv())))
