"""The versioned weight store: what the trainer publishes and the policy fetches.

    publish   arena: copy and fingerprint, commit -> directory: manifest, then latest, then drop the overwritten
    fetch     is it in the attached segment? else ask the directory and attach -> lease -> check, copy and verify
    lease     the same, without the copy: for whoever reads the version in place

A version exists from its commit in the arena on. The directory only tells processes that are not attached
where it lies; it may lag behind and never runs ahead.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Literal

import torch

from forgelite.errors import VersionUnavailable, WeightError, WeightMismatch
from forgelite.weights.announcing import Announcements
from forgelite.weights.arena_reader import ArenaReader
from forgelite.weights.arena_writer import ArenaWriter
from forgelite.weights.directory import Directory
from forgelite.weights.fingerprint import fingerprint_of, sample_of
from forgelite.weights.manifest import Manifest
from forgelite.weights.reading import read_into

SHARED_MEMORY = Path("/dev/shm")


class WeightStore:
    """One process's end of the store. It publishes, fetches, or both; it is used from one event loop.

    Example, trainer and policy:

        store = WeightStore(directory=directory, run_id="toy")
        await store.publish(8, {"w": weight})

        store = WeightStore(directory=directory, run_id="toy")
        await store.fetch(8, {"w": parameter})
    """

    def __init__(
        self,
        *,
        directory: Directory,
        run_id: str,
        retain: int = 2,
        folder: Path = SHARED_MEMORY,
        timeout_s: float = 120.0,
        fingerprint: bool = True,
        served_in_place: int = 0,
        transfer_dtype: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            directory: where manifests are found.
            run_id: becomes part of file names: letters, digits, `.`, `_` and `-`.
            retain: the last `retain` versions stay whole while the next one is written. The memory needed is
                `retain + 1 + served_in_place` times the weights.
            folder: a folder on a memory file system that all processes of this host see.
            timeout_s: how long a publisher waits for readers of the version it must overwrite, in seconds.
            fingerprint: a publisher computes the fingerprint of what it wrote, a reader that of what it read,
                and compares. Both ends must agree.
            served_in_place: readers that keep a lease for as long as they serve a version.
            transfer_dtype: a publisher converts floating-point tensors to it while it copies; None: as they are.
        """
        self._directory = directory
        self._run_id = run_id
        self._folder = folder
        self._timeout_s = timeout_s
        self._fingerprint = fingerprint
        self._served_in_place = served_in_place
        self._transfer_dtype = transfer_dtype
        self._writer: ArenaWriter | None = None
        self._reader: ArenaReader | None = None
        self._announcements = Announcements(directory)
        self._writing = threading.Lock()  # not asyncio's: the thread of a cancelled call goes on
        self._attaching = asyncio.Lock()
        self._closed = False
        self._retain = 0
        self.retain(retain)

    async def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Manifest:
        """Commit `tensors` as `version`, and make it known: `commit`, then `announce`.

        Args:
            version: completed optimizer steps; must rise from call to call.
            tensors: name -> plain strided tensor of any device, dtype and stride. Names, shapes, dtypes and
                ties must be those of the first call. Not to be changed until this returns.

        Raises:
            WeightError: `version` does not rise, memory is short, a reader holds the slot, or the directory
                fails. The last `retain` versions before stay available.
            WeightMismatch: the tensors differ in names, shapes, dtypes or ties from the first call's.
        """
        manifest = await self.commit(version, tensors)
        await self.announce(manifest)
        return manifest

    async def commit(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Manifest:
        """The first half of `publish`: readers that are attached or get the manifest can read it now.

        A cancelled call may still commit: the copy runs in a thread that cannot be stopped.
        """
        return await asyncio.to_thread(self._write, version, tensors)

    async def announce(self, manifest: Manifest) -> None:
        """The second half of `publish`: the directory learns of `manifest` and forgets what was overwritten.

        It may run while readers already swap. Its error is the caller's to await.
        """
        if self._writer is None or manifest.segment != str(self._writer.path):
            raise WeightError(f"version {manifest.version} was not committed by this store")
        await self._announcements.announce(manifest, self._writer.versions())

    async def latest(self) -> Manifest:
        """The newest announced version.

        Raises:
            VersionUnavailable: nothing was announced yet.
        """
        return await self._directory.latest()

    async def fetch(
        self, version: int | Manifest, into: Mapping[str, torch.Tensor], *, verify: Literal["sample", "all"] = "sample"
    ) -> Manifest:
        """Copy `version` into existing tensors.

        Args:
            version: its number, or its manifest, which saves the way to the directory.
            into: name -> tensor of any device and stride, with exactly the version's names, shapes, dtypes.
            verify: whether the fingerprint of all that was read is compared, or a sample of it: four kilobytes of
                every megabyte, and all of small tensors. The publisher has the fingerprint of every byte in either
                case, and who serves a version in place (`lease`) always compares it. Without fingerprints nothing
                is compared.

        Returns:
            The manifest of what was read.

        Raises:
            VersionUnavailable: never committed, or dropped; `into` is untouched.
            WeightMismatch: names, shapes or dtypes differ; `into` is untouched. Or the fingerprint (the sample) of
                what was read differs from the publisher's; then `into` must not be used.
        """
        reader = await self._attached(version)
        return await asyncio.to_thread(self._copy_version, reader, version, into, verify)

    @contextlib.asynccontextmanager
    async def lease(self, version: int | Manifest) -> AsyncIterator[Mapping[str, torch.Tensor]]:
        """Exactly `version`, in place and without a copy.

        The publisher waits for the end of the block before it overwrites the version, so keep it short, or
        have a slot set aside for it (`served_in_place`).

        Args:
            version: its number, or its manifest, which saves the way to the directory.

        Yields:
            name -> CPU tensor that views shared memory; valid inside the block. The pages are mapped
            read-only: writing to one kills the process.

        Raises:
            VersionUnavailable: never committed, or dropped.
            WeightMismatch: the fingerprint of what is there differs from the publisher's.
        """
        reader = await self._attached(version)
        with reader.lease(_number(version)) as (found, views):
            self._check_publication(version, found)
            if self._fingerprint:
                read = await asyncio.to_thread(fingerprint_of, views)
                self._check_read(found, wrote=found.fingerprint, read=read)
            yield views

    def retain(self, versions: int) -> None:
        """Keep the last `versions` versions, from 1 up; to be called before the first publish.

        Raises:
            WeightError: the segment exists already.
        """
        if versions < 1:
            raise ValueError(f"weights.retain must be at least 1, not {versions}")
        if self._writer is not None and versions != self._retain:
            raise WeightError(
                f"the segment was made to retain {self._retain} versions and cannot retain {versions}; "
                f"set weights.retain before the first publish"
            )
        self._retain = versions

    def close(self) -> None:
        """Remove the segment that this store owns, and let go of the one it reads. May be called twice."""
        with self._writing:
            self._closed = True
        if self._writer is not None:
            self._writer.close()
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _write(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Manifest:
        with self._writing:
            self._check_open()
            if self._writer is None:
                self._writer = ArenaWriter.create(
                    tensors,
                    folder=self._folder,
                    run_id=self._run_id,
                    slots=self._retain + 1 + self._served_in_place,
                    retained=self._retain,
                    fingerprinted=self._fingerprint,
                    transfer_dtype=self._transfer_dtype,
                )
        return self._writer.write(version, tensors, timeout_s=self._timeout_s)

    def _check_open(self) -> None:
        if self._closed:
            raise WeightError(f"the weight store of run {self._run_id} is closed")

    async def _attached(self, version: int | Manifest) -> ArenaReader:
        """A reader of the segment that should hold `version`."""
        async with self._attaching:
            self._check_open()
            reader = self._reader
            if isinstance(version, Manifest):
                manifest = version
            elif reader is not None and reader.owner_is_alive() and version in reader.versions():
                # A dead publisher's header is not enough: its successor may have published this number anew.
                return reader
            else:
                manifest = await self._directory.get(version)
            if reader is not None and str(reader.path) == manifest.segment:
                return reader
            try:
                attached = await asyncio.to_thread(ArenaReader, Path(manifest.segment))
            except FileNotFoundError as error:
                raise VersionUnavailable(
                    f"version {manifest.version} is gone: its segment {manifest.segment} was removed"
                ) from error
            if reader is not None:
                reader.close()
            self._reader = attached
            return attached

    def _copy_version(
        self,
        reader: ArenaReader,
        version: int | Manifest,
        into: Mapping[str, torch.Tensor],
        verify: Literal["sample", "all"],
    ) -> Manifest:
        with reader.lease(_number(version)) as (found, views):
            self._check_publication(version, found)
            found.check_against(into)
            read = read_into(into, views, digested=self._fingerprint and verify == "all")
            if read is not None:
                self._check_read(found, wrote=found.fingerprint, read=read)
            elif self._fingerprint:
                self._check_read(found, wrote=reader.sample(found.version), read=sample_of(into))
        return found

    def _check_publication(self, asked: int | Manifest, found: Manifest) -> None:
        if isinstance(asked, Manifest) and asked != found:
            raise WeightMismatch(
                f"version {found.version} in {found.segment} has fingerprint {found.fingerprint}, and its "
                f"manifest says {asked.fingerprint}: they are not the same publication"
            )
        if self._fingerprint and found.fingerprint is None:
            raise WeightError(
                f"version {found.version} was published without a fingerprint; "
                f"set weights.fingerprint to the same value on both ends"
            )

    def _check_read(self, found: Manifest, *, wrote: str | None, read: str) -> None:
        if read != wrote:
            raise WeightMismatch(f"version {found.version}: the publisher wrote {wrote}, and {read} was read")


def _number(version: int | Manifest) -> int:
    return version.version if isinstance(version, Manifest) else version
