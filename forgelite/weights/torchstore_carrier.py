"""Whole versions through torchstore, each packed into one key: torchstore's cost is by the key.

The volume, a process of its own, holds the last versions; it is reached from any host.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import torch

from forgelite.errors import VersionUnavailable
from forgelite.weights.manifest import Manifest, describe
from forgelite.weights.packing import pack, unpack
from forgelite.weights.torchstore_client import TorchstoreClient


class TorchstoreCarrier:
    """A `WholeCarrier` over a store that `start_store` has started."""

    def __init__(self, *, name: str, deadline_s: float) -> None:
        """
        Args:
            name: of the store.
            deadline_s: for one transfer, in seconds.
        """
        self._store = TorchstoreClient(name=name, deadline_s=deadline_s, purpose="torchstore")

    async def put(self, version: int, tensors: Mapping[str, torch.Tensor], fingerprint: str | None) -> Manifest:
        """Pack and send a version. A key is never written twice, because torchstore has no atomic overwrite.

        Raises:
            WeightError: the store cannot be reached.
        """
        packed = await asyncio.to_thread(pack, tensors)
        await self._store.put(_key(version), packed)
        return Manifest(
            version=version,
            carrier="torchstore",
            segment=_key(version),
            tensors=describe(tensors),
            nbytes=packed.nbytes,
            fingerprint=fingerprint,
        )

    async def load(self, manifest: Manifest) -> Mapping[str, torch.Tensor]:
        """Get a version and take it apart.

        Raises:
            VersionUnavailable: the version is gone.
            WeightError: the store cannot be reached.
        """
        packed = await self._store.get_tensor(manifest.segment)
        if packed is None:
            raise VersionUnavailable(f"version {manifest.version} is not in the torchstore {self._store.name} any more")
        return unpack(packed)

    async def drop(self, version: int) -> None:
        """Remove a version; nothing happens when it is not there."""
        await self._store.delete(_key(version))

    def close(self) -> None:
        """Nothing is held."""


def _key(version: int) -> str:
    return f"weights.{version}"
