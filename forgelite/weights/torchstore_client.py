"""Objects and tensors under keys in a torchstore, with a deadline and with errors that can be told apart.

The calls are those that torchstore 0.1.2 and its main branch have in common. Where they differ, the store is asked what
it can do (`hasattr`), never what version it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from forgelite.errors import DeadlineExceeded, WeightError
from forgelite.weights.torchstore_compat import load_torchstore

if TYPE_CHECKING:
    from monarch.actor import ProcMesh


class TorchstoreClient:
    """This process's access to one store that `start_store` has started."""

    def __init__(self, *, name: str, deadline_s: float, purpose: str) -> None:
        """
        Args:
            name: of the store.
            deadline_s: for one operation, in seconds.
            purpose: what the store is for, in messages.
        """
        self.name = name
        self._deadline_s = deadline_s
        self._purpose = purpose
        self._torchstore: ModuleType = load_torchstore()

    async def attach(self) -> None:
        """Find the store, so that the first operation need not; WeightError when there is none of this name."""
        await self._within_deadline(self._torchstore.client(self.name), "attach")

    async def put(self, key: str, value: Any) -> None:
        """Store an object or a tensor. A key keeps the kind of its first value.

        Raises:
            WeightError: the store cannot be reached, or refuses.
        """
        await self._within_deadline(self._torchstore.put(key, value, self.name), f"put {key}")

    async def get(self, key: str) -> Any | None:
        """The value under a key; None when there is none. Raises as `put` does."""
        try:
            return await self._within_deadline(self._torchstore.get(key, store_name=self.name), f"get {key}")
        except WeightError as error:
            if _is_absence(error):
                return None
            raise

    async def get_tensor(self, key: str) -> torch.Tensor | None:
        """As `get`, for a tensor that the caller may keep."""
        found = await self.get(key)
        if found is not None and hasattr(self._torchstore, "put_batch"):
            # A newer torchstore gives a view of the volume's shared memory, and its client keeps every mapping it has
            # ever made, one model a version, until it is reset.
            found = found.clone()
            self._torchstore.reset_client(self.name)
        return found

    async def delete(self, key: str) -> None:
        """Remove a key; nothing happens when it is not there. Raises as `put` does."""
        try:
            await self._within_deadline(self._torchstore.delete(key, store_name=self.name), f"delete {key}")
        except WeightError as error:
            if not _is_absence(error):
                raise

    async def _within_deadline(self, call: Awaitable[Any], action: str) -> Any:
        try:
            return await asyncio.wait_for(call, self._deadline_s)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{self._purpose} {self.name}: {action} had no answer within {self._deadline_s} s"
            ) from error
        except Exception as error:  # torchstore raises bare asserts, KeyErrors and Monarch's errors alike
            raise WeightError(f"{self._purpose} {self.name}: {action} failed: {error}") from error


async def start_store(procs: ProcMesh, *, name: str) -> None:
    """Start a store whose one volume is in an existing process. Called once, in the root.

    Args:
        procs: a process mesh of one process. What is stored dies with it.
        name: of the store; stores of different names do not see one another.

    Raises:
        ValueError: `procs` has more than one process.
    """
    if procs.size() != 1:
        raise ValueError(f"a store of weights lives in one process, not in the {procs.size()} of this mesh")
    await load_torchstore().initialize(mesh=procs, store_name=name)


async def stop_store(name: str) -> None:
    """Empty the store of this name; operations on it fail from now on. Called in the root."""
    await load_torchstore().shutdown(name)


def _is_absence(error: WeightError) -> bool:
    # torchstore turns a dead store, too, into a KeyError: only the text of its controller tells absence.
    return "Unable to locate" in str(error.__cause__)
