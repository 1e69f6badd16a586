"""A version that several processes write together: each its own shards, none the whole model.

    every rank   say which pieces it holds           (once)
    leader       take the oldest slot of its host's segment
    every rank   write its pieces into it
    every rank   digest a share of the segment's tensors
    leader       combine the digests into the fingerprint, commit

The ranks of one host share one segment, which the first of them, its leader, makes and owns. On one host it holds
whole tensors, as if one process had published; on several, each segment holds the pieces of its host. The ranks talk
by one means: everybody says something and hears what everybody said (`Exchange`). All that one of them has to say goes
through it, an error included, so that no rank waits for one that has given up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from forgelite.errors import WeightError, WeightMismatch
from forgelite.weights.arena_peer import ArenaPeer
from forgelite.weights.arena_writer import ArenaWriter, Writing
from forgelite.weights.fingerprint import combine, tensor_digest
from forgelite.weights.manifest import Manifest, StoredPiece, TensorInfo, check_tensors, shorten
from forgelite.weights.pieces import Piece, assign, copy_overlap, held_piece, local_part, whole
from forgelite.weights.stored_pieces import entry_name, segment_tensors

T = TypeVar("T")

Exchange = Callable[[Any], list[Any]]  # a collective: gives what every rank said, by rank
Draw = Callable[[], Iterable[tuple[str, torch.Tensor]]]  # (name, plain or distributed tensor), the same at every call


@dataclass(kw_only=True, slots=True, frozen=True)
class Word:
    """What a rank says to the others.

    Example: `Word(said=("/dev/shm/forgelite-toy-47-9c1d02ab.weights", 2))`.
    """

    said: Any = None
    error: str | None = None  # what it raised, instead


@dataclass(kw_only=True, slots=True, frozen=True)
class Plan:
    """Who writes which pieces, and where.

    Example: rank 1 of two on one host, each with half of the rows: `Plan(mine=(lower_half,), on_host=(all_rows,),
    leader=0, seat=1, seats=2)`.
    """

    mine: tuple[Piece, ...]  # what this rank writes
    on_host: tuple[Piece, ...]  # what the segment of its host holds
    leader: int  # rank that owns that segment
    seat: int  # this rank's number among those of its host
    seats: int


class ShardedPublisher:
    """One rank's end. `publish` is a collective: all ranks call it, with the same arguments.

    Example, on each rank: `ShardedPublisher(rank=0, exchange=exchange, host="a", run_id="toy").publish(8, infos,
    lambda: model.state_dict().items())`.
    """

    def __init__(
        self,
        *,
        rank: int,
        exchange: Exchange,
        host: str,
        run_id: str,
        folder: Path,
        retain: int = 2,
        served_in_place: int = 0,
        fingerprint: bool = True,
        timeout_s: float = 120.0,
        carrier: Literal["shm", "rdma"] = "shm",
    ) -> None:
        """
        Args:
            rank: of this process.
            exchange: how the ranks talk; it must fail on all ranks when one of them dies.
            host: ranks that say the same share memory.
            run_id, folder, retain, served_in_place, fingerprint, timeout_s: as for `WeightStore`.
            carrier: shm: readers are on this host, and all ranks too; rdma: the manifest names pieces for others.
        """
        self._rank = rank
        self._exchange = exchange
        self._host = host
        self._run_id = run_id
        self._folder = folder
        self._retain = retain
        self._served_in_place = served_in_place
        self._fingerprint = fingerprint
        self._timeout_s = timeout_s
        self._carrier = carrier
        self._writer: ArenaWriter | None = None
        self._peer: ArenaPeer | None = None
        self._plan: Plan | None = None
        self._infos: tuple[TensorInfo, ...] = ()
        self._by_host: list[tuple[str, tuple[Piece, ...]]] = []  # what each host's segment holds
        self._closed = False

    def publish(self, version: int, infos: Sequence[TensorInfo], draw: Draw) -> Manifest:
        """Write this rank's pieces of `version`; return when the version is whole on every host.

        Args:
            version: completed optimizer steps; must rise from call to call.
            infos: names, shapes and dtypes of the whole tensors, in the order in which they are published.
                Tensors of another dtype are cast while they are copied.
            draw: gives every tensor of which this rank holds a part, one after the other. It may be a collective;
                it is called once, the first time twice, and nothing that it gives is kept.

        Returns:
            The manifest, on every rank.

        Raises:
            WeightError: a rank failed; its error is in the message, on every rank. What was published before is
                whole.
            WeightMismatch: the pieces of all ranks do not make up the whole tensors.
        """
        if self._closed:
            raise WeightError(f"the weight publisher of run {self._run_id} is closed")
        try:
            self._agree_on(version)
            if self._plan is None or self._infos != tuple(infos):
                self._plan, self._infos = self._planned(infos, draw), tuple(infos)
            return self._publish(self._plan, version, draw)
        finally:
            if self._closed and self._writer is not None:
                self._writer.close()

    def versions(self) -> list[int]:
        """The versions that are whole in this host's segment, oldest first; empty on all ranks but its leader."""
        return self._writer.versions() if self._writer is not None else []

    def close(self) -> None:
        """Remove the segment, on the rank that owns it. May be called twice."""
        self._closed = True
        self._peer = None
        if self._writer is not None:
            self._writer.close()

    def _agree_on(self, version: int) -> None:
        versions = sorted(set(self._together(lambda: version)))
        if len(versions) > 1:
            raise WeightError(f"the ranks want to publish different versions: {versions}")

    def _planned(self, infos: Sequence[TensorInfo], draw: Draw) -> Plan:
        heard = self._together(lambda: (self._host, tuple(infos), _held(draw)))
        if any(said != tuple(infos) for _, said, _ in heard):
            raise WeightMismatch("the ranks do not describe the same whole tensors")
        hosts = [host for host, _, _ in heard]
        if self._carrier == "shm" and len(set(hosts)) > 1:
            raise WeightError(f"the ranks run on {sorted(set(hosts))}, which share no memory: set weights.carrier=rdma")
        written = assign(infos, [held for _, _, held in heard])
        ranks = [rank for rank, host in enumerate(hosts) if host == self._host]
        if len(set(hosts)) == 1:
            self._by_host = [(self._host, tuple(whole(info) for info in infos))]
        else:
            self._by_host = [
                (
                    host,
                    tuple(
                        sorted(piece for rank, pieces in enumerate(written) if hosts[rank] == host for piece in pieces)
                    ),
                )
                for host in dict.fromkeys(hosts)  # in the order of their leaders
            ]
        return Plan(
            mine=tuple(written[self._rank]),
            on_host=dict(self._by_host)[self._host],
            leader=ranks[0],
            seat=ranks.index(self._rank),
            seats=len(ranks),
        )

    def _publish(self, plan: Plan, version: int, draw: Draw) -> Manifest:
        leads = plan.leader == self._rank
        with contextlib.ExitStack() as lease:
            opened: list[Writing] = []
            places = self._together(lambda: self._open(plan, version, lease, opened) if leads else None)
            path, slot = places[plan.leader]
            self._together(lambda: self._write(plan, path, slot, draw))
            digests = self._together(lambda: self._digests(plan, slot))
            here = {name: digest for host, known in digests if host == self._host for name, digest in known.items()}
            committed = self._together(lambda: self._commit(opened[0], here, lease) if leads else None)
        segments = [segment for segment in committed if segment is not None]
        if self._carrier == "shm":
            return segments[0][0]
        everywhere = {name: digest for _, known in digests for name, digest in known.items()}
        return self._over_hosts(version, segments, everywhere)

    def _commit(
        self, writing: Writing, digests: Mapping[str, int], lease: contextlib.ExitStack
    ) -> tuple[Manifest, dict[str, int]]:
        """As the leader: make the version whole; gives its manifest, and where each tensor lies in its slot."""
        manifest = writing.commit(digests if self._fingerprint else None)
        lease.close()  # now, and not when all have heard: who hears of the version may read it at once
        assert self._writer is not None
        return manifest, {entry.info.name: entry.offset for entry in self._writer.layout.entries}

    def _over_hosts(
        self, version: int, segments: Sequence[tuple[Manifest, dict[str, int]]], digests: Mapping[str, int]
    ) -> Manifest:
        entries = [info for manifest, _ in segments for info in manifest.tensors]
        return Manifest(
            version=version,
            carrier="rdma",
            segment=segments[0][0].segment,
            tensors=self._infos,
            nbytes=sum(manifest.nbytes for manifest, _ in segments),
            fingerprint=combine(entries, digests) if self._fingerprint else None,
            pieces=tuple(
                StoredPiece(
                    name=piece.name,
                    start=piece.start,
                    shape=piece.shape,
                    host=host,
                    segment=manifest.segment,
                    offset=offsets[entry_name(piece, is_whole=piece.name in offsets)],
                )
                for (host, pieces), (manifest, offsets) in zip(self._by_host, segments, strict=True)
                for piece in pieces
            ),
        )

    def _open(self, plan: Plan, version: int, lease: contextlib.ExitStack, opened: list[Writing]) -> tuple[Path, int]:
        """As the leader: take the oldest slot until `lease` ends; gives the segment and the slot."""
        stand_ins = segment_tensors(plan.on_host, self._infos)
        if self._writer is None:
            self._writer = ArenaWriter.create(
                stand_ins,
                folder=self._folder,
                run_id=self._run_id,
                slots=self._retain + 1 + self._served_in_place,
                retained=self._retain,
                fingerprinted=self._fingerprint,
            )
        check_tensors(self._writer.layout.infos, stand_ins, owner="the first version of this run")
        opened.append(lease.enter_context(self._writer.writing(version, timeout_s=self._timeout_s)))
        return self._writer.path, opened[0].slot

    @torch.no_grad()
    def _write(self, plan: Plan, path: Path, slot: int, draw: Draw) -> None:
        if self._peer is None or self._peer.path != path:
            self._peer = ArenaPeer(path)
        views = self._peer.views(slot)
        places = {piece.name: [] for piece in plan.on_host}
        for piece in plan.on_host:
            places[piece.name].append((piece, views[entry_name(piece, is_whole=piece.name in views)]))
        left = set(plan.mine)
        for name, tensor in draw():
            piece = held_piece(name, tensor)
            if piece not in left:
                continue  # nothing of it is here, or another rank writes it
            left.discard(piece)
            for place, view in places[name]:
                copy_overlap(piece, local_part(tensor.detach()), place, view)
        if left:
            raise WeightMismatch(f"draw did not give {shorten(str(piece) for piece in sorted(left))} again")

    def _digests(self, plan: Plan, slot: int) -> tuple[str, dict[str, int]]:
        """This host, and the digests of this rank's share of the tensors in its segment."""
        assert self._peer is not None
        if not self._fingerprint:
            return self._host, {}
        views = list(self._peer.views(slot).items())
        return self._host, {name: tensor_digest(view) for name, view in views[plan.seat :: plan.seats]}

    def _together(self, act: Callable[[], T]) -> list[T]:
        """Do something on every rank; give what each has to say, or raise on all when one has raised."""
        error: Exception | None = None
        try:
            word = Word(said=act())
        except Exception as caught:  # goes to all ranks, this one included
            error, word = caught, Word(error=f"{type(caught).__name__}: {caught}")
        try:
            words = self._exchange(word)
        except BaseException:
            self._closed = True  # a rank that cannot be reached may still write into the slot: it is not used again
            raise
        if error is not None:
            raise error
        for rank, heard in enumerate(words):
            if heard.error is not None:
                raise WeightError(f"rank {rank} could not publish its part: {heard.error}")
        return [heard.said for heard in words]


def _held(draw: Draw) -> frozenset[Piece]:
    pieces = (held_piece(name, tensor) for name, tensor in draw())
    return frozenset(piece for piece in pieces if piece is not None)
