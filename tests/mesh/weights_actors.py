"""A trainer that publishes and a policy that fetches, in processes of their own."""

from __future__ import annotations

import torch
from monarch.actor import Actor, concurrent_endpoint

from forgelite.weights import Manifest, TorchstoreDirectory, WeightStore


def filled(version: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 4), float(version)), "b": torch.full((5,), version, dtype=torch.int32)}


class WeightActor(Actor):
    def __init__(self, directory: str) -> None:
        self._store = WeightStore(directory=TorchstoreDirectory(name=directory), run_id="mesh")

    @concurrent_endpoint
    async def publish(self, version: int) -> Manifest:
        return await self._store.publish(version, filled(version))

    @concurrent_endpoint
    async def commit(self, version: int) -> Manifest:
        return await self._store.commit(version, filled(version))

    @concurrent_endpoint
    async def announce(self, manifest: Manifest) -> None:
        await self._store.announce(manifest)

    @concurrent_endpoint
    async def fetch(self, version: int | Manifest) -> float:
        """Fetch, and return the value that all elements have."""
        into = filled(0)
        await self._store.fetch(version, into)
        values = {float(value) for tensor in into.values() for value in tensor.flatten()}
        (value,) = values
        return value

    @concurrent_endpoint
    async def latest(self) -> Manifest:
        return await self._store.latest()

    @concurrent_endpoint
    async def known(self, directory: str, version: int) -> Manifest:
        return await TorchstoreDirectory(name=directory).get(version)

    @concurrent_endpoint
    async def close(self) -> None:
        self._store.close()
