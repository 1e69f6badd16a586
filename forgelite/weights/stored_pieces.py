"""How pieces lie in a segment: under which names, and what a manifest says of them to other hosts."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from forgelite.weights import arena_layout
from forgelite.weights.arena_layout import ArenaLayout
from forgelite.weights.manifest import Manifest, StoredPiece, TensorInfo
from forgelite.weights.pieces import Piece, whole


def segment_tensors(pieces: Sequence[Piece], infos: Sequence[TensorInfo]) -> dict[str, torch.Tensor]:
    """The tensors of a segment that holds `pieces`, as descriptions: they have no memory of their own.

    A whole tensor has its own name; a part has its place in its name, because there may be several.
    """
    shapes = {info.name: info for info in infos}
    tensors = {}
    for piece in pieces:
        info = shapes[piece.name]
        element = torch.empty((), dtype=getattr(torch, info.dtype))
        tensors[entry_name(piece, is_whole=piece == whole(info))] = (
            element.expand(piece.shape) if piece.numel else element.new_empty(piece.shape)
        )
    return tensors


def entry_name(piece: Piece, *, is_whole: bool) -> str:
    """The name of a piece in a segment."""
    if is_whole:
        return piece.name
    ranges = ",".join(f"{begin}:{begin + size}" for begin, size in zip(piece.start, piece.shape, strict=True))
    return f"{piece.name}[{ranges}]"


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
