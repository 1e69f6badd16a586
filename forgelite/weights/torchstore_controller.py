"""torchstore 0.1.2's controller with async endpoints; see torchstore_compat.

A module of its own, because processes unpickle the class by its import path.
"""

from __future__ import annotations

from typing import Any

from monarch.actor import endpoint
from torchstore.controller import Controller, StorageInfo
from torchstore.strategy import TorchStoreStrategy
from torchstore.transport.pipe import Request


class AsyncController(Controller):
    """The same controller; each of its five sync endpoints answers from a coroutine."""

    @endpoint
    async def get_controller_strategy(self) -> TorchStoreStrategy:
        return _body("get_controller_strategy")(self)

    @endpoint
    async def locate_volumes(self, key: str) -> dict[str, StorageInfo]:
        return _body("locate_volumes")(self, key)

    @endpoint
    async def notify_put(self, key: str, request: Request, storage_volume_id: str) -> None:
        _body("notify_put")(self, key, request, storage_volume_id)

    @endpoint
    async def keys(self, prefix: str | None = None) -> list[str]:
        return _body("keys")(self, prefix)

    @endpoint
    async def notify_delete(self, key: str, storage_volume_id: str) -> None:
        _body("notify_delete")(self, key, storage_volume_id)


def _body(name: str) -> Any:
    """The plain function behind a sync endpoint of torchstore's controller."""
    return getattr(Controller, name)._method
