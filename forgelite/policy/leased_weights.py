"""A version that a rank other than 0 has leased and prepared.

The reader of published weights belongs to the actor's event loop, and commands of rank 0 are executed in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol

from forgelite.errors import WeightError
from forgelite.policy.engine_protocol import Engine

if TYPE_CHECKING:
    import torch


class WeightReader(Protocol):
    """Where published weights are read; `forgelite.weights.WeightStore` is one."""

    def lease(self, version: Any) -> AbstractAsyncContextManager[Mapping[str, torch.Tensor]]:
        """Read-only CPU views of exactly that version, by checkpoint name, valid inside the block.

        Args:
            version: its number, or its manifest, with which the views are then compared.
        """

    def close(self) -> None:
        """Let go of what is being read."""


class LeasedWeights:
    """Prepared for one engine, which must not be written to after `release`."""

    def __init__(
        self,
        engine: Engine,
        source: Any,
        *,
        reader: WeightReader | None,
        events: asyncio.AbstractEventLoop,
        timeout_s: float,
    ) -> None:
        """Take the lease and prepare. Not to be called in the thread of `events`.

        Args:
            engine: of this rank.
            source: a manifest or a version number.
            reader: of published weights; None: the policy was set up without one.
            events: the event loop that `reader` belongs to.
            timeout_s: deadline for taking the lease, and for giving it back, in seconds.

        Raises:
            WeightError: the version cannot be had, or does not fit; nothing is leased.
            TimeoutError: the lease was not to be had in time.
        """
        if reader is None:
            raise WeightError("this rank was set up without a reader of published weights")
        self._events = events
        self._timeout_s = timeout_s
        self._lease = reader.lease(source)
        tensors = self._wait(self._lease.__aenter__())
        try:
            self.put_in_use = engine.prepare_weights(tensors)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Give the lease back."""
        self._wait(self._lease.__aexit__(None, None, None))

    def _wait(self, awaited: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(awaited, self._events).result(self._timeout_s)
