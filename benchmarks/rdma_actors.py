"""One plain `RDMABuffer.read_into`: what the puller of forgelite is compared with."""

from __future__ import annotations

import time

import torch
from monarch.actor import Actor, concurrent_endpoint
from monarch.rdma import RDMABuffer


class PlainSource(Actor):
    """Holds bytes that others may read."""

    @concurrent_endpoint
    async def hold(self, nbytes: int) -> RDMABuffer:
        """Make `nbytes` bytes, and a handle to them."""
        self._bytes = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
        self._buffer = RDMABuffer(self._bytes)
        return self._buffer


class PlainReader(Actor):
    """Reads them, again and again into the same place."""

    def __init__(self) -> None:
        self._into: torch.Tensor | None = None

    @concurrent_endpoint
    async def read(self, buffer: RDMABuffer) -> float:
        """Seconds that one `read_into` takes."""
        if self._into is None or self._into.numel() != buffer.size():
            self._into = torch.zeros(buffer.size(), dtype=torch.uint8)
        start = time.perf_counter()
        await buffer.read_into(self._into, timeout=120)
        return time.perf_counter() - start
