"""Requests between hosts, carried out on plain buffers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forgelite.errors import WeightMismatch
from forgelite.weights.manifest import StoredPiece
from forgelite.weights.pieces import Piece, copy_overlap
from forgelite.weights.transfers import LocalPiece, Request, plan_requests

ALIGNMENT = 64
DTYPE = "int32"


def lay_out(pieces: Sequence[Piece]) -> tuple[list[int], int]:
    """Offsets of the pieces in a slot, and its size."""
    sizes = [(piece.numel * 4 + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT for piece in pieces]
    offsets = [0, *itertools.accumulate(sizes)]
    return offsets[:-1], offsets[-1]


def view(slot: torch.Tensor, piece: Piece, offset: int) -> torch.Tensor:
    return slot[offset : offset + piece.numel * 4].view(torch.int32).view(piece.shape)


def carry_out(requests: Sequence[Request], sources: dict[str, torch.Tensor], needed: Sequence[LocalPiece], size: int):
    """The local slot after all requests."""
    slot = torch.full((size,), 255, dtype=torch.uint8)
    for request in requests:
        sent = sources[request.host][request.start : request.start + request.nbytes]
        assert len(sent) == request.nbytes
        if request.target is not None:
            slot[request.target : request.target + request.nbytes] = sent
        for move in request.moves:
            place = needed[move.target]
            elements = view(sent.clone(), move.piece, move.offset)
            copy_overlap(move.piece, elements, place.piece, view(slot, place.piece, place.offset))
    return slot


def grid(name: str, shape: tuple[int, int], cuts: tuple[list[int], list[int]]) -> list[Piece]:
    rows, columns = (
        list(itertools.pairwise(sorted({0, size, *(cut % (size + 1) for cut in along)})))
        for along, size in zip(cuts, shape, strict=True)
    )
    return [Piece(name=name, start=(r, c), shape=(r_end - r, c_end - c)) for r, r_end in rows for c, c_end in columns]


CUTS = st.tuples(st.lists(st.integers(0, 12), max_size=2), st.lists(st.integers(0, 12), max_size=2))
TENSORS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), CUTS, CUTS), min_size=1, max_size=4)


@given(tensors=TENSORS, request_bytes=st.sampled_from([4, 40, 64, 1000]))
def test_any_cut_of_the_publisher_arrives_in_any_cut_of_the_reader(tensors: list, request_bytes: int) -> None:
    wholes, published, wanted = {}, {"a": [], "b": []}, []
    for number, (rows, columns, cut, other_cut) in enumerate(tensors):
        name = f"w{number}"
        wholes[name] = torch.arange(rows * columns, dtype=torch.int32).view(rows, columns) + 100 * number
        for index, piece in enumerate(grid(name, (rows, columns), cut)):
            published["ab"[index % 2]].append(piece)
        wanted += grid(name, (rows, columns), other_cut)
    stored, sources = [], {}
    for host, pieces in published.items():
        offsets, size = lay_out(pieces)
        sources[host] = torch.zeros(size, dtype=torch.uint8)
        for piece, offset in zip(pieces, offsets, strict=True):
            view(sources[host], piece, offset).copy_(wholes[piece.name][piece.slices])
            stored.append(
                StoredPiece(
                    name=piece.name, start=piece.start, shape=piece.shape, host=host, segment="s", offset=offset
                )
            )
    offsets, size = lay_out(wanted)
    needed = [LocalPiece(piece=p, dtype=DTYPE, offset=offset) for p, offset in zip(wanted, offsets, strict=True)]
    requests = plan_requests(stored, needed, request_bytes=request_bytes)
    slot = carry_out(requests, sources, needed, size)
    for place in needed:
        assert torch.equal(view(slot, place.piece, place.offset), wholes[place.piece.name][place.piece.slices])


def one_segment(shapes: dict[str, tuple[int, ...]]) -> tuple[list[StoredPiece], list[LocalPiece]]:
    """Whole tensors that lie alike at both ends."""
    pieces = [Piece(name=name, start=(0,) * len(shape), shape=shape) for name, shape in shapes.items()]
    offsets, _ = lay_out(pieces)
    placed = list(zip(pieces, offsets, strict=True))
    stored = [
        StoredPiece(name=p.name, start=p.start, shape=p.shape, host="a", segment="s", offset=o) for p, o in placed
    ]
    return stored, [LocalPiece(piece=p, dtype=DTYPE, offset=o) for p, o in placed]


def test_a_version_that_lies_alike_at_both_ends_travels_in_large_requests_whatever_its_tensors() -> None:
    stored, needed = one_segment({f"w{i}": (7,) for i in range(1000)})
    requests = plan_requests(stored, needed, request_bytes=4096)
    assert [request.nbytes for request in requests[:-1]] == [4096] * (len(requests) - 1)
    assert all(request.target == request.start and not request.moves for request in requests)


def test_a_tied_tensor_travels_once() -> None:
    stored, needed = one_segment({"embedding": (8, 8)})
    head = StoredPiece(name="head", start=(0, 0), shape=(8, 8), host="a", segment="s", offset=0)
    place = LocalPiece(piece=Piece(name="head", start=(0, 0), shape=(8, 8)), dtype=DTYPE, offset=0)
    (request,) = plan_requests([*stored, head], [*needed, place], request_bytes=4096)
    assert request.nbytes == 256


def test_only_the_rows_that_are_needed_travel() -> None:
    stored, _ = one_segment({"w": (100, 4)})
    rows = LocalPiece(piece=Piece(name="w", start=(40, 0), shape=(10, 4)), dtype=DTYPE, offset=0)
    (request,) = plan_requests(stored, [rows], request_bytes=4096)
    assert (request.start, request.nbytes, request.target) == (640, 160, 0)


def test_a_scalar_travels() -> None:
    stored, needed = one_segment({"scale": ()})
    (request,) = plan_requests(stored, needed, request_bytes=4096)
    assert request.nbytes == 4


def test_a_piece_that_was_not_published_is_an_error_with_its_place() -> None:
    stored, _ = one_segment({"w": (4, 4)})
    beyond = LocalPiece(piece=Piece(name="w", start=(2, 0), shape=(4, 4)), dtype=DTYPE, offset=0)
    with pytest.raises(WeightMismatch, match="8 of the 16 elements"):
        plan_requests(stored, [beyond], request_bytes=64)
