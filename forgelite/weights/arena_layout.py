"""Where everything lies in a shared-memory segment.

    header page | index (JSON) | slot 0 | slot 1 | ...

The header is an array of 64-bit words in native order:

    0 magic    1 format    2 slots    3 bytes of a slot    4 bytes of the index    5 fingerprinted (0 or 1)
    6 retained: so many of the newest versions are never overwritten
    16 + 8 s   begin of slot s: the version whose writing was begun
    17 + 8 s   end of slot s: the version whose writing was finished
    18 + 8 s   fingerprint of slot s
    19 + 8 s   sample of slot s (`fingerprint.sample_of`)

A slot holds version v exactly while begin == end == v. Storing `end` is the commit: one aligned 8-byte store.
A publisher that dies in the middle leaves begin != end behind, and no reader takes that slot.

The index names each tensor once; tied tensors have the same offset. Slots and tensors are aligned, so that
every dtype can be viewed in place; tensors that an engine fuses follow one another without a gap
(`fused_order`). Bytes that belong to no tensor stay zero.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from forgelite.errors import WeightError, WeightMismatch
from forgelite.weights.fused_order import padded_rows, side_by_side
from forgelite.weights.manifest import Manifest, TensorInfo, describe, memory_of

PAGE = 4096
MAX_SLOTS = (PAGE // 8 - 16) // 8
NO_VERSION = 2**64 - 1  # of a slot that was never written

_ALIGNMENT = 64  # a cache line, and a multiple of the size of every dtype
_MAGIC = int.from_bytes(b"forgelit", "little")
_FORMAT = 2


@dataclass(kw_only=True, slots=True, frozen=True)
class Entry:
    """The place of one tensor in a slot.

    Example: `Entry(info=TensorInfo(name="w", shape=(2, 3), dtype="float32"), offset=64, nbytes=24)`.
    """

    info: TensorInfo
    offset: int  # bytes from the start of the slot
    nbytes: int

    @property
    def place(self) -> tuple[int, int]:
        """Equal for two entries exactly when they are tied, or both are empty."""
        return (self.offset, self.nbytes) if self.nbytes else (0, 0)


@dataclass(kw_only=True, slots=True, frozen=True)
class ArenaLayout:
    """The division of a segment.

    Example: `ArenaLayout(entries=(entry,), slots=3, slot_bytes=4096, slots_start=8192, retained=2,
    fingerprinted=True)`.
    """

    entries: tuple[Entry, ...]  # in the publisher's order
    slots: int
    slot_bytes: int  # a multiple of the page size
    slots_start: int  # bytes from the start of the segment, a multiple of the page size
    retained: int  # newest versions that stay whole while the next one is written
    fingerprinted: bool

    @property
    def infos(self) -> tuple[TensorInfo, ...]:
        return tuple(entry.info for entry in self.entries)

    @property
    def payload_bytes(self) -> int:
        """Bytes of one version; tied tensors count once."""
        return sum(nbytes for _, nbytes in {entry.place for entry in self.entries})

    @property
    def total_bytes(self) -> int:
        return self.slots_start + self.slots * self.slot_bytes

    def slot_start(self, slot: int) -> int:
        """Bytes from the start of the segment to `slot`."""
        return self.slots_start + slot * self.slot_bytes


def plan(
    tensors: Mapping[str, torch.Tensor],
    *,
    slots: int,
    retained: int,
    fingerprinted: bool,
    transfer_dtype: torch.dtype | None = None,
) -> ArenaLayout:
    """Lay `tensors` out for `slots` versions. Tensors that share all of their memory get one place.

    Args:
        tensors: name -> strided tensor of any device.
        slots: how many versions the segment holds, those being written included.
        retained: how many of them are never overwritten; fewer than `slots`.
        fingerprinted: whether every version is written with its fingerprint.
        transfer_dtype: what floating-point tensors of two bytes and more become; None: what they are.

    Raises:
        ValueError: fewer than 2 or more than MAX_SLOTS slots, or `retained` does not fit.
        WeightMismatch: there are no tensors, or one is no plain strided one (distributed, sparse, quantised,
            meta).
    """
    if not 2 <= slots <= MAX_SLOTS:
        raise ValueError(f"a segment has 2 to {MAX_SLOTS} slots, not {slots}; weights.retain is less than that")
    if not 1 <= retained < slots:
        raise ValueError(f"{slots} slots can retain 1 to {slots - 1} versions, not {retained}")
    if not tensors:
        raise WeightMismatch("there are no tensors to publish")
    infos = {info.name: transferred(info, transfer_dtype) for info in describe(tensors)}
    entries: dict[str, Entry] = {}
    places: dict[tuple[object, ...], int] = {}
    end = 0
    for group in side_by_side(infos):
        for name in group:
            info, tensor = infos[name], tensors[name]
            _check_plain(name, tensor)
            itemsize = getattr(torch, info.dtype).itemsize
            offset = places.setdefault(memory_of(tensor), end)
            entries[name] = Entry(info=info, offset=offset, nbytes=tensor.numel() * itemsize)
            if offset == end:
                end += tensor.numel() * itemsize
                if info.shape and info.shape[0]:
                    row = tensor.numel() * itemsize // info.shape[0]
                    end += row * (padded_rows(name, info.shape[0]) - info.shape[0])
        end = _round_up(end, _ALIGNMENT)
    in_order = tuple(entries[name] for name in tensors)
    return ArenaLayout(
        entries=in_order,
        slots=slots,
        slot_bytes=max(_round_up(end, PAGE), PAGE),
        slots_start=PAGE + _round_up(len(_encode(in_order)), PAGE),
        retained=retained,
        fingerprinted=fingerprinted,
    )


def transferred(info: TensorInfo, dtype: torch.dtype | None) -> TensorInfo:
    """`info` as it travels: floating-point tensors of two bytes and more become `dtype`, unless that is None."""
    held = getattr(torch, info.dtype)
    if dtype is None or not held.is_floating_point or held.itemsize < 2:
        return info
    return replace(info, dtype=str(dtype).removeprefix("torch."))


def ties(layout: ArenaLayout) -> Iterator[tuple[str, str]]:
    """Pairs of names that share one place: the first of the place, and another one."""
    first: dict[tuple[int, int], str] = {}
    for entry in layout.entries:
        if entry.nbytes:  # otherwise it has no place of its own
            name = first.setdefault(entry.place, entry.info.name)
            if name != entry.info.name:
                yield name, entry.info.name


def write_header(layout: ArenaLayout, memory: memoryview) -> None:
    """Write header and index of an empty segment into its zeroed `memory` (bytes)."""
    index = _encode(layout.entries)
    memory[PAGE : PAGE + len(index)] = index
    header = words(memory)
    fixed = (_MAGIC, _FORMAT, layout.slots, layout.slot_bytes, len(index), int(layout.fingerprinted), layout.retained)
    for position, value in enumerate(fixed):
        header[position] = value
    for slot in range(layout.slots):
        header[begin_word(slot)] = header[end_word(slot)] = NO_VERSION


def read_header(memory: memoryview, path: str) -> ArenaLayout:
    """The layout of the segment in `memory` (bytes).

    Raises:
        WeightError: it is no segment, one of another format, or cut short.
    """
    if len(memory) < PAGE:
        raise WeightError(f"{path} is no weight segment: it has {len(memory)} bytes")
    header = words(memory)
    if (header[0], header[1]) != (_MAGIC, _FORMAT):
        raise WeightError(f"{path} is no weight segment of format {_FORMAT}: it starts {bytes(memory[:16])!r}")
    index_bytes = header[4]
    layout = ArenaLayout(
        entries=_decode(bytes(memory[PAGE : PAGE + index_bytes])),
        slots=header[2],
        slot_bytes=header[3],
        slots_start=PAGE + _round_up(index_bytes, PAGE),
        retained=header[6],
        fingerprinted=bool(header[5]),
    )
    if len(memory) != layout.total_bytes:
        raise WeightError(f"{path} has {len(memory)} bytes, and should have {layout.total_bytes}")
    return layout


def words(memory: memoryview) -> memoryview:
    """The header as 64-bit words; reading or storing one is a single aligned access."""
    return memory[:PAGE].cast("Q")


def begin_word(slot: int) -> int:
    return 16 + 8 * slot


def end_word(slot: int) -> int:
    return 17 + 8 * slot


def fingerprint_word(slot: int) -> int:
    return 18 + 8 * slot


def sample_word(slot: int) -> int:
    return 19 + 8 * slot


def version_in(header: memoryview, slot: int) -> int | None:
    """The version that `slot` holds; None when it is empty, torn or being written."""
    begin, end = header[begin_word(slot)], header[end_word(slot)]
    return end if begin == end != NO_VERSION else None


def whole_versions(header: memoryview, slots: int) -> list[int]:
    """The versions that the slots hold, oldest first."""
    found = (version_in(header, slot) for slot in range(slots))
    return sorted(version for version in found if version is not None)


def slot_views(layout: ArenaLayout, segment: torch.Tensor, slot: int) -> dict[str, torch.Tensor]:
    """The tensors of one slot, as views.

    Args:
        layout: of the segment.
        segment: [bytes of the segment] uint8.
        slot: which one.

    Returns:
        name -> view with the entry's shape and dtype; tied names give the same memory.
    """
    start = layout.slot_start(slot)
    return {
        entry.info.name: segment[start + entry.offset : start + entry.offset + entry.nbytes]
        .view(getattr(torch, entry.info.dtype))
        .view(entry.info.shape)
        for entry in layout.entries
    }


def _encode(entries: Sequence[Entry]) -> bytes:
    rows = [(e.info.name, e.info.shape, e.info.dtype, e.offset, e.nbytes) for e in entries]
    return json.dumps(rows).encode()


def _decode(index: bytes) -> tuple[Entry, ...]:
    return tuple(
        Entry(info=TensorInfo(name=name, shape=tuple(shape), dtype=dtype), offset=offset, nbytes=nbytes)
        for name, shape, dtype, offset, nbytes in json.loads(index)
    )


def _check_plain(name: str, tensor: torch.Tensor) -> None:
    # A distributed tensor passes for a strided one; only its method tells.
    distributed = hasattr(tensor, "full_tensor")
    if distributed or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "distributed" if distributed else f"{tensor.layout} on {tensor.device}"
        raise WeightMismatch(
            f"{name} is a {kind} tensor; publish plain strided tensors (`full_tensor()`, `to_dense()`)"
        )


def _round_up(size: int, multiple: int) -> int:
    return (size + multiple - 1) // multiple * multiple


def manifest_of(layout: ArenaLayout, path: Path, version: int, written: str | None) -> Manifest:
    """The manifest of a version in the segment at `path`."""
    return Manifest(
        version=version,
        carrier="shm",
        segment=str(path),
        tensors=layout.infos,
        nbytes=layout.payload_bytes,
        fingerprint=written,
    )
