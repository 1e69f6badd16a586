"""Several ranks that publish together, as threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from forgelite.errors import WeightError, WeightMismatch
from forgelite.weights import SHARED_MEMORY, sharding
from forgelite.weights.arena_reader import ArenaReader
from forgelite.weights.fingerprint import fingerprint_of
from forgelite.weights.manifest import Manifest, describe
from forgelite.weights.pieces import Piece
from forgelite.weights.sharding import ShardedPublisher
from tests.unit.weights_memory import awkward_tensors, own_segments, same_bits

RANKS = 2


class Table:
    """Where the ranks say and hear everything; a rank that does not come breaks it for all."""

    def __init__(self) -> None:
        self._said: list[Any] = [None] * RANKS
        self._meet = threading.Barrier(RANKS, timeout=20)

    def exchange(self, rank: int) -> Callable[[Any], list[Any]]:
        def say(value: Any) -> list[Any]:
            self._said[rank] = value
            self._meet.wait()
            heard = list(self._said)
            self._meet.wait()
            return heard

        return say

    def leave(self) -> None:
        self._meet.abort()


class Ranks:
    """Two publishers, called at the same time."""

    def __init__(self, hosts: tuple[str, ...] = ("a", "a"), carrier: Literal["shm", "rdma"] = "shm") -> None:
        self.table = Table()
        self.publishers = [
            ShardedPublisher(
                rank=rank,
                exchange=self.table.exchange(rank),
                host=host,
                run_id="test",
                folder=SHARED_MEMORY,
                carrier=carrier,
            )
            for rank, host in enumerate(hosts)
        ]
        self._threads = ThreadPoolExecutor(RANKS)

    def publish(self, version: int, infos: Any, *held: dict[str, torch.Tensor]) -> list[Manifest]:
        calls = [
            self._threads.submit(publisher.publish, version, infos, lambda tensors=tensors: tensors.items())
            for publisher, tensors in zip(self.publishers, held, strict=True)
        ]
        return [call.result() for call in calls]

    def close(self) -> None:
        for publisher in self.publishers:
            publisher.close()
        self._threads.shutdown()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()
    assert own_segments() == []


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain tensor named `w` is half of the rows: those of its rank, which its first element says."""
    plain = sharding.held_piece

    def held_piece(name: str, tensor: torch.Tensor) -> Piece | None:
        if name != "w":
            return plain(name, tensor)
        return Piece(name="w", start=(2 * int(tensor[0, 0] >= 100), 0), shape=(2, 3))

    monkeypatch.setattr(sharding, "held_piece", held_piece)


def half(rank: int, version: int) -> torch.Tensor:
    return torch.full((2, 3), 100.0 * rank + version)


W = describe({"w": torch.empty(4, 3)})


def test_tensors_that_all_ranks_hold_come_out_bit_by_bit_and_each_is_written_by_one(ranks: Ranks) -> None:
    tensors = awkward_tensors()
    manifest, other = ranks.publish(3, describe(tensors), tensors, tensors)
    assert other == manifest
    reader = ArenaReader(manifest.segment)
    with reader.lease(3) as (_, views):
        assert views.keys() == tensors.keys()
        assert all(same_bits(views[name], tensors[name].detach().resolve_conj()) for name in tensors)
    reader.close()


@pytest.mark.usefixtures("halves")
def test_halves_of_two_ranks_are_one_tensor_in_one_segment(ranks: Ranks) -> None:
    for version in (1, 2, 5):
        manifest, _ = ranks.publish(version, W, {"w": half(0, version)}, {"w": half(1, version)})
    assert len(own_segments()) == 1
    reader = ArenaReader(manifest.segment)
    with reader.lease(5) as (_, views):
        assert torch.equal(views["w"], torch.cat([half(0, 5), half(1, 5)]))
    reader.close()


@pytest.mark.usefixtures("halves")
def test_two_hosts_have_a_segment_each_with_their_own_pieces() -> None:
    ranks = Ranks(("a", "b"), carrier="rdma")
    manifest, _ = ranks.publish(1, W, {"w": half(0, 1)}, {"w": half(1, 1)})
    assert manifest.tensors == W
    assert manifest.carrier == "rdma"
    assert [(piece.host, piece.start, piece.shape) for piece in manifest.pieces] == [
        ("a", (0, 0), (2, 3)),
        ("b", (2, 0), (2, 3)),
    ]
    for rank, piece in enumerate(manifest.pieces):
        reader = ArenaReader(Path(piece.segment))
        with reader.lease(1) as (_, views):
            assert torch.equal(next(iter(views.values())), half(rank, 1))
        reader.close()
    ranks.close()


