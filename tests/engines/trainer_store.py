"""A weight store for the trainer's actor that lives in the actor's own process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import torch

from forgelite.weights import Manifest, WeightStore
from tests.unit.weights_memory import MemoryDirectory


class GatedStore(WeightStore):
    """Copies only when somebody has opened its gate, a named pipe, for writing. Without a gate there is no wait."""

    gate: Path

    async def commit(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Manifest:
        if self.gate.exists():
            await asyncio.to_thread(self.gate.read_bytes)
        return await super().commit(version, tensors)


def open_store(run_id: str, gate: Path) -> WeightStore:
    store = GatedStore(directory=MemoryDirectory(), run_id=run_id)
    store.gate = gate
    return store
