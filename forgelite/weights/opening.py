"""How a station opens its end of the store: module functions, so that they can be sent to the station's process."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from forgelite.weights.carried import CarriedStore
from forgelite.weights.directory import TorchstoreDirectory
from forgelite.weights.filesystem import WeightFolder
from forgelite.weights.manifest import Carrier, Manifest
from forgelite.weights.sharded_store import ShardedStore
from forgelite.weights.sharding import Exchange, ShardedPublisher
from forgelite.weights.store import SHARED_MEMORY, WeightStore
from forgelite.weights.torchstore_carrier import TorchstoreCarrier


class Store(Protocol):
    """What every store can do, whatever carries the bytes. `WeightStore` describes arguments and errors."""

    async def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Manifest: ...

    async def commit(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Manifest: ...

    async def announce(self, manifest: Manifest) -> None: ...

    async def latest(self) -> Manifest: ...

    async def fetch(self, version: int | Manifest, into: Mapping[str, torch.Tensor]) -> Manifest: ...

    def lease(self, version: int | Manifest) -> AbstractAsyncContextManager[Mapping[str, torch.Tensor]]: ...

    def close(self) -> None: ...


@dataclass(kw_only=True, slots=True, frozen=True)
class StoreSettings:
    """What the ends of one store agree on.

    Example: `StoreSettings(run_id="toy-4711", carrier="shm", retain=2, fingerprint=True, timeout_s=120.0)`.
    """

    run_id: str  # also the name of the torchstore that `start_directory` started
    carrier: Carrier  # see `choose_carrier`
    retain: int  # `weights.retain`
    fingerprint: bool  # `weights.fingerprint`
    timeout_s: float  # `weights.timeout_s`
    served_in_place: int = 0  # policies that use a version in place while they serve it (`weights.swap`)
    transfer_dtype: str | None = None  # torch's name of the type to publish in; None: as held
    folder: str | None = None  # `weights.folder`, for the carrier filesystem

    @property
    def volume(self) -> str:
        """The name of the torchstore that holds the weights, for the carrier torchstore."""
        return f"{self.run_id}-weights"


def open_store(settings: StoreSettings, puller: Any | None = None) -> Store:
    """One process's end of the store of a run.

    Args:
        settings: the same in every process.
        puller: the `WeightPuller` of this host, for a reader with the carrier rdma.
    """
    dtype = None if settings.transfer_dtype is None else getattr(torch, settings.transfer_dtype)
    common: dict[str, Any] = {
        "retain": settings.retain,
        "fingerprint": settings.fingerprint,
        "transfer_dtype": dtype,
    }
    if settings.carrier == "filesystem":
        if settings.folder is None:
            raise ValueError("the carrier filesystem needs a folder")
        folder = WeightFolder(Path(settings.folder))
        return CarriedStore(carrier=folder, directory=folder, **common)
    directory = TorchstoreDirectory(name=settings.run_id, deadline_s=settings.timeout_s)
    if settings.carrier == "torchstore":
        carrier = TorchstoreCarrier(name=settings.volume, deadline_s=settings.timeout_s)
        return CarriedStore(carrier=carrier, directory=directory, **common)
    local = WeightStore(
        directory=directory,
        run_id=settings.run_id,
        timeout_s=settings.timeout_s,
        served_in_place=settings.served_in_place,
        **common,
    )
    if settings.carrier == "shm":
        return local
    # Here, because it imports Monarch, which nothing else does that one host needs.
    from forgelite.weights.remote import RemoteStore

    return RemoteStore(
        local=local, directory=directory, host=platform.node(), puller=puller, timeout_s=settings.timeout_s
    )


def open_sharded_store(settings: StoreSettings, rank: int, exchange: Exchange) -> ShardedStore:
    """The end of one of several processes that publish together.

    Args:
        settings: the same in every process; the carrier is shm or rdma.
        rank: of this process.
        exchange: how the processes talk.

    Raises:
        ValueError: the carrier takes whole versions from one process only.
    """
    if settings.carrier not in ("shm", "rdma"):
        raise ValueError(f"the carrier {settings.carrier} takes whole versions from one process")
    publisher = ShardedPublisher(
        rank=rank,
        exchange=exchange,
        host=platform.node(),
        run_id=settings.run_id,
        folder=SHARED_MEMORY,
        retain=settings.retain,
        served_in_place=settings.served_in_place,
        fingerprint=settings.fingerprint,
        timeout_s=settings.timeout_s,
        carrier="shm" if settings.carrier == "shm" else "rdma",
    )
    directory = TorchstoreDirectory(name=settings.run_id, deadline_s=settings.timeout_s) if rank == 0 else None
    dtype = None if settings.transfer_dtype is None else getattr(torch, settings.transfer_dtype)
    return ShardedStore(publisher=publisher, directory=directory, transfer_dtype=dtype)
