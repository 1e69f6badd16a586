"""A process that has mapped a segment which another one owns, writable.

A rank that publishes together with its leader writes into it. A process that serves it to other hosts only reads, but
network cards register writable memory only.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from forgelite.weights import arena_layout


class ArenaPeer:
    """A writable mapping of somebody else's segment.

    It takes no lease and commits nothing: the owner opens a slot, waits until every peer has written into it, and
    commits. A peer writes only between the two.
    """

    def __init__(self, path: Path) -> None:
        """Map the segment at `path`.

        Raises:
            FileNotFoundError: its owner has removed it.
            WeightError: it is no segment.
        """
        self.path = path
        descriptor = os.open(path, os.O_RDWR)
        try:
            memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(descriptor)  # the mapping has its own
        self.layout = arena_layout.read_header(memoryview(memory), str(path))
        self._header = arena_layout.words(memoryview(memory))
        self._data = torch.frombuffer(memory, dtype=torch.uint8)

    def views(self, slot: int) -> Mapping[str, torch.Tensor]:
        """name -> where it belongs in `slot`."""
        return arena_layout.slot_views(self.layout, self._data, slot)

    def slot_bytes(self, slot: int) -> torch.Tensor:
        """[bytes of a slot] uint8: all of `slot`."""
        start = self.layout.slot_start(slot)
        return self._data[start : start + self.layout.slot_bytes]

    def slot_of(self, version: int) -> int | None:
        """The slot that holds `version` at this moment; None when none does."""
        slots = range(self.layout.slots)
        return next((slot for slot in slots if arena_layout.version_in(self._header, slot) == version), None)

    def is_torn(self, slot: int) -> bool:
        """Whether a version was begun in `slot` and is not whole: it is being written, or its writer is dead."""
        return self._header[arena_layout.begin_word(slot)] != self._header[arena_layout.end_word(slot)]
