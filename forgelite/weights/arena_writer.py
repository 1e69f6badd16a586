"""The writing end of the shared-memory arena: one owner, a few slots that are used again and again.

    writer   exclusive lease on the oldest free slot -> begin = v -> copy -> end = v (commit) -> lease back
    reader   find the slot with begin == end == v -> shared lease -> look again -> read -> lease back

The lease of slot s is a lock on byte 1 + s of the file. Because the writer never writes without it, a version
cannot change under a reader, and because the kernel drops the lock of a dead process, neither end can block
the other by dying. The newest `retained` versions are never overwritten, so `retained + 1` slots are needed; a
reader that serves a version in place for long keeps its slot, so each of those needs one slot more.

Taking a lock in the kernel also orders memory: what a writer stored before it gave its lease back is seen by
a reader that took its lease after that (`arena_reader`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from forgelite.errors import WeightError, WeightMismatch
from forgelite.weights import arena_layout, locks, segment
from forgelite.weights.arena_layout import ArenaLayout, manifest_of
from forgelite.weights.fingerprint import combine, fingerprint_of, sample_of
from forgelite.weights.manifest import Manifest, TensorInfo, check_tensors, describe, memory_of
from forgelite.weights.transfer import copy_many


@dataclass(kw_only=True, slots=True, frozen=True)
class Writing:
    """A slot that is open for a version.

    Example: `with writer.writing(8, timeout_s=10.0) as writing: fill(writing.views); writing.commit()`.
    """

    slot: int
    views: Mapping[str, torch.Tensor]  # name -> where it belongs
    # Makes the version whole, and gives its manifest. Who has the digest of every tensor passes them by name;
    # otherwise the slot is read once more for the fingerprint.
    commit: Callable[..., Manifest]


class ArenaWriter:
    """The owner of a segment. Methods may be called from any thread; writes exclude one another."""

    def __init__(
        self,
        *,
        descriptor: int,
        path: Path,
        layout: ArenaLayout,
        memory: mmap.mmap,
        sources: tuple[TensorInfo, ...],
    ) -> None:
        self.path = path
        self.layout = layout
        self._sources = sources  # what is published; differs from the layout where the dtype is converted
        self._descriptor = descriptor
        self._ties = tuple(arena_layout.ties(layout))
        self._blank = manifest_of(layout, path, 0, None)
        self._header = arena_layout.words(memoryview(memory))
        data = torch.frombuffer(memory, dtype=torch.uint8)
        self._slots = [arena_layout.slot_views(layout, data, slot) for slot in range(layout.slots)]
        self._mutex = threading.Lock()
        self._closed = False

    @classmethod
    def create(
        cls,
        tensors: Mapping[str, torch.Tensor],
        *,
        folder: Path,
        run_id: str,
        slots: int,
        fingerprinted: bool,
        retained: int | None = None,
        transfer_dtype: torch.dtype | None = None,
    ) -> Self:
        """Make a segment for versions that look like `tensors`; nothing is published yet.

        Args:
            tensors: name -> plain strided tensor. Its names, shapes, dtypes and ties hold for every version.
            folder: a folder on a memory file system.
            run_id: becomes part of the file name.
            slots: at least one more than `retained`.
            fingerprinted: whether every version is written with its fingerprint.
            retained: newest versions that are never overwritten; None: all but one slot.
            transfer_dtype: what floating-point tensors become while they are copied; None: what they are.

        Raises:
            WeightError: there is not enough memory in `folder`.
            WeightMismatch: a tensor is no plain strided one.
            ValueError: `slots`, `retained` or `run_id` is out of range.
        """
        layout = arena_layout.plan(
            tensors,
            slots=slots,
            retained=slots - 1 if retained is None else retained,
            fingerprinted=fingerprinted,
            transfer_dtype=transfer_dtype,
        )
        descriptor, path = segment.create(folder, run_id)
        try:
            segment.reserve(descriptor, layout.total_bytes, folder)
            # populated, because a page fault for every 4 KiB would cost more than the first copy
            memory = mmap.mmap(descriptor, layout.total_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            arena_layout.write_header(layout, memoryview(memory))
            path = segment.show(path)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        return cls(
            descriptor=descriptor,
            path=path,
            layout=layout,
            memory=memory,
            sources=describe(tensors),
        )

    def write(self, version: int, tensors: Mapping[str, torch.Tensor], *, timeout_s: float) -> Manifest:
        """Copy `tensors` into the oldest free slot and commit them as `version`.

        Args:
            version: must be larger than every committed one.
            tensors: name -> tensor, as described at creation; not to be changed until this returns.
            timeout_s: how long to wait for readers of the versions that may be overwritten, in seconds.

        Raises:
            ValueError: `version` is negative.
            WeightError: `version` does not rise, those slots are still leased, or the arena is closed.
            WeightMismatch: names, shapes, dtypes or ties differ from those at creation.
        """
        with self.writing(version, timeout_s=timeout_s, check=lambda: self._check(tensors)) as writing:
            return writing.commit(self._copy(tensors, writing.views))

    @contextlib.contextmanager
    def writing(self, version: int, *, timeout_s: float, check: Callable[[], None] = lambda: None) -> Iterator[Writing]:
        """Open the oldest free slot for `version`, for whoever fills it: this process, or several that have mapped it.

        Without a call of `commit` inside the block the slot holds no version afterwards.

        Args:
            version: must be larger than every committed one.
            timeout_s: how long to wait for readers of the versions that may be overwritten, in seconds.
            check: called before the slot is touched; what it raises leaves the old version whole.

        Raises:
            ValueError: `version` is negative.
            WeightError: `version` does not rise, those slots are still leased, or the arena is closed.
        """
        if version < 0:
            raise ValueError(f"a version counts optimizer steps and cannot be {version}")
        with self._mutex:
            self._check_open()
            latest = max(self.versions(), default=-1)
            if version <= latest:
                raise WeightError(f"cannot publish version {version} after version {latest}: versions must rise")
            check()
            with self._writing_lease(timeout_s) as slot:
                self._header[arena_layout.begin_word(slot)] = version
                yield Writing(slot=slot, views=self._slots[slot], commit=functools.partial(self._commit, slot, version))

    def _commit(self, slot: int, version: int, digests: Mapping[str, int] | None = None) -> Manifest:
        written = None
        if self.layout.fingerprinted:
            written = fingerprint_of(self._slots[slot]) if digests is None else combine(self.layout.infos, digests)
            self._header[arena_layout.sample_word(slot)] = int(sample_of(self._slots[slot]), 16)
        self._header[arena_layout.fingerprint_word(slot)] = int(written, 16) if written else 0
        self._header[arena_layout.end_word(slot)] = version
        return dataclasses.replace(self._blank, version=version, fingerprint=written)

    def _check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        check_tensors(self._sources, tensors, owner=f"the arena {self.path.name}")
        self._check_ties(tensors)

    def versions(self) -> list[int]:
        """The versions that are whole, oldest first; WeightError when the arena is closed."""
        self._check_open()
        return arena_layout.whole_versions(self._header, self.layout.slots)

    def close(self) -> None:
        """Remove the segment. Readers keep what they have mapped. May be called twice."""
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            self.path.unlink(missing_ok=True)
            # The mapping holds a duplicate of the descriptor, and may live on in a view.
            locks.unlock(self._descriptor, segment.OWNER_BYTE)
            os.close(self._descriptor)
            self._slots.clear()
            self._header.release()

    def _check_open(self) -> None:
        if self._closed:
            raise WeightError(f"the arena {self.path.name} is closed")

    def _check_ties(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for tied, name in self._ties:
            if memory_of(tensors[tied]) != memory_of(tensors[name]):
                raise WeightMismatch(
                    f"{name} and {tied} shared their memory in the first version and do not any more; "
                    f"publish them tied every time, or as separate tensors from the start"
                )

    def _overwritable(self) -> list[int]:
        """The slots that do not hold one of the newest `retained` versions, oldest first, empty and torn before."""
        held = {slot: arena_layout.version_in(self._header, slot) for slot in range(self.layout.slots)}
        kept = self.versions()[-self.layout.retained :]
        free = [slot for slot, version in held.items() if version is None or version not in kept]
        return sorted(free, key=lambda slot: -1 if held[slot] is None else held[slot])

    def _copy(self, source: Mapping[str, torch.Tensor], slot: Mapping[str, torch.Tensor]) -> dict[str, int] | None:
        """Fill a slot; returns the digest of every tensor, if versions are fingerprinted."""
        distinct = {entry.place: entry.info.name for entry in self.layout.entries}  # tied tensors once
        pairs = [(slot[name], source[name]) for name in distinct.values()]
        digests = copy_many(pairs, digested=self.layout.fingerprinted)
        if digests is None:
            return None
        by_place = dict(zip(distinct, digests, strict=True))
        return {entry.info.name: by_place[entry.place] for entry in self.layout.entries}

    @contextlib.contextmanager
    def _writing_lease(self, timeout_s: float) -> Iterator[int]:
        deadline = time.monotonic() + timeout_s
        pause_s = 1e-4
        candidates = self._overwritable()
        while (slot := self._try_each(candidates)) is None:
            if time.monotonic() > deadline:
                oldest = candidates[0]
                held = arena_layout.version_in(self._header, oldest)
                readers = locks.holders(self._descriptor, 1 + oldest)
                raise WeightError(
                    f"slot {oldest} still holds version {held} under a lease of process {readers} after "
                    f"{timeout_s} s; end the lease sooner, or raise weights.retain or weights.timeout_s"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 5e-3)
        try:
            yield slot
        finally:
            locks.unlock(self._descriptor, 1 + slot)

    def _try_each(self, slots: list[int]) -> int | None:
        return next((slot for slot in slots if locks.try_lock(self._descriptor, 1 + slot, exclusive=True)), None)