@pytest.mark.usefixtures("halves")
def test_the_fingerprint_over_two_hosts_is_that_of_their_pieces() -> None:
    ranks = Ranks(("a", "b"), carrier="rdma")
    manifest, _ = ranks.publish(1, W, {"w": half(0, 1)}, {"w": half(1, 1)})
    pieces = {"w[0:2,0:3]": half(0, 1), "w[2:4,0:3]": half(1, 1)}
    assert manifest.fingerprint == fingerprint_of(pieces)
    ranks.close()


@pytest.mark.usefixtures("halves")
def test_tensors_are_cast_while_they_are_written(ranks: Ranks) -> None:
    infos = describe({"w": torch.empty(4, 3, dtype=torch.bfloat16)})
    manifest, _ = ranks.publish(1, infos, {"w": half(0, 1)}, {"w": half(1, 1)})
    reader = ArenaReader(manifest.segment)
    with reader.lease(1) as (_, views):
        assert torch.equal(views["w"], torch.cat([half(0, 1), half(1, 1)]).bfloat16())
    reader.close()


@pytest.mark.usefixtures("halves")
def test_a_rank_that_fails_in_the_middle_commits_nothing_and_all_ranks_hear_why(ranks: Ranks) -> None:
    manifest, _ = ranks.publish(1, W, {"w": half(0, 1)}, {"w": half(1, 1)})
    ours, other = ranks.publishers

    def break_off() -> Iterator[tuple[str, torch.Tensor]]:
        yield from ()
        raise RuntimeError("the cable is cut")

    threads = ThreadPoolExecutor(RANKS)
    calls = [
        threads.submit(ours.publish, 2, W, lambda: {"w": half(0, 2)}.items()),
        threads.submit(other.publish, 2, W, break_off),
    ]
    with pytest.raises(WeightError, match="rank 1 could not publish its part: RuntimeError: the cable is cut"):
        calls[0].result()
    with pytest.raises(RuntimeError, match="the cable is cut"):
        calls[1].result()
    reader = ArenaReader(manifest.segment)
    assert reader.versions() == [1]
    ranks.publish(3, W, {"w": half(0, 3)}, {"w": half(1, 3)})
    assert reader.versions() == [1, 3]
    reader.close()


@pytest.mark.usefixtures("halves")
def test_after_the_loss_of_a_rank_nothing_is_published_any_more(ranks: Ranks) -> None:
    manifest, _ = ranks.publish(1, W, {"w": half(0, 1)}, {"w": half(1, 1)})
    reader = ArenaReader(manifest.segment)
    ranks.table.leave()
    with pytest.raises(threading.BrokenBarrierError):
        ranks.publishers[0].publish(2, W, lambda: {"w": half(0, 2)}.items())
    assert reader.versions() == [1]
    reader.close()
    with pytest.raises(WeightError, match="closed"):
        ranks.publishers[0].publish(3, W, lambda: {"w": half(0, 3)}.items())


@pytest.mark.usefixtures("halves")
def test_a_missing_half_is_an_error_that_says_how_much_is_there(ranks: Ranks) -> None:
    with pytest.raises(WeightMismatch, match="w: the ranks hold 6 of its 12 elements"):
        ranks.publish(1, W, {"w": half(0, 1)}, {"w": half(0, 1)})


@pytest.mark.usefixtures("halves")
def test_ranks_at_different_versions_are_an_error(ranks: Ranks) -> None:
    threads = ThreadPoolExecutor(RANKS)
    calls = [
        threads.submit(publisher.publish, rank, W, lambda rank=rank: {"w": half(rank, 1)}.items())
        for rank, publisher in enumerate(ranks.publishers)
    ]
    for call in calls:
        with pytest.raises(WeightError, match=r"different versions: \[0, 1\]"):
            call.result()


@pytest.mark.usefixtures("halves")
def test_a_version_that_does_not_rise_is_an_error_on_every_rank(ranks: Ranks) -> None:
    ranks.publish(2, W, {"w": half(0, 2)}, {"w": half(1, 2)})
    with pytest.raises(WeightError, match="cannot publish version 2 after version 2"):
        ranks.publish(2, W, {"w": half(0, 2)}, {"w": half(1, 2)})


@pytest.mark.usefixtures("halves")
def test_two_hosts_share_no_memory_and_shm_cannot_reach_both() -> None:
    ranks = Ranks(("a", "b"), carrier="shm")
    with pytest.raises(WeightError, match=r"run on \['a', 'b'\], which share no memory: set weights.carrier=rdma"):
        ranks.publish(1, W, {"w": half(0, 1)}, {"w": half(1, 1)})
    ranks.close()
