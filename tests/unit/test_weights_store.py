from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forgelite.errors import VersionUnavailable, WeightError, WeightMismatch
from forgelite.weights import Manifest, WeightStore
from forgelite.weights.arena_writer import ArenaWriter
from tests.unit.weights_memory import MemoryDirectory, awkward_tensors, own_segments, same_bits


def filled(version: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 4), float(version)), "b": torch.full((5,), version, dtype=torch.int32)}


@pytest.fixture
def directory() -> MemoryDirectory:
    return MemoryDirectory()


@pytest.fixture
def trainer(directory: MemoryDirectory) -> Iterator[WeightStore]:
    store = WeightStore(directory=directory, run_id="test", timeout_s=0.05)
    yield store
    store.close()


@pytest.fixture
def policy(directory: MemoryDirectory) -> Iterator[WeightStore]:
    store = WeightStore(directory=directory, run_id="test")
    yield store
    store.close()


async def test_what_is_published_is_fetched(trainer: WeightStore, policy: WeightStore) -> None:
    tensors = awkward_tensors()
    published = await trainer.publish(4, tensors)
    into = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in tensors.items()}
    assert await policy.fetch(4, into) == published == await policy.latest()
    assert all(same_bits(into[name], tensors[name]) for name in tensors)


async def test_a_fetch_fills_strided_leaves_and_inference_tensors(trainer: WeightStore, policy: WeightStore) -> None:
    tensors = {"strided": torch.randn(4, 6), "leaf": torch.randn(3), "inference": torch.randn(3)}
    await trainer.publish(1, tensors)
    with torch.inference_mode():
        inference = torch.zeros(3)
    into = {
        "strided": torch.zeros(6, 8).t()[::2],
        "leaf": torch.nn.Parameter(torch.zeros(3)),
        "inference": inference,
    }
    await policy.fetch(1, into)
    assert all(torch.equal(into[name], tensors[name]) for name in tensors)


async def test_a_lease_is_the_version_in_place(trainer: WeightStore, policy: WeightStore) -> None:
    await trainer.publish(1, filled(1))
    async with policy.lease(1) as views:
        await trainer.publish(2, filled(2))
        await trainer.publish(3, filled(3))
        assert torch.equal(views["a"], filled(1)["a"])
        with pytest.raises(WeightError, match="version 1 under a lease"):
            await trainer.publish(4, filled(4))
        assert torch.equal(views["a"], filled(1)["a"])
    await trainer.publish(4, filled(4))


async def test_the_directory_learns_a_version_after_its_commit_and_forgets_it_when_it_is_overwritten(
    trainer: WeightStore, directory: MemoryDirectory
) -> None:
    for version in (1, 2, 3, 4):
        await trainer.publish(version, filled(version))
    assert directory.calls == [("put", 1), ("put", 2), ("put", 3), ("put", 4), ("drop", 1)]


async def test_an_attached_reader_does_not_ask_the_directory(
    trainer: WeightStore, policy: WeightStore, directory: MemoryDirectory
) -> None:
    into = filled(0)
    await trainer.publish(1, filled(1))
    await policy.fetch(1, into)
    await trainer.commit(2, filled(2))
    directory.calls.clear()
    await policy.fetch(2, into)
    assert directory.calls == []
    assert torch.equal(into["a"], filled(2)["a"])


async def test_a_reader_with_the_manifest_does_not_ask_the_directory(
    trainer: WeightStore, policy: WeightStore, directory: MemoryDirectory
) -> None:
    manifest = await trainer.commit(1, filled(1))
    await policy.fetch(manifest, filled(0))
    assert directory.calls == []


@pytest.mark.parametrize("version", [5, 4], ids=["twice", "backwards"])
async def test_publishing_twice_or_backwards_is_refused(trainer: WeightStore, version: int) -> None:
    await trainer.publish(5, filled(5))
    with pytest.raises(WeightError, match=f"cannot publish version {version} after version 5"):
        await trainer.publish(version, filled(version))
    assert (await trainer.latest()).version == 5


