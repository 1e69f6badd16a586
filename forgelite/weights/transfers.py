"""What a host must fetch, and from where: from pieces as they were published to a few requests.

Bytes that lie side by side at both ends travel as one run, whatever tensors they belong to, and long runs are cut into
requests of equal size, many of which are on their way at a time. Where a piece does not lie in one run at both
ends (it was cut along a column, say), its rows travel to a buffer and are copied from there.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from forgelite.errors import WeightMismatch
from forgelite.weights.manifest import StoredPiece
from forgelite.weights.pieces import Piece, overlap

# Two pieces less than this apart are one run: the bytes between them are what the arena leaves free for alignment.
_GAP_BYTES = 64


@dataclass(kw_only=True, slots=True, frozen=True)
class LocalPiece:
    """A place that is to be filled.

    Example: `LocalPiece(piece=whole(info), dtype="bfloat16", offset=4096)`.
    """

    piece: Piece
    dtype: str
    offset: int  # bytes from the start of the local slot


@dataclass(kw_only=True, slots=True, frozen=True)
class Move:
    """A piece that arrives in a buffer, to be copied into whatever it overlaps with.

    Example: `Move(piece=two_rows, dtype="float32", offset=0, target=0)`.
    """

    piece: Piece  # its elements, row by row
    dtype: str
    offset: int  # bytes from the start of the buffer
    target: int  # index of the local piece


@dataclass(kw_only=True, slots=True, frozen=True)
class Request:
    """Bytes to be read from one host.

    Example: `Request(host="b", segment="/dev/shm/forgelite-...", start=0, nbytes=4194304, target=0)`.
    """

    host: str
    segment: str
    start: int  # bytes from the start of the slot there
    nbytes: int
    target: int | None  # bytes from the start of the local slot, where they go as they are; None: into a buffer
    moves: tuple[Move, ...] = ()  # out of that buffer


def plan_requests(stored: Sequence[StoredPiece], needed: Sequence[LocalPiece], *, request_bytes: int) -> list[Request]:
    """The requests that fill `needed`, and nothing else but what lies between their rows.

    Args:
        stored: every piece of a version, each element of a tensor in exactly one.
        needed: the places to fill; a place that stands there twice (a tied tensor) is filled once.
        request_bytes: the most that one request asks for, in bytes.

    Raises:
        WeightMismatch: `stored` does not hold all of a needed piece.
    """
    by_name: dict[str, list[StoredPiece]] = {}
    for piece in stored:
        by_name.setdefault(piece.name, []).append(piece)
    direct: set[Request] = set()  # tied tensors ask for the same bytes twice
    staged: list[Request] = []
    for index, place in enumerate(needed):
        found = 0
        for source in by_name.get(place.piece.name, []):
            origin = Piece(name=source.name, start=source.start, shape=source.shape)
            common = overlap(origin, place.piece)
            if common is None:
                continue
            found += common.numel
            there, here = run_in(origin, common), run_in(place.piece, common)
            if there is None or here is None:
                staged += _by_rows(source, origin, common, place.dtype, index, request_bytes)
                continue
            size = getattr(torch, place.dtype).itemsize
            direct.add(
                Request(
                    host=source.host,
                    segment=source.segment,
                    start=source.offset + there * size,
                    nbytes=common.numel * size,
                    target=place.offset + here * size,
                )
            )
        if found != place.piece.numel:
            raise WeightMismatch(f"{found} of the {place.piece.numel} elements of {place.piece} were published")
    ends = sorted((place.offset, place.offset + _nbytes(place)) for place in needed)
    runs = _joined(sorted(direct, key=_place), lambda last, request: _one_run(last, request, ends))
    requests = [part for run in runs for part in _cut(run, request_bytes)]
    return requests + list(
        _joined(
            sorted(staged, key=_place),
            lambda last, request: request.start + request.nbytes - last.start <= request_bytes,
        )
    )


def run_in(outer: Piece, inner: Piece) -> int | None:
    """Where `inner` starts in the elements of `outer`, row by row; None when it is not one run of them."""
    place = inner.within(outer)
    cut = max((d for d, (n, size) in enumerate(zip(place.shape, outer.shape, strict=True)) if n != size), default=0)
    if any(n != 1 for n in place.shape[:cut]):
        return None
    strides = _strides(outer.shape)
    return sum(begin * stride for begin, stride in zip(place.start, strides, strict=True))


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


def _by_rows(
    source: StoredPiece, origin: Piece, common: Piece, dtype: str, index: int, request_bytes: int
) -> Iterator[Request]:
    """Requests for the rows of `origin` in which `common` lies."""
    row_bytes = math.prod(origin.shape[1:]) * getattr(torch, dtype).itemsize
    rows_at_once = max(1, request_bytes // row_bytes)
    end = common.start[0] + common.shape[0]
    for row in range(common.start[0], end, rows_at_once):
        rows = min(rows_at_once, end - row)
        piece = Piece(name=origin.name, start=(row, *origin.start[1:]), shape=(rows, *origin.shape[1:]))
        yield Request(
            host=source.host,
            segment=source.segment,
            start=source.offset + (row - origin.start[0]) * row_bytes,
            nbytes=rows * row_bytes,
            target=None,
            moves=(Move(piece=piece, dtype=dtype, offset=0, target=index),),
        )


def _place(request: Request) -> tuple[str, str, int]:
    return request.host, request.segment, request.start


def _joined(requests: Iterable[Request], may_join: Callable[[Request, Request], bool]) -> Iterator[Request]:
    """Requests that are neighbours at their source as one, where `may_join` agrees."""
    last: Request | None = None
    for request in requests:
        if last is None:
            last = request
        elif _neighbours(last, request) and may_join(last, request):
            shift = request.start - last.start
            moves = tuple(replace(move, offset=move.offset + shift) for move in request.moves)
            last = replace(last, nbytes=max(last.nbytes, shift + request.nbytes), moves=last.moves + moves)
        else:
            yield last
            last = request
    if last is not None:
        yield last


def _neighbours(last: Request, request: Request) -> bool:
    same = (last.host, last.segment) == (request.host, request.segment)
    return same and request.start - (last.start + last.nbytes) < _GAP_BYTES


def _one_run(last: Request, request: Request, places: Sequence[tuple[int, int]]) -> bool:
    """Whether two neighbours are neighbours in the local slot, too, with nothing needed between them.

    Args:
        places: [start, end) of all needed pieces in the local slot, rising.
    """
    assert last.target is not None
    assert request.target is not None
    if request.target - last.target != request.start - last.start:
        return False
    end = last.target + last.nbytes
    if end >= request.target:
        return True
    before = bisect.bisect_left(places, (request.target,)) - 1  # the last place that starts before the second
    return before < 0 or places[before][1] <= end


def _nbytes(place: LocalPiece) -> int:
    return place.piece.numel * getattr(torch, place.dtype).itemsize


def _cut(run: Request, request_bytes: int) -> Iterator[Request]:
    assert run.target is not None
    for done in range(0, run.nbytes, request_bytes):
        nbytes = min(request_bytes, run.nbytes - done)
        yield replace(run, start=run.start + done, nbytes=nbytes, target=run.target + done)
