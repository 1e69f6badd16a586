"""From the layout of a segment to the pieces that a manifest names for readers on other hosts."""

from __future__ import annotations

import mmap
import os
from dataclasses import replace
from pathlib import Path

from forgelite.weights import arena_layout
from forgelite.weights.arena_layout import ArenaLayout
from forgelite.weights.manifest import Manifest, StoredPiece


def read_layout(segment: Path) -> ArenaLayout:
    """The layout of a segment, without mapping its versions.

    Raises:
        FileNotFoundError: its owner has removed it.
        WeightError: it is no segment.
    """
    descriptor = os.open(segment, os.O_RDONLY)
    try:
        memory = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
    with memory, memoryview(memory) as view:
        return arena_layout.read_header(view, str(segment))


def whole_pieces(layout: ArenaLayout, *, host: str, segment: str) -> tuple[StoredPiece, ...]:
    """The pieces of a segment that holds whole tensors; those without elements have none."""
    return tuple(
        StoredPiece(
            name=entry.info.name,
            start=(0,) * len(entry.info.shape),
            shape=entry.info.shape,
            host=host,
            segment=segment,
            offset=entry.offset,
        )
        for entry in layout.entries
        if entry.nbytes
    )


def for_other_hosts(manifest: Manifest, layout: ArenaLayout, *, host: str) -> Manifest:
    """The manifest of whole tensors in a segment, as other hosts need it.

    Args:
        manifest: of a version in shared memory.
        layout: of its segment.
        host: where it lies.
    """
    return replace(manifest, carrier="rdma", pieces=whole_pieces(layout, host=host, segment=manifest.segment))


def for_this_host(manifest: Manifest) -> Manifest:
    """The manifest of the same version, as `for_other_hosts` got it."""
    return replace(manifest, carrier="shm", pieces=())
