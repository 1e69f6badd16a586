"""The actor that lets other hosts read the segments of its own: one a host, in a process of its own.

Its process only answers; the bytes are read by Monarch's RDMA, out of the mapped segment and without Python. A version
that is being read is under a lease, so its publisher does not overwrite it; the lease of a host that is gone ends by
itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from monarch.actor import Actor, concurrent_endpoint
from monarch.rdma import RDMABuffer, RDMATcpFallbackWarning

from forgelite.errors import VersionUnavailable
from forgelite.weights.arena_peer import ArenaPeer
from forgelite.weights.arena_reader import ArenaReader

Range = tuple[int, int]  # start and length, in bytes from the start of a slot


@dataclass(kw_only=True, slots=True, frozen=True)
class Offer:
    """A version that may be read until the lease is released, or its time is over.

    Example: `Offer(lease=7, buffers=(handle,))`.
    """

    lease: int
    buffers: tuple[RDMABuffer, ...]  # one for each range that was asked for


@dataclass(kw_only=True, slots=True)
class _Segment:
    """A segment of this host, mapped and registered."""

    reader: ArenaReader  # takes the leases
    peer: ArenaPeer  # its writable mapping is what a network card can register
    buffers: dict[tuple[int, Range], RDMABuffer] = field(default_factory=dict)  # by slot and range; made once


class WeightSource(Actor):
    """Offers versions in the segments of its host."""

    def __init__(self) -> None:
        self._segments: dict[str, _Segment] = {}
        self._leases: dict[int, contextlib.ExitStack] = {}
        self._numbers = itertools.count()

    @concurrent_endpoint
    async def ready(self) -> None:
        """Answers when the process is up."""

    @concurrent_endpoint
    async def offer(self, segment: str, version: int, ranges: Sequence[Range], seconds: float) -> Offer:
        """Lease a version and give handles to read parts of it.

        Args:
            segment: path of the segment on this host.
            version: that it holds.
            ranges: which bytes of the version's slot, a handle for each.
            seconds: after which the lease ends, released or not.

        Raises:
            VersionUnavailable: the segment or the version is gone.
        """
        found = await self._attached(segment)
        lease = contextlib.ExitStack()
        lease.enter_context(found.reader.lease(version))
        try:
            slot = found.peer.slot_of(version)
            if slot is None:
                raise VersionUnavailable(f"version {version} is not in {segment} any more")
            buffers = tuple(_buffer(found, slot, part) for part in ranges)
        except BaseException:
            lease.close()
            raise
        number = next(self._numbers)
        self._leases[number] = lease
        asyncio.get_running_loop().call_later(seconds, self._end, number)
        return Offer(lease=number, buffers=buffers)

    @concurrent_endpoint
    async def release(self, lease: int) -> bool:
        """End a lease; False when its time was over before, so that what was read may be torn."""
        return self._end(lease)

    @concurrent_endpoint
    async def close(self) -> None:
        """Let go of everything."""
        for lease in list(self._leases):
            self._end(lease)
        for segment in list(self._segments):
            await self._detach(segment)

    def _end(self, number: int) -> bool:
        lease = self._leases.pop(number, None)
        if lease is not None:
            lease.close()
        return lease is not None

    async def _attached(self, segment: str) -> _Segment:
        for path, known in list(self._segments.items()):
            if path != segment and not known.reader.owner_is_alive():
                await self._detach(path)  # a whole model of memory stays mapped otherwise
        if segment not in self._segments:
            try:
                peer = await asyncio.to_thread(ArenaPeer, Path(segment))
                self._segments[segment] = _Segment(reader=ArenaReader(Path(segment)), peer=peer)
            except FileNotFoundError:
                raise VersionUnavailable(f"the segment {segment} was removed") from None
        return self._segments[segment]

    async def _detach(self, segment: str) -> None:
        known = self._segments.pop(segment)
        known.reader.close()
        for buffer in known.buffers.values():
            await buffer.drop()


def _buffer(segment: _Segment, slot: int, part: Range) -> RDMABuffer:
    if (slot, part) not in segment.buffers:
        start, nbytes = part
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RDMATcpFallbackWarning)  # the choice was logged when the puller started
            segment.buffers[slot, part] = RDMABuffer(segment.peer.slot_bytes(slot)[start : start + nbytes])
    return segment.buffers[slot, part]
