"""The store between hosts: published into shared memory of one host, pulled into that of another.

    publisher   WeightStore: commit -> manifest with the pieces other hosts can read -> directory
    reader      manifest -> puller of this host: is it here? else pull it -> WeightStore: lease, in place

The reader's end is that of one host, whatever lies behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Mapping
from pathlib import Path
from typing import Any

import torch
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from forgelite.errors import DeadlineExceeded, ForgeliteError, WeightError
from forgelite.weights.arena_layout import ArenaLayout
from forgelite.weights.directory import Directory
from forgelite.weights.manifest import Manifest
from forgelite.weights.store import WeightStore
from forgelite.weights.stored_pieces import for_other_hosts, read_layout


class RemoteStore:
    """One process's end, with the methods of `WeightStore`; it publishes, fetches, or both.

    Example: `RemoteStore(local=store, directory=directory, host="a", puller=puller, timeout_s=120.0)`.
    """

    def __init__(
        self, *, local: WeightStore, directory: Directory, host: str, puller: Any | None, timeout_s: float
    ) -> None:
        """
        Args:
            local: over shared memory of this host, with the same directory.
            directory: where manifests are found.
            host: the name under which this host's `WeightSource` is known to pullers.
            puller: the `WeightPuller` of this host, as a Monarch actor; None in a process that only publishes.
            timeout_s: deadline of one pull, in seconds.
        """
        self._local = local
        self._directory = directory
        self._host = host
        self._puller = puller
        self._timeout_s = timeout_s
        self._layout: tuple[str, ArenaLayout] | None = None  # of the segment that was last published in

    async def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Manifest:
        """Commit `tensors` as `version`, and make it known: `commit`, then `announce`."""
        manifest = await self.commit(version, tensors)
        await self.announce(manifest)
        return manifest

    async def commit(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Manifest:
        """As `WeightStore.commit`; the manifest names the pieces for other hosts."""
        manifest = await self._local.commit(version, tensors)
        if self._layout is None or self._layout[0] != manifest.segment:
            self._layout = manifest.segment, await asyncio.to_thread(read_layout, Path(manifest.segment))
        return for_other_hosts(manifest, self._layout[1], host=self._host)

    async def announce(self, manifest: Manifest) -> None:
        """As `WeightStore.announce`."""
        await self._local.announce(manifest)

    async def latest(self) -> Manifest:
        """As `WeightStore.latest`."""
        return await self._local.latest()

    async def fetch(self, version: int | Manifest, into: Mapping[str, torch.Tensor]) -> Manifest:
        """As `WeightStore.fetch`; the version is pulled to this host first, unless it is here."""
        return await self._local.fetch(await self._pulled(version), into)

    @contextlib.asynccontextmanager
    async def lease(self, version: int | Manifest) -> AsyncIterator[Mapping[str, torch.Tensor]]:
        """As `WeightStore.lease`; the version is pulled to this host first, unless it is here."""
        async with self._local.lease(await self._pulled(version)) as views:
            yield views

    def close(self) -> None:
        """Remove the segment that this process owns, and let go of the one it reads. May be called twice."""
        self._local.close()

    async def _pulled(self, version: int | Manifest) -> Manifest:
        if self._puller is None:
            raise WeightError("this process was opened to publish only: it has no puller")
        manifest = version if isinstance(version, Manifest) else await self._directory.get(version)
        return await _answer(self._puller.pull.call_one(manifest), manifest.version, self._timeout_s)


async def _answer(call: Awaitable[Manifest], version: int, timeout_s: float) -> Manifest:
    async def pulled() -> Manifest:
        return await call

    try:
        # The puller has the same deadline and says more about it, so it is given the time to do so.
        return await asyncio.wait_for(pulled(), timeout_s + 5.0)
    except TimeoutError as error:
        raise DeadlineExceeded(f"the puller of this host did not bring version {version} in {timeout_s} s") from error
    except ActorError as error:
        if isinstance(error.exception, ForgeliteError):
            raise error.exception from error
        raise WeightError(f"version {version} could not be pulled: {error.exception}") from error
    except SupervisionError as error:
        raise WeightError(f"the puller of this host died: {error}") from error
