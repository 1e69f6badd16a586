"""Rectangular parts of tensors: which part a process holds, who writes it, and how parts overlap.

A piece is named by its tensor, by the index of its first element and by its shape. Pieces are cut where the
trainer's ranks cut their tensors, and readers may have cut theirs elsewhere: whatever they need is the overlap
of two rectangles. Nothing here moves bytes between processes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from forgelite.errors import WeightMismatch
from forgelite.weights.manifest import TensorInfo, shorten


@dataclass(kw_only=True, slots=True, frozen=True, order=True)
class Piece:
    """A rectangular part of one tensor.

    Example: rows 4 to 7 of a matrix of eight rows: `Piece(name="w", start=(4, 0), shape=(4, 16))`.
    """

    name: str
    start: tuple[int, ...]  # index of its first element in the whole tensor
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where it lies in the whole tensor."""
        return tuple(slice(begin, begin + size) for begin, size in zip(self.start, self.shape, strict=True))

    def within(self, outer: Piece) -> Piece:
        """The same part, counted from the start of `outer`, in which it must lie."""
        return Piece(
            name=self.name, start=tuple(a - b for a, b in zip(self.start, outer.start, strict=True)), shape=self.shape
        )


def whole(info: TensorInfo) -> Piece:
    """All of a tensor."""
    return Piece(name=info.name, start=(0,) * len(info.shape), shape=info.shape)


def overlap(left: Piece, right: Piece) -> Piece | None:
    """What two pieces of one tensor have in common; None when it is nothing."""
    if left.name != right.name:
        return None
    start = tuple(max(a, b) for a, b in zip(left.start, right.start, strict=True))
    left_end, right_end = ([s + n for s, n in zip(p.start, p.shape, strict=True)] for p in (left, right))
    shape = tuple(min(a, b) - s for a, b, s in zip(left_end, right_end, start, strict=True))
    return Piece(name=left.name, start=start, shape=shape) if all(size > 0 for size in shape) else None


def held_piece(name: str, tensor: torch.Tensor) -> Piece | None:
    """The part of the whole tensor that this process holds; None when it holds nothing of it.

    Args:
        name: of the tensor.
        tensor: plain: held whole. Distributed: the local part counts, by its mesh and placements.

    Raises:
        WeightMismatch: its ranks hold partial sums, which are no part of the tensor yet.
    """
    if not isinstance(tensor, DTensor):
        return Piece(name=name, start=(0,) * tensor.dim(), shape=tuple(tensor.shape)) if tensor.numel() else None
    if any(placement.is_partial() for placement in tensor.placements):
        raise WeightMismatch(
            f"{name} has the placements {tensor.placements}: partial sums must be reduced before they are published "
            f"(`redistribute`)"
        )
    if tensor.device_mesh.get_coordinate() is None:  # this process is not in its mesh
        return None
    (chunk,) = tensor.__create_chunk_list__()  # how torch's own checkpoints cut it
    piece = Piece(name=name, start=tuple(chunk.offsets), shape=tuple(chunk.sizes))
    local = tuple(tensor.to_local().shape)
    if piece.numel != math.prod(local):
        raise WeightMismatch(f"{name}: this rank holds {local}, and its placements {tensor.placements} say {piece}")
    return piece if piece.numel else None


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of `tensor` that this process holds, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def assign(infos: Sequence[TensorInfo], held: Sequence[Collection[Piece]]) -> list[list[Piece]]:
    """Who writes what, so that every element is written exactly once and all write about equally much.

    Ranks that hold equal pieces share them out; every rank that computes this from the same input gets the same.

    Args:
        infos: the whole tensors.
        held: for each rank, the pieces it holds.

    Returns:
        For each rank, the pieces it writes.

    Raises:
        WeightMismatch: elements of a tensor are held by nobody, or pieces overlap without being equal, or a
            piece belongs to no tensor.
    """
    holders: dict[Piece, list[int]] = defaultdict(list)
    for rank, pieces in enumerate(held):
        for piece in pieces:
            holders[piece].append(rank)
    _check_cover(infos, holders)
    load = [0] * len(held)
    written: list[list[Piece]] = [[] for _ in held]
    for piece in sorted(holders, key=lambda piece: (-piece.numel, piece)):
        rank = min(holders[piece], key=lambda rank: (load[rank], rank))
        load[rank] += piece.numel
        written[rank].append(piece)
    return written


def copy_overlap(source: Piece, elements: torch.Tensor, target: Piece, into: torch.Tensor) -> None:
    """Copy what two pieces have in common.

    Args:
        source: the piece that `elements` holds.
        elements: [*source.shape].
        target: the piece that `into` holds.
        into: [*target.shape], of any dtype; elements are cast while they are copied.
    """
    common = overlap(source, target)
    if common is not None:
        into[common.within(target).slices].copy_(elements[common.within(source).slices])


def _check_cover(infos: Sequence[TensorInfo], pieces: Iterable[Piece]) -> None:
    by_name: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_name[piece.name].append(piece)
    if unknown := by_name.keys() - {info.name for info in infos}:
        raise WeightMismatch(f"no tensor is called {shorten(sorted(unknown))}")
    for info in infos:
        found = by_name[info.name]
        for number, piece in enumerate(found):
            clash = next((other for other in found[:number] if overlap(piece, other)), None)
            if clash is not None:
                raise WeightMismatch(f"the ranks cut {info.name} in ways that do not fit: {clash} and {piece}")
            if any(s + n > size for s, n, size in zip(piece.start, piece.shape, info.shape, strict=True)):
                raise WeightMismatch(f"{piece} lies outside of {info.name}, which is {info.shape}")
        if (covered := sum(piece.numel for piece in found)) != math.prod(info.shape):
            raise WeightMismatch(f"{info.name}: the ranks hold {covered} of its {math.prod(info.shape)} elements")
