"""The carrier over a newer torchstore, which cannot be installed from an index: a small model of what differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forgelite.errors import VersionUnavailable, WeightError
from forgelite.weights import torchstore_client
from forgelite.weights.carried import CarriedStore
from forgelite.weights.torchstore_carrier import TorchstoreCarrier
from tests.unit.weights_memory import MemoryDirectory, awkward_tensors, same_bits


class NewerTorchstore:
    """Volumes of shared memory: a `get` is a view of it, which the client keeps mapped until it is reset."""

    def __init__(self) -> None:
        self.volume: dict[str, Any] = {}
        self.mapped: set[str] = set()
        self.put_batch = None  # its presence tells the two apart

    async def put(self, key: str, value: Any, store_name: str) -> None:
        if key in self.volume and value.shape != self.volume[key].shape:
            raise RuntimeError("size mismatch")
        self.volume[key] = value.clone()

    async def get(self, key: str, *, store_name: str) -> Any:
        if key not in self.volume:
            raise KeyError(f"Unable to locate {key} in any storage volumes.")
        self.mapped.add(key)
        return self.volume[key]

    async def delete(self, key: str, *, store_name: str) -> None:
        if key not in self.volume:
            raise KeyError(f"Unable to locate {key} in any storage volumes.")
        del self.volume[key]

    def reset_client(self, store_name: str) -> None:
        self.mapped.clear()


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> NewerTorchstore:
    fake = NewerTorchstore()
    monkeypatch.setattr(torchstore_client, "load_torchstore", lambda: fake)
    return fake


@pytest.fixture
def store(newer: NewerTorchstore) -> CarriedStore:
    return CarriedStore(carrier=TorchstoreCarrier(name="test", deadline_s=5.0), directory=MemoryDirectory())


async def test_a_version_comes_out_bit_by_bit(store: CarriedStore) -> None:
    tensors = awkward_tensors()
    await store.publish(1, tensors)
    into = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in tensors.items()}
    await store.fetch(1, into)
    assert all(same_bits(into[name], tensors[name]) for name in tensors)


async def test_a_reader_keeps_no_mapping_of_the_volume(store: CarriedStore, newer: NewerTorchstore) -> None:
    await store.publish(1, {"w": torch.ones(3)})
    async with store.lease(1) as views:
        assert newer.mapped == set()
        newer.volume["weights.1"].zero_()
        assert torch.equal(views["w"], torch.ones(3))


async def test_the_volume_holds_the_last_versions_only(store: CarriedStore, newer: NewerTorchstore) -> None:
    for version in range(1, 6):
        await store.publish(version, {"w": torch.ones(version)})  # the shape may change: no key is written twice
    assert set(newer.volume) == {"weights.4", "weights.5"}


async def test_a_version_that_the_volume_has_lost_is_unavailable(store: CarriedStore, newer: NewerTorchstore) -> None:
    manifest = await store.publish(1, {"w": torch.ones(3)})
    newer.volume.clear()
    with pytest.raises(VersionUnavailable, match="version 1 is not in the torchstore test any more"):
        await store.fetch(manifest, {"w": torch.zeros(3)})


async def test_an_error_of_the_store_is_not_taken_for_an_absence(
    store: CarriedStore, newer: NewerTorchstore, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = await store.publish(1, {"w": torch.ones(3)})

    async def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the volume does not answer")

    monkeypatch.setattr(newer, "get", fail)
    with pytest.raises(WeightError, match=r"get weights\.1 failed: the volume does not answer") as caught:
        await store.fetch(manifest, {"w": torch.zeros(3)})
    assert not isinstance(caught.value, VersionUnavailable)
