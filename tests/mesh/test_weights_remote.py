"""A source and a puller in processes of their own, on one host: RDMA by its TCP fallback."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch
from monarch.actor import default_bootstrap_cmd, this_host

from forgelite.errors import VersionUnavailable, WeightError, WeightMismatch
from forgelite.weights import SHARED_MEMORY, WeightStore, reclaim, torchstore_environment
from forgelite.weights.manifest import Manifest, describe
from forgelite.weights.remote import RemoteStore
from forgelite.weights.remote_puller import PullerSetup, WeightPuller
from forgelite.weights.remote_source import WeightSource
from tests.unit.test_weights_sharding import Ranks
from tests.unit.weights_memory import MemoryDirectory, awkward_tensors, same_bits

pytestmark = pytest.mark.asyncio(loop_scope="module")

RUN = f"remote-{os.getpid()}"
PULLED = f"pulled-{os.getpid()}"


@dataclasses.dataclass(kw_only=True, slots=True)
class Stage:
    """A source each for the hosts `a` and `b`, and the processes in which pullers are made."""

    sources: dict[str, Any]
    processes: Any

    async def puller(self, **options: Any) -> Any:
        setup = {
            "sources": self.sources,
            "run_id": PULLED,
            "folder": str(SHARED_MEMORY),
            "retain": 2,
            "timeout_s": 20.0,
        }
        name = f"puller{next(_NUMBERS)}"
        puller = self.processes.spawn(name, WeightPuller)
        await puller.setup.call_one(PullerSetup(**(setup | options)))
        return puller


_NUMBERS = iter(range(1000))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage() -> AsyncIterator[Stage]:
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["", os.getcwd()])} | torchstore_environment()
    procs = this_host().spawn_procs(
        per_host={"procs": 1}, bootstrap_command=lambda _: default_bootstrap_cmd().with_env(environment)
    )
    sources = {}
    for host in ("a", "b"):
        sources[host] = procs.spawn(f"source_{host}", WeightSource)
        await sources[host].ready.call()  # two actors that import at the same time would trip over one another
    yield Stage(sources=sources, processes=procs)
    await procs.stop()
    reclaim(SHARED_MEMORY, PULLED)


@pytest.fixture
def directory() -> MemoryDirectory:
    return MemoryDirectory()


@pytest_asyncio.fixture(loop_scope="module")
async def trainer(directory: MemoryDirectory) -> AsyncIterator[RemoteStore]:
    local = WeightStore(directory=directory, run_id=RUN)
    store = RemoteStore(local=local, directory=directory, host="a", puller=None, timeout_s=20.0)
    yield store
    store.close()


def policy_of(puller: Any, directory: MemoryDirectory) -> RemoteStore:
    local = WeightStore(directory=directory, run_id=RUN)
    return RemoteStore(local=local, directory=directory, host="b", puller=puller, timeout_s=20.0)


@pytest_asyncio.fixture(loop_scope="module")
async def policy(stage: Stage, directory: MemoryDirectory) -> AsyncIterator[RemoteStore]:
    puller = await stage.puller()
    store = policy_of(puller, directory)
    yield store
    store.close()
    await puller.close.call()


def filled(version: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((300, 40), float(version)), "b": torch.full((5,), version, dtype=torch.int32)}


async def test_what_one_host_publishes_another_fetches_bit_by_bit(trainer: RemoteStore, policy: RemoteStore) -> None:
    tensors = awkward_tensors()
    await trainer.publish(4, tensors)
    into = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in tensors.items()}
    found = await policy.fetch(4, into)
    assert all(same_bits(into[name], tensors[name]) for name in tensors)
    assert found.carrier == "shm"
    assert found.segment != (await policy.latest()).segment
    assert found.fingerprint == (await policy.latest()).fingerprint


async def test_versions_are_pulled_one_after_the_other_and_the_last_stay_here(
    trainer: RemoteStore, policy: RemoteStore
) -> None:
    for version in range(1, 8):
        await trainer.publish(version, filled(version))
        async with policy.lease(version) as views:
            assert torch.equal(views["a"], filled(version)["a"])
    manifest = await policy.latest()
    assert manifest.version == 7
    assert {(piece.name, piece.host) for piece in manifest.pieces} == {("a", "a"), ("b", "a")}


async def test_a_version_that_is_here_is_not_pulled_again(trainer: RemoteStore, policy: RemoteStore) -> None:
    manifest = await trainer.publish(1, filled(1))
    await policy.fetch(manifest, filled(0))
    trainer.close()  # nothing can be pulled any more
    into = filled(0)
    await policy.fetch(manifest, into)
    assert torch.equal(into["a"], filled(1)["a"])


async def test_a_version_that_is_gone_is_an_error_and_the_next_one_works(
    trainer: RemoteStore, policy: RemoteStore
) -> None:
    gone = await trainer.publish(1, filled(1))
    for version in (2, 3, 4):
        await trainer.publish(version, filled(version))
    with pytest.raises(VersionUnavailable, match="version 1 is not in"):
        await policy.fetch(gone, filled(0))
    into = filled(0)
    await policy.fetch(4, into)
    assert torch.equal(into["b"], filled(4)["b"])


async def test_what_arrives_otherwise_than_it_was_published_is_an_error(
    trainer: RemoteStore, policy: RemoteStore
) -> None:
    manifest = await trainer.publish(1, filled(1))
    with pytest.raises(WeightMismatch, match="0000000000000000 was published"):
        await policy.fetch(dataclasses.replace(manifest, fingerprint="0" * 16), filled(0))
    await policy.fetch(manifest, filled(0))


async def test_a_new_publisher_that_repeats_a_number_is_not_mistaken_for_the_old_one(
    trainer: RemoteStore, policy: RemoteStore, directory: MemoryDirectory
) -> None:
    await policy.fetch(await trainer.publish(3, filled(3)), filled(0))
    trainer.close()
    local = WeightStore(directory=directory, run_id=RUN)
    successor = RemoteStore(local=local, directory=directory, host="a", puller=None, timeout_s=20.0)
    into = filled(0)
    await policy.fetch(await successor.publish(2, filled(20)), into)
    assert torch.equal(into["a"], filled(20)["a"])
    successor.close()


async def test_a_host_without_a_source_is_an_error_with_its_name(trainer: RemoteStore, stage: Stage) -> None:
    puller = await stage.puller(sources={"b": stage.sources["b"]})
    manifest = await trainer.publish(1, filled(1))
    with pytest.raises(WeightError, match=r"lies on \['a'\], and sources run on \['b'\]"):
        await policy_of(puller, MemoryDirectory()).fetch(manifest, filled(0))


@pytest.mark.parametrize("request_bytes", [64, 1 << 20])
async def test_pieces_of_two_hosts_are_one_version_here(stage: Stage, request_bytes: int, monkeypatch) -> None:
    """Columns, so that the pieces are no runs of the whole tensor."""
    from forgelite.weights import sharding
    from forgelite.weights.pieces import Piece

    columns = [torch.arange(40.0).view(10, 4)[:, :3], torch.arange(40.0).view(10, 4)[:, 3:]]

    def held_piece(name: str, tensor: torch.Tensor) -> Piece:
        return Piece(name=name, start=(0, 0 if tensor.shape[1] == 3 else 3), shape=tuple(tensor.shape))

    monkeypatch.setattr(sharding, "held_piece", held_piece)
    ranks = Ranks(("a", "b"), carrier="rdma")
    manifest, _ = ranks.publish(1, describe({"w": torch.empty(10, 4)}), {"w": columns[0]}, {"w": columns[1]})
    puller = await stage.puller(request_bytes=request_bytes)
    into = {"w": torch.zeros(10, 4)}
    await policy_of(puller, MemoryDirectory()).fetch(manifest, into)
    assert torch.equal(into["w"], torch.arange(40.0).view(10, 4))
    ranks.close()
    await puller.close.call()


async def test_two_readers_of_a_host_pull_once(trainer: RemoteStore, stage: Stage) -> None:
    puller = await stage.puller()
    manifest = await trainer.publish(1, filled(1))
    first, second = (puller.pull.call_one(manifest) for _ in range(2))
    assert isinstance(here := await first, Manifest)
    assert here == await second
    await puller.close.call()


async def test_an_offered_version_is_not_overwritten_until_it_is_released(stage: Stage) -> None:
    store = WeightStore(directory=MemoryDirectory(), run_id=RUN, retain=1, timeout_s=0.2)
    manifest = await store.publish(1, filled(1))
    offer = await stage.sources["a"].offer.call_one(manifest.segment, 1, ((0, 64),), 60.0)
    await store.publish(2, filled(2))
    with pytest.raises(WeightError, match="lease"):
        await store.publish(3, filled(3))
    assert await stage.sources["a"].release.call_one(offer.lease) is True
    await store.publish(3, filled(3))
    store.close()


async def test_the_lease_of_a_reader_that_is_gone_ends_by_itself(stage: Stage) -> None:
    store = WeightStore(directory=MemoryDirectory(), run_id=RUN, retain=1, timeout_s=20.0)
    manifest = await store.publish(1, filled(1))
    offer = await stage.sources["a"].offer.call_one(manifest.segment, 1, ((0, 64),), 0.3)
    await store.publish(2, filled(2))
    await store.publish(3, filled(3))  # waits for the lease
    assert await stage.sources["a"].release.call_one(offer.lease) is False
    store.close()
