"""The actor around the reference."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from monarch.actor import Actor, concurrent_endpoint

from forgelite.config import ModelConfig

if TYPE_CHECKING:
    from forgelite.scoring.reference import Reference


class ReferenceActor(Actor):
    """Answers one batch after the other, in a thread of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reference")
        self._reference: Reference | None = None

    @concurrent_endpoint
    async def setup(self, model: ModelConfig, max_seq_len: int, seed: int, temperature: float, rows: int) -> None:
        """Load the starting model.

        Raises:
            ConfigError: the model is not supported.
        """

        def build() -> Reference:
            from forgelite.scoring.reference import Reference

            return Reference.build(model, max_seq_len=max_seq_len, seed=seed, temperature=temperature, rows=rows)

        self._reference = await asyncio.get_running_loop().run_in_executor(self._thread, build)

    @concurrent_endpoint
    async def logprobs(self, encoded: bytes) -> bytes:
        """`wire.encode_batch` in, `wire.encode_tensors` of one [R, L] float32 tensor out."""

        def compute() -> bytes:
            from forgelite.wire import decode_batch, encode_tensors

            return encode_tensors([self._reference.logprobs(decode_batch(encoded))])

        return await asyncio.get_running_loop().run_in_executor(self._thread, compute)
