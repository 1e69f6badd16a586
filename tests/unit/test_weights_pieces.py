"""Rectangles of tensors: overlap, assignment, cover."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forgelite.errors import WeightMismatch
from forgelite.weights.manifest import TensorInfo
from forgelite.weights.pieces import Piece, assign, copy_overlap, held_piece, overlap, whole


def piece(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Piece:
    return Piece(name=name, start=start, shape=shape)


def matrix(rows: int, columns: int) -> TensorInfo:
    return TensorInfo(name="w", shape=(rows, columns), dtype="int64")


def grid(info: TensorInfo, row_cuts: list[int], column_cuts: list[int]) -> list[Piece]:
    """The pieces of a matrix that is cut at these rows and columns."""
    rows, columns = (
        list(itertools.pairwise(sorted({0, size, *(cut % (size + 1) for cut in cuts)})))
        for cuts, size in zip((row_cuts, column_cuts), info.shape, strict=True)
    )
    return [piece("w", (r, c), (r_end - r, c_end - c)) for r, r_end in rows for c, c_end in columns]


CUTS = st.lists(st.integers(0, 20), max_size=3)


@given(rows=st.integers(1, 9), columns=st.integers(1, 9), cuts=st.tuples(CUTS, CUTS, CUTS, CUTS))
def test_a_tensor_cut_in_any_way_is_put_together_cut_in_any_other_way(rows: int, columns: int, cuts: tuple) -> None:
    info = matrix(rows, columns)
    tensor = torch.arange(rows * columns).view(rows, columns)
    sources = [(p, tensor[p.slices].clone()) for p in grid(info, cuts[0], cuts[1])]
    for target in grid(info, cuts[2], cuts[3]):
        into = torch.full(target.shape, -1)
        for source, elements in sources:
            copy_overlap(source, elements, target, into)
        assert torch.equal(into, tensor[target.slices])


@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    cuts=st.tuples(CUTS, CUTS),
    copies=st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=1),
)
def test_every_element_is_written_exactly_once_whoever_holds_copies_of_it(
    rows: int, columns: int, cuts: tuple, copies: list[set[int]]
) -> None:
    info = matrix(rows, columns)
    held: list[set[Piece]] = [set() for _ in range(4)]
    for part, holders in zip(grid(info, *cuts), itertools.cycle(copies), strict=False):
        for rank in holders:
            held[rank].add(part)
    writes = torch.zeros(rows, columns, dtype=torch.int64)
    for rank, parts in enumerate(assign([info], held)):
        assert held[rank].issuperset(parts)
        for part in parts:
            writes[part.slices] += 1
    assert bool((writes == 1).all())


def test_replicas_share_the_writing() -> None:
    infos = [TensorInfo(name=f"w{i}", shape=(10,), dtype="int8") for i in range(6)]
    held = [{whole(info) for info in infos}] * 3
    assert [len(pieces) for pieces in assign(infos, held)] == [2, 2, 2]


def test_an_element_that_nobody_holds_is_an_error_with_the_name() -> None:
    with pytest.raises(WeightMismatch, match="w: the ranks hold 12 of its 16 elements"):
        assign([matrix(4, 4)], [{piece("w", (0, 0), (2, 4))}, {piece("w", (2, 0), (1, 4))}])


def test_pieces_that_overlap_without_being_equal_are_an_error() -> None:
    with pytest.raises(WeightMismatch, match="cut w in ways that do not fit"):
        assign([matrix(4, 4)], [{piece("w", (0, 0), (3, 4))}, {piece("w", (2, 0), (2, 4))}])


def test_a_piece_of_an_unknown_tensor_is_an_error_with_its_name() -> None:
    with pytest.raises(WeightMismatch, match="no tensor is called v"):
        assign([matrix(1, 1)], [{piece("v", (0, 0), (1, 1))}])


def test_a_scalar_is_a_piece_and_an_empty_tensor_is_none() -> None:
    assert held_piece("s", torch.tensor(2.5)) == piece("s", (), ())
    assert held_piece("e", torch.empty(0, 7)) is None
    into = torch.tensor(0.0)
    copy_overlap(piece("s", (), ()), torch.tensor(2.5), piece("s", (), ()), into)
    assert into.item() == 2.5


def test_pieces_of_different_tensors_have_nothing_in_common() -> None:
    assert overlap(piece("a", (0,), (2,)), piece("b", (0,), (2,))) is None
