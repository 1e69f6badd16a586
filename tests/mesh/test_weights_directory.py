from __future__ import annotations

import dataclasses
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from monarch.actor import ActorError, default_bootstrap_cmd, this_host, this_proc

from forgelite.errors import VersionUnavailable, WeightError
from forgelite.weights import (
    Manifest,
    TensorInfo,
    TorchstoreDirectory,
    start_directory,
    stop_directory,
    torchstore_environment,
)
from forgelite.weights.torchstore_compat import load_torchstore
from tests.mesh.weights_actors import WeightActor

DIRECTORY = "test-directory"

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclasses.dataclass(kw_only=True, slots=True)
class Stage:
    """One started directory, a publisher and a reader."""

    directory: TorchstoreDirectory
    trainer: Any
    policy: Any


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage() -> AsyncIterator[Stage]:
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["", os.getcwd()])}
    environment.update(torchstore_environment())
    directory = await start_directory(this_proc(), name=DIRECTORY)
    procs = this_host().spawn_procs(
        per_host={"procs": 2}, bootstrap_command=lambda _: default_bootstrap_cmd().with_env(environment)
    )
    actors = procs.spawn("weights", WeightActor, DIRECTORY)
    yield Stage(directory=directory, trainer=actors.slice(procs=0), policy=actors.slice(procs=1))
    await actors.close.call()
    await procs.stop()
    await stop_directory(DIRECTORY)


def manifest(version: int) -> Manifest:
    return Manifest(
        version=version,
        carrier="shm",
        segment="/nowhere",
        tensors=(TensorInfo(name="model.a/b", shape=(2, 0), dtype="bfloat16"),),
        nbytes=7,
        fingerprint="0123456789abcdef",
    )


async def test_what_one_process_publishes_another_fetches_by_number(stage: Stage) -> None:
    published = await stage.trainer.publish.call_one(1)
    assert await stage.policy.latest.call_one() == published
    assert await stage.policy.fetch.call_one(1) == 1.0


async def test_a_committed_version_can_be_fetched_by_its_manifest_before_it_is_announced(
    stage: Stage,
) -> None:
    committed = await stage.trainer.commit.call_one(2)
    assert await stage.policy.fetch.call_one(committed) == 2.0
    with pytest.raises(ActorError) as caught:
        await stage.policy.known.call_one(DIRECTORY, 2)
    assert type(caught.value.exception) is VersionUnavailable
    await stage.trainer.announce.call_one(committed)
    assert (await stage.policy.latest.call_one()).version == 2


async def test_the_directory_forgets_what_was_overwritten(stage: Stage) -> None:
    for version in (3, 4, 5):
        await stage.trainer.publish.call_one(version)
    for version in (1, 2):
        with pytest.raises(VersionUnavailable, match=f"version {version}"):
            await stage.directory.get(version)
    assert [await stage.policy.fetch.call_one(version) for version in (3, 4, 5)] == [3.0, 4.0, 5.0]


async def test_a_manifest_comes_out_of_torchstore_as_it_went_in(stage: Stage) -> None:
    await stage.directory.put_manifest(100, manifest(100))
    assert await stage.directory.get(100) == manifest(100)
    assert await stage.policy.known.call_one(DIRECTORY, 100) == manifest(100)


async def test_latest_moves_after_the_version_is_there(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    torchstore = load_torchstore()
    put = torchstore.put
    seen: list[tuple[str, int, bool]] = []

    async def look_and_put(key: str, value: Manifest, store_name: str) -> None:
        there = await torchstore.exists("version.102", store_name)
        seen.append((key, (await stage.directory.latest()).version, there))
        await put(key, value, store_name)

    await stage.directory.put_manifest(101, manifest(101))
    monkeypatch.setattr(torchstore, "put", look_and_put)
    await stage.directory.put_manifest(102, manifest(102))
    assert seen == [("version.102", 101, False), ("latest", 101, True)]
    assert (await stage.directory.latest()).version == 102


async def test_a_dropped_version_is_unavailable_and_dropping_it_again_does_nothing(stage: Stage) -> None:
    await stage.directory.put_manifest(103, manifest(103))
    await stage.directory.put_manifest(104, manifest(104))
    await stage.directory.drop(103)
    await stage.directory.drop(103)
    with pytest.raises(VersionUnavailable, match="version 103 was never announced, or has been dropped"):
        await stage.directory.get(103)


async def test_a_directory_that_was_never_started_is_an_error_and_not_an_absence(stage: Stage) -> None:
    nowhere = TorchstoreDirectory(name="never-started")
    with pytest.raises(WeightError, match="weight directory never-started: attach failed") as caught:
        await nowhere.attach()
    assert not isinstance(caught.value, VersionUnavailable)


async def test_an_empty_directory_has_no_latest(stage: Stage) -> None:
    empty = await start_directory(this_proc(), name="empty")
    with pytest.raises(VersionUnavailable, match="no version has been announced yet"):
        await empty.latest()
    await stop_directory("empty")


async def test_a_stopped_directory_is_an_error_and_not_an_absence_for_who_has_used_it(stage: Stage) -> None:
    stopped = await start_directory(this_proc(), name="stopped")
    await stopped.put_manifest(1, manifest(1))
    assert await stage.policy.known.call_one("stopped", 1) == manifest(1)
    await stop_directory("stopped")
    with pytest.raises(ActorError) as caught:
        await stage.policy.known.call_one("stopped", 1)
    assert type(caught.value.exception) is WeightError
