"""The actor that brings versions from other hosts to its own: one a host, in a process of its own.

    plan the requests (once) -> lease the version at every source -> read into the local slot, several requests
    at a time -> give the leases back -> compare the fingerprint -> commit

It owns a segment of whole tensors, from which every reader of its host is served as if the publisher were here. All the
bytes of a version cross the network once, however many readers the host has.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import Actor, ActorError, concurrent_endpoint
from monarch.rdma import RDMABuffer, get_rdma_backend

from forgelite.errors import ConfigError, ForgeliteError, WeightError, WeightMismatch
from forgelite.weights.arena_peer import ArenaPeer
from forgelite.weights.arena_writer import ArenaWriter, Writing
from forgelite.weights.fingerprint import combine, tensor_digest
from forgelite.weights.manifest import Manifest, StoredPiece, TensorInfo
from forgelite.weights.pieces import Piece, copy_overlap, whole
from forgelite.weights.remote_source import Offer
from forgelite.weights.stored_pieces import entry_name
from forgelite.weights.transfers import LocalPiece, Move, Request, plan_requests

# Measured over TCP between two network namespaces, see docs/weights.md: Monarch allocates and frees a message for every
# request, and several of a few megabytes use the same memory again and again while both ends are kept busy.
REQUEST_BYTES = 8 << 20
REQUESTS_AT_A_TIME = 8

Place = tuple[str, str]  # a host and a segment there


@dataclass(kw_only=True, slots=True, frozen=True)
class PullerSetup:
    """All that a puller is told.

    Example: `PullerSetup(sources={"a": source}, run_id="toy", folder="/dev/shm", retain=2, timeout_s=120.0)`.
    """

    sources: Mapping[str, Any]  # host -> `WeightSource` there, as a Monarch actor
    run_id: str
    folder: str  # on a memory file system of this host
    retain: int
    timeout_s: float  # deadline of one version, in seconds
    served_in_place: int = 0
    fingerprint: bool = True
    request_bytes: int = REQUEST_BYTES
    requests_at_a_time: int = REQUESTS_AT_A_TIME


@dataclass(kw_only=True, slots=True)
class _Local:
    """This host's segment, and what fills it; made anew when the publisher's segments change."""

    pieces: tuple[StoredPiece, ...]
    writer: ArenaWriter
    peer: ArenaPeer  # the same segment as bytes
    needed: list[LocalPiece]
    requests: dict[Place, list[Request]]
    versions: dict[int, tuple[Manifest, Manifest]]  # as published, and as it is here


class WeightPuller(Actor):
    """Pulls versions into shared memory of its host."""

    def __init__(self) -> None:
        self._setup: PullerSetup | None = None
        self._local: _Local | None = None
        self._turn = asyncio.Lock()

    @concurrent_endpoint
    async def setup(self, setup: PullerSetup) -> str:
        """Take the setup; returns which of Monarch's back ends will carry the bytes.

        Raises:
            ConfigError: this Monarch has none.
        """
        backend = get_rdma_backend()
        if backend == "none":
            raise ConfigError(
                "weights.carrier=rdma, but this host has no ibverbs and Monarch's TCP fallback is off "
                "(MONARCH_RDMA_ALLOW_TCP_FALLBACK)"
            )
        self._setup = setup
        return backend

    @concurrent_endpoint
    async def pull(self, manifest: Manifest) -> Manifest:
        """Bring a version here, unless it is here already; its manifest on this host.

        Raises:
            VersionUnavailable: it is gone at a source.
            WeightMismatch: what arrived is not what was published.
            WeightError: a source or the network failed, or it took too long. Versions that are here stay.
        """
        async with self._turn:
            local = self._local_for(manifest, self._ready())
            known = local.versions.get(manifest.version)
            if known is not None and known[0] == manifest and manifest.version in local.writer.versions():
                return known[1]
            here = await self._pull(local, manifest, self._ready())
            local.versions[manifest.version] = (manifest, here)
            for version in local.versions.keys() - set(local.writer.versions()):
                del local.versions[version]
            return here

    @concurrent_endpoint
    async def close(self) -> None:
        """Remove the segment. Readers keep what they have mapped."""
        self._forget()

    def _ready(self) -> PullerSetup:
        if self._setup is None:
            raise RuntimeError("the puller is not set up")
        return self._setup

    def _local_for(self, manifest: Manifest, setup: PullerSetup) -> _Local:
        if self._local is not None and self._local.pieces == manifest.pieces:
            return self._local
        self._forget()  # another life of the publisher: its versions may repeat numbers
        self._local = _local(manifest, setup)
        return self._local

    def _forget(self) -> None:
        if self._local is not None:
            self._local.writer.close()
            self._local = None

    async def _pull(self, local: _Local, manifest: Manifest, setup: PullerSetup) -> Manifest:
        reading = False
        try:
            async with asyncio.timeout(setup.timeout_s), contextlib.AsyncExitStack() as stack:
                offers = await _offers(local, manifest.version, setup)
                # The wait for local readers ends before the whole does, so it is never left in the middle.
                slot = local.writer.writing(manifest.version, timeout_s=setup.timeout_s / 2)
                writing = await asyncio.to_thread(slot.__enter__)
                stack.push(slot.__exit__)
                reading = True
                await _read(local, manifest.version, writing, offers, setup)
                reading = False
                await _release(offers, manifest.version, setup)
                return await asyncio.to_thread(_committed, manifest, writing, setup.fingerprint)
        except TimeoutError as error:
            raise WeightError(
                f"version {manifest.version} did not arrive from {sorted(setup.sources)} within "
                f"{setup.timeout_s} s (weights.timeout_s)"
            ) from error
        finally:
            if reading:  # a read that was given up may still arrive: it must not find another version in its slot
                self._forget()


async def _offers(local: _Local, version: int, setup: PullerSetup) -> dict[Place, Offer]:
    """Lease the version in every segment; a lease that is not given back ends by itself."""

    async def offer(place: Place) -> Offer:
        host, segment = place
        ranges = tuple((request.start, request.nbytes) for request in local.requests[place])
        return await _answer(setup.sources[host].offer.call_one(segment, version, ranges, setup.timeout_s), host)

    return dict(zip(local.requests, await asyncio.gather(*map(offer, local.requests)), strict=True))


async def _read(
    local: _Local, version: int, writing: Writing, offers: Mapping[Place, Offer], setup: PullerSetup
) -> None:
    """Everything that is needed, from all hosts at the same time."""
    limit = asyncio.Semaphore(setup.requests_at_a_time)
    slot = local.peer.slot_bytes(writing.slot)

    async def read(request: Request, buffer: RDMABuffer) -> None:
        async with limit:
            if request.target is None:
                into = torch.empty(request.nbytes, dtype=torch.uint8)
            else:
                into = slot[request.target : request.target + request.nbytes]
            try:
                await buffer.read_into(into, timeout=math.ceil(setup.timeout_s))
            except Exception as error:  # Monarch raises plain RuntimeErrors and ValueErrors alike
                raise WeightError(f"version {version} could not be read from host {request.host}: {error}") from error
            for move in request.moves:
                _copy_out(into, move, local.needed[move.target], writing)

    try:
        async with asyncio.TaskGroup() as group:
            for place, requests in local.requests.items():
                for request, buffer in zip(requests, offers[place].buffers, strict=True):
                    group.create_task(read(request, buffer))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors


async def _release(offers: Mapping[Place, Offer], version: int, setup: PullerSetup) -> None:
    for (host, _), offer in offers.items():
        if not await _answer(setup.sources[host].release.call_one(offer.lease), host):
            raise WeightError(
                f"version {version} was read from host {host} for longer than its lease of {setup.timeout_s} s"
            )


def _local(manifest: Manifest, setup: PullerSetup) -> _Local:
    if unknown := sorted({piece.host for piece in manifest.pieces} - setup.sources.keys()):
        raise WeightError(f"version {manifest.version} lies on {unknown}, and sources run on {sorted(setup.sources)}")
    writer = ArenaWriter.create(
        _stand_ins(manifest),
        folder=Path(setup.folder),
        run_id=setup.run_id,
        slots=setup.retain + 1 + setup.served_in_place,
        retained=setup.retain,
        fingerprinted=setup.fingerprint,
    )
    try:
        needed = [
            LocalPiece(piece=whole(entry.info), dtype=entry.info.dtype, offset=entry.offset)
            for entry in writer.layout.entries
        ]
        requests: dict[Place, list[Request]] = {}
        for request in plan_requests(manifest.pieces, needed, request_bytes=setup.request_bytes):
            requests.setdefault((request.host, request.segment), []).append(request)
        peer = ArenaPeer(writer.path)
    except BaseException:
        writer.close()
        raise
    return _Local(pieces=manifest.pieces, writer=writer, peer=peer, needed=needed, requests=requests, versions={})


def _stand_ins(manifest: Manifest) -> dict[str, torch.Tensor]:
    """Descriptions of the whole tensors, tied where they lie in the same place at the source."""
    places = {piece.name: (piece.host, piece.segment, piece.offset, piece.shape) for piece in manifest.pieces}
    elements: dict[object, torch.Tensor] = {}
    tensors = {}
    for info in manifest.tensors:
        place = places.get(info.name, info.name)
        # a piece is all of its tensor exactly when the shapes are equal
        tied = isinstance(place, tuple) and place[-1] == info.shape
        key = place if tied else info.name
        element = elements.setdefault(key, torch.empty((), dtype=getattr(torch, info.dtype)))
        tensors[info.name] = element.expand(info.shape) if 0 not in info.shape else element.new_empty(info.shape)
    return tensors


def _copy_out(buffer: torch.Tensor, move: Move, place: LocalPiece, writing: Writing) -> None:
    dtype = getattr(torch, move.dtype)
    data = buffer[move.offset : move.offset + move.piece.numel * dtype.itemsize]
    copy_overlap(move.piece, _typed(data, dtype, move.piece.shape), place.piece, writing.views[place.piece.name])


def _typed(data: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    # pieces are aligned where they lie, but a row need not start at a multiple of the element's size from the buffer's
    aligned = data if data.storage_offset() % dtype.itemsize == 0 else data.clone()
    return aligned.view(dtype).view(shape)


def _committed(manifest: Manifest, writing: Writing, fingerprint: bool) -> Manifest:
    """Compare with what was published, then commit."""
    if not fingerprint:
        return writing.commit()
    digests: dict[str, int] = {}
    infos = []
    dtypes = {info.name: info.dtype for info in manifest.tensors}
    stored = [(Piece(name=p.name, start=p.start, shape=p.shape), dtypes[p.name]) for p in manifest.pieces]
    stored += [(whole(info), info.dtype) for info in manifest.tensors if 0 in info.shape]
    for piece, dtype in stored:
        view = writing.views[piece.name]
        name = entry_name(piece, is_whole=piece.shape == tuple(view.shape))
        infos.append(TensorInfo(name=name, shape=piece.shape, dtype=dtype))
        digests[name] = tensor_digest(view[piece.slices])
    if (arrived := combine(infos, digests)) != manifest.fingerprint:
        raise WeightMismatch(f"version {manifest.version}: {manifest.fingerprint} was published, and {arrived} arrived")
    return writing.commit(digests if digests.keys() == writing.views.keys() else None)


async def _answer(call: Any, host: str) -> Any:
    try:
        return await call
    except ActorError as error:
        if isinstance(error.exception, ForgeliteError):
            raise error.exception from error
        raise WeightError(f"the weight source of host {host} failed: {error.exception}") from error
    except SupervisionError as error:
        raise WeightError(f"the weight source of host {host} died: {error}") from error
