"""A store whose versions are copied as a whole by a carrier: into a folder, or into torchstore.

A reader gets tensors of its own (memory of its process, or a file that it maps), so a publisher that drops a version
never waits for a reader, and a reader never sees it change.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Protocol

import torch

from forgelite.errors import WeightError, WeightMismatch
from forgelite.weights.announcing import Announcements
from forgelite.weights.arena_layout import transferred
from forgelite.weights.directory import Directory
from forgelite.weights.fingerprint import fingerprint_of
from forgelite.weights.manifest import Manifest, describe, memory_of
from forgelite.weights.reading import read_into


class WholeCarrier(Protocol):
    """Takes a whole version to where every reader finds it."""

    async def put(self, version: int, tensors: Mapping[str, torch.Tensor], fingerprint: str | None) -> Manifest:
        """Store a version; it is there as a whole when this returns, and not at all when it raises."""

    async def load(self, manifest: Manifest) -> Mapping[str, torch.Tensor]:
        """name -> CPU tensor, to be read only; raises VersionUnavailable when the version is gone."""

    async def drop(self, version: int) -> None:
        """Remove a version that this carrier has put."""

    def close(self) -> None:
        """Let go of everything. May be called twice."""


class CarriedStore:
    """One process's end, with the methods of `WeightStore`; it publishes, fetches, or both.

    Example: `CarriedStore(carrier=folder, directory=folder, retain=2)` for a `folder` that is a `WeightFolder`.
    """

    def __init__(
        self,
        *,
        carrier: WholeCarrier,
        directory: Directory,
        retain: int = 2,
        fingerprint: bool = True,
        transfer_dtype: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            carrier: how versions travel.
            directory: where manifests are found.
            retain: the last `retain` versions stay available.
            fingerprint: as for `WeightStore`.
            transfer_dtype: a publisher converts floating-point tensors to it; None: as they are.

        Raises:
            ValueError: `retain` is less than 1.
        """
        if retain < 1:
            raise ValueError(f"weights.retain must be at least 1, not {retain}")
        self._carrier = carrier
        self._directory = directory
        self._announcements = Announcements(directory)
        self._retain = retain
        self._fingerprint = fingerprint
        self._transfer_dtype = transfer_dtype
        self._committed: list[int] = []  # versions of this publisher that can be read, oldest first
        self._publishing = asyncio.Lock()
        self._closed = False

    async def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Manifest:
        """Commit `tensors` as `version`, and make it known: `commit`, then `announce`."""
        manifest = await self.commit(version, tensors)
        await self.announce(manifest)
        return manifest

    async def commit(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Manifest:
        """Store `tensors`: who gets the manifest can read them now.

        Args:
            version: completed optimizer steps; must rise from call to call.
            tensors: name -> plain strided tensor of any device, dtype and stride. Not to be changed until this
                returns.

        Raises:
            ValueError: `version` is negative.
            WeightError: `version` does not rise, or the carrier fails. What was published before stays.
        """
        async with self._publishing:
            self._check_open()
            if version < 0:
                raise ValueError(f"a version counts optimizer steps and cannot be {version}")
            if self._committed and version <= self._committed[-1]:
                raise WeightError(
                    f"cannot publish version {version} after version {self._committed[-1]}: versions must rise"
                )
            sent = await asyncio.to_thread(_converted, tensors, self._transfer_dtype)
            written = await asyncio.to_thread(fingerprint_of, sent) if self._fingerprint else None
            manifest = await self._carrier.put(version, sent, written)
            self._committed.append(version)
            return manifest

    async def announce(self, manifest: Manifest) -> None:
        """Tell the directory of `manifest`, and drop the versions that `retain` no longer covers."""
        if manifest.version not in self._committed:
            raise WeightError(f"version {manifest.version} was not committed by this store")
        kept = self._committed[-self._retain :]
        await self._announcements.announce(manifest, kept)
        for version in self._committed[: -self._retain]:
            await self._carrier.drop(version)
            self._committed.remove(version)

    async def latest(self) -> Manifest:
        """The newest announced version; raises VersionUnavailable when there is none."""
        return await self._directory.latest()

    async def fetch(self, version: int | Manifest, into: Mapping[str, torch.Tensor]) -> Manifest:
        """Copy `version` into existing tensors; arguments and errors as `WeightStore.fetch`."""
        async with self._reading(version) as (manifest, tensors):
            manifest.check_against(into)
            read = await asyncio.to_thread(read_into, into, tensors, digested=self._fingerprint)
            if read is not None:
                _compare(manifest, read)
            return manifest

    @contextlib.asynccontextmanager
    async def lease(self, version: int | Manifest) -> AsyncIterator[Mapping[str, torch.Tensor]]:
        """Exactly `version`: name -> CPU tensor, to be read only. Errors as `WeightStore.lease`."""
        async with self._reading(version) as (manifest, tensors):
            manifest.check_against(tensors)
            if self._fingerprint:
                _compare(manifest, await asyncio.to_thread(fingerprint_of, tensors))
            yield tensors

    def close(self) -> None:
        """Let go of everything. May be called twice."""
        self._closed = True
        self._carrier.close()

    @contextlib.asynccontextmanager
    async def _reading(self, version: int | Manifest) -> AsyncIterator[tuple[Manifest, Mapping[str, torch.Tensor]]]:
        self._check_open()
        manifest = version if isinstance(version, Manifest) else await self._directory.get(version)
        if self._fingerprint and manifest.fingerprint is None:
            raise WeightError(
                f"version {manifest.version} was published without a fingerprint; "
                f"set weights.fingerprint to the same value on both ends"
            )
        yield manifest, await self._carrier.load(manifest)

    def _check_open(self) -> None:
        if self._closed:
            raise WeightError("the weight store is closed")


def _converted(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    sent = {}
    known: dict[tuple[object, ...], torch.Tensor] = {}  # tied tensors stay tied
    for info, tensor in zip(describe(tensors), tensors.values(), strict=True):
        target = getattr(torch, transferred(info, dtype).dtype)
        if target != tensor.dtype:
            tensor = known.setdefault(memory_of(tensor), tensor.detach().to(target))
        sent[info.name] = tensor
    return sent


def _compare(manifest: Manifest, read: str) -> None:
    if read != manifest.fingerprint:
        raise WeightMismatch(
            f"version {manifest.version}: the publisher wrote {manifest.fingerprint}, and {read} was read"
        )