async def test_a_failing_directory_surfaces_in_publish_and_the_next_version_can_be_published(
    trainer: WeightStore, directory: MemoryDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(version: int, manifest: object) -> None:
        raise WeightError("the directory is gone")

    with monkeypatch.context() as patch:
        patch.setattr(directory, "put_manifest", fail)
        with pytest.raises(WeightError, match="directory is gone"):
            await trainer.publish(1, filled(1))
    with pytest.raises(VersionUnavailable):
        await trainer.latest()
    await trainer.publish(2, filled(2))
    assert (await trainer.latest()).version == 2


async def test_manifests_are_announced_in_order_and_only_by_their_publisher(
    trainer: WeightStore, policy: WeightStore
) -> None:
    older = await trainer.commit(1, filled(1))
    await trainer.announce(await trainer.commit(2, filled(2)))
    with pytest.raises(WeightError, match="cannot announce version 1 after version 2"):
        await trainer.announce(older)
    with pytest.raises(WeightError, match="not committed by this store"):
        await policy.announce(older)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": None}, "missing: a"),
        ({"c": torch.zeros(1)}, "unexpected: c"),
        ({"a": torch.zeros(4, 3)}, r"wrong shape: a is \(4, 3\), not \(3, 4\)"),
        ({"b": torch.zeros(5)}, "wrong dtype: b is float32, not int32"),
    ],
    ids=["missing", "unexpected", "shape", "dtype"],
)
async def test_a_target_that_does_not_fit_is_named_and_untouched(
    trainer: WeightStore, policy: WeightStore, change: dict[str, torch.Tensor | None], message: str
) -> None:
    await trainer.publish(1, filled(1))
    into = {name: tensor for name, tensor in {**filled(0), **change}.items() if tensor is not None}
    before = {name: tensor.clone() for name, tensor in into.items()}
    with pytest.raises(WeightMismatch, match=message):
        await policy.fetch(1, into)
    assert all(torch.equal(into[name], before[name]) for name in into)


async def test_a_version_that_is_gone_or_never_came_is_unavailable(trainer: WeightStore, policy: WeightStore) -> None:
    first = await trainer.publish(1, filled(1))
    await policy.fetch(1, filled(0))
    for version in (2, 3, 4):
        await trainer.publish(version, filled(version))
    for version in (1, first, 9):
        with pytest.raises(VersionUnavailable, match=r"version [19]"):
            await policy.fetch(version, filled(0))
        with pytest.raises(VersionUnavailable, match=r"version [19]"):
            async with policy.lease(version):
                pass


async def test_a_version_of_a_closed_publisher_is_unavailable_to_newcomers(
    trainer: WeightStore, policy: WeightStore
) -> None:
    await trainer.publish(1, filled(1))
    trainer.close()
    with pytest.raises(VersionUnavailable, match=r"version 1 is gone: its segment .* was removed"):
        await policy.fetch(1, filled(0))


async def test_a_successors_version_is_read_from_the_successor(
    trainer: WeightStore, policy: WeightStore, directory: MemoryDirectory
) -> None:
    into = filled(0)
    await trainer.publish(1, filled(1))
    await policy.fetch(1, into)
    trainer.close()
    successor = WeightStore(directory=directory, run_id="test")
    await successor.publish(1, filled(100))
    await policy.fetch(1, into)
    successor.close()
    assert torch.equal(into["a"], filled(100)["a"])


