"""A weight store for the trainer's actor that lives in the actor's own process."""

from __future__ import annotations

from forgelite.weights import WeightStore
from tests.unit.weights_memory import MemoryDirectory


def open_store(run_id: str) -> WeightStore:
    return WeightStore(directory=MemoryDirectory(), run_id=run_id)
