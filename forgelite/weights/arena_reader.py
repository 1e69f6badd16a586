"""The reading end of the shared-memory arena: versions under leases (`arena_writer` draws the protocol)."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import mmap
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy
import torch

from forgelite.errors import VersionUnavailable, WeightError
from forgelite.weights import arena_layout, locks, segment
from forgelite.weights.arena_layout import manifest_of
from forgelite.weights.manifest import Manifest


class ArenaReader:
    """A read-only mapping of a segment."""

    def __init__(self, path: Path) -> None:
        """Map the segment at `path`.

        Raises:
            FileNotFoundError: its owner has removed it.
            WeightError: it is no segment.
        """
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(self._descriptor).st_size
            if not size:
                raise WeightError(f"{path} is empty")
            memory = mmap.mmap(self._descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
            self.layout = arena_layout.read_header(memoryview(memory), str(path))
        except BaseException:
            os.close(self._descriptor)
            raise
        self._header = arena_layout.words(memoryview(memory))
        self._data = _as_tensor(memory)
        self._blank = manifest_of(self.layout, path, 0, None)
        self._views: dict[int, Mapping[str, torch.Tensor]] = {}
        self._mutex = threading.Lock()
        self._closed = False

    def owner_is_alive(self) -> bool:
        """Whether the publisher of this segment still runs and has not closed it."""
        with self._mutex:
            return not self._closed and segment.owner_is_alive(self._descriptor)

    def versions(self) -> list[int]:
        """The versions that are whole at this moment, oldest first."""
        return arena_layout.whole_versions(self._header, self.layout.slots)

    @contextlib.contextmanager
    def lease(self, version: int) -> Iterator[tuple[Manifest, Mapping[str, torch.Tensor]]]:
        """Keep `version` from being overwritten inside the block.

        Yields:
            The manifest, and name -> view into shared memory. The pages are mapped read-only: writing to a
            view kills the process. After the block the views may change.

        Raises:
            VersionUnavailable: this segment does not hold `version`, or it is being overwritten.
        """
        slot = self._slot_of(version)
        descriptor = self._open_again()
        try:
            if not locks.try_lock(descriptor, 1 + slot, exclusive=False) or self._slot_of(version) != slot:
                raise self._unavailable(version)
            number = self._header[arena_layout.fingerprint_word(slot)]
            written = f"{number:016x}" if self.layout.fingerprinted else None
            found = dataclasses.replace(self._blank, version=version, fingerprint=written)
            yield found, self._views_of(slot)
        finally:
            os.close(descriptor)

    def sample(self, version: int) -> str:
        """The sample that the publisher took of `version`, which must be under a lease; see `fingerprint.sample_of`."""
        return f"{self._header[arena_layout.sample_word(self._slot_of(version))]:016x}"

    def close(self) -> None:
        """Give the descriptor back. The mapping goes when the last view is gone. May be called twice."""
        with self._mutex:
            if not self._closed:
                self._closed = True
                os.close(self._descriptor)

    def _open_again(self) -> int:
        # Two leases of one descriptor would be one lock. The path may be gone, hence /proc.
        with self._mutex:
            if self._closed:
                raise VersionUnavailable(f"the segment {self.path.name} was let go for a newer one")
            return os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY)

    def _slot_of(self, version: int) -> int:
        for slot in range(self.layout.slots):
            if arena_layout.version_in(self._header, slot) == version:
                return slot
        raise self._unavailable(version)

    def _unavailable(self, version: int) -> VersionUnavailable:
        return VersionUnavailable(
            f"version {version} is not in {self.path.name}, which holds {self.versions()}; it was never "
            f"committed, or has been overwritten (weights.retain keeps {self.layout.retained})"
        )

    def _views_of(self, slot: int) -> Mapping[str, torch.Tensor]:
        if slot not in self._views:
            self._views[slot] = MappingProxyType(arena_layout.slot_views(self.layout, self._data, slot))
        return self._views[slot]


def _as_tensor(memory: mmap.mmap) -> torch.Tensor:
    # torch.frombuffer warns of every read-only buffer. A ctypes array at the same address counts as writable;
    # it keeps the mapping alive, and the pages stay read-only.
    address = numpy.frombuffer(memory, dtype=numpy.uint8).ctypes.data
    array = (ctypes.c_ubyte * len(memory)).from_address(address)
    array.owner = memory
    return torch.frombuffer(array, dtype=torch.uint8)