def flip_a_bit(segment: str, offset: int) -> None:
    with open(segment, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


async def test_a_bit_that_flipped_in_shared_memory_is_noticed_by_fetch_and_lease(
    trainer: WeightStore, policy: WeightStore
) -> None:
    manifest = await trainer.publish(1, filled(1))
    flip_a_bit(manifest.segment, 2 * 4096 + 17)  # header page, index page, slot 0
    with pytest.raises(WeightMismatch, match=f"the publisher wrote {manifest.fingerprint}"):
        await policy.fetch(1, filled(0))
    with pytest.raises(WeightMismatch, match=f"the publisher wrote {manifest.fingerprint}"):
        async with policy.lease(1):
            pass


async def test_a_bit_that_flipped_between_the_samples_is_noticed_where_every_byte_is_compared(
    trainer: WeightStore, policy: WeightStore
) -> None:
    manifest = await trainer.publish(1, {"w": torch.zeros(1 << 17, dtype=torch.uint8)})
    flip_a_bit(manifest.segment, 2 * 4096 + 10_000)
    into = {"w": torch.ones(1 << 17, dtype=torch.uint8)}
    await policy.fetch(1, into)
    with pytest.raises(WeightMismatch, match=f"the publisher wrote {manifest.fingerprint}"):
        await policy.fetch(1, into, verify="all")
    with pytest.raises(WeightMismatch, match=f"the publisher wrote {manifest.fingerprint}"):
        async with policy.lease(1):
            pass


async def test_a_manifest_of_other_bytes_is_refused_before_a_byte_is_copied(
    trainer: WeightStore, policy: WeightStore
) -> None:
    manifest = dataclasses.replace(await trainer.publish(1, filled(1)), fingerprint="0" * 16)
    into = filled(0)
    with pytest.raises(WeightMismatch, match="not the same publication"):
        await policy.fetch(manifest, into)
    assert torch.equal(into["a"], filled(0)["a"])


async def test_without_fingerprints_nothing_is_computed_and_a_reader_that_wants_one_is_refused(
    directory: MemoryDirectory, policy: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = WeightStore(directory=directory, run_id="test", fingerprint=False)
    for module in ("arena_writer", "store"):
        monkeypatch.setattr(f"forgelite.weights.{module}.fingerprint_of", None)
    manifest = await plain.publish(1, filled(1))
    assert manifest.fingerprint is None
    into = filled(0)
    await plain.fetch(1, into)
    assert torch.equal(into["a"], filled(1)["a"])
    with pytest.raises(WeightError, match=r"set weights\.fingerprint to the same value"):
        await policy.fetch(1, into)
    plain.close()


async def test_retain_decides_how_many_versions_stay(directory: MemoryDirectory, policy: WeightStore) -> None:
    store = WeightStore(directory=directory, run_id="test", retain=2)
    store.retain(4)
    for version in range(8):
        await store.publish(version, filled(version))
    for version in (4, 5, 6, 7):
        await policy.fetch(version, filled(0))
    with pytest.raises(WeightError, match="made to retain 4 versions and cannot retain 5"):
        store.retain(5)
    store.close()


def test_retaining_nothing_is_refused(directory: MemoryDirectory) -> None:
    with pytest.raises(ValueError, match=r"weights.retain must be at least 1, not 0"):
        WeightStore(directory=directory, run_id="test", retain=0)


async def test_close_removes_the_segment_and_may_be_called_twice(trainer: WeightStore, policy: WeightStore) -> None:
    manifest = await trainer.publish(1, filled(1))
    await policy.fetch(1, filled(0))
    policy.close()
    assert [str(path) for path in own_segments()] == [manifest.segment]
    trainer.close()
    trainer.close()
    assert own_segments() == []
    for store in (trainer, policy):
        with pytest.raises(WeightError, match="store of run test is closed"):
            await store.fetch(1, filled(0))
    with pytest.raises(WeightError, match="store of run test is closed"):
        await trainer.publish(2, filled(2))


async def test_a_publish_after_a_cancelled_one_goes_into_the_same_segment(
    trainer: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    creating, second_started, go_on = threading.Event(), threading.Event(), threading.Event()
    create, write = ArenaWriter.create, trainer._write

    def create_slowly(*args: Any, **kwargs: Any) -> ArenaWriter:
        creating.set()
        go_on.wait(10)
        return create(*args, **kwargs)

    def write_and_tell(version: int, tensors: dict[str, torch.Tensor]) -> Manifest:
        if version == 2:
            second_started.set()
        return write(version, tensors)

    monkeypatch.setattr(ArenaWriter, "create", create_slowly)
    monkeypatch.setattr(trainer, "_write", write_and_tell)
    first = asyncio.ensure_future(trainer.publish(1, filled(1)))
    await asyncio.to_thread(creating.wait, 10)
    first.cancel()
    second = asyncio.ensure_future(trainer.publish(2, filled(2)))
    await asyncio.to_thread(second_started.wait, 10)
    go_on.set()
    manifest = await second
    with pytest.raises(asyncio.CancelledError):
        await first
    assert [str(path) for path in own_segments()] == [manifest.segment]


def usage() -> tuple[int, int, int]:
    """Bytes of this process's segments, its open descriptors, and its resident bytes."""
    gc.collect()
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return (
        sum(path.stat().st_size for path in own_segments()),
        len(list(Path("/proc/self/fd").iterdir())),
        resident_pages * os.sysconf("SC_PAGE_SIZE"),
    )


async def test_two_hundred_versions_need_no_more_memory_and_descriptors_than_ten(
    trainer: WeightStore, policy: WeightStore, directory: MemoryDirectory
) -> None:
    size = 4 << 20
    into = {"w": torch.zeros(size, dtype=torch.uint8)}

    async def cycles(first: int, last: int) -> tuple[int, int, int]:
        for version in range(first, last):
            await trainer.publish(version, {"w": torch.full((size,), version % 256, dtype=torch.uint8)})
            await policy.fetch(version, into)
            newcomer = WeightStore(directory=directory, run_id="test")
            await newcomer.fetch(version, into)
            newcomer.close()
        return usage()

    shared, descriptors, resident = await cycles(0, 10)
    shared_later, descriptors_later, resident_later = await cycles(10, 210)
    assert shared_later == shared
    assert descriptors_later <= descriptors + 2  # the thread pool may still hold the last newcomer's
    # The allocator keeps some. A tensor or mapping left behind every time would be 200 or 600 times `size`.
    assert resident_later - resident < 25 * size
