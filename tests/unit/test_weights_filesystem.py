"""Versions as folders."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forgelite.errors import VersionUnavailable, WeightError, WeightMismatch
from forgelite.weights.carried import CarriedStore
from forgelite.weights.filesystem import WeightFolder
from tests.unit.weights_memory import awkward_tensors, same_bits


def store_in(folder: Path, **options: object) -> CarriedStore:
    weights = WeightFolder(folder)
    return CarriedStore(carrier=weights, directory=weights, **options)


def filled(version: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 4), float(version)), "b": torch.full((5,), version, dtype=torch.int32)}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".publisher")


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[CarriedStore]:
    store = store_in(tmp_path / "weights")
    yield store
    store.close()


@pytest.fixture
def policy(tmp_path: Path) -> CarriedStore:
    return store_in(tmp_path / "weights")


async def test_what_is_published_is_fetched_and_leased_bit_by_bit(trainer: CarriedStore, policy: CarriedStore) -> None:
    tensors = awkward_tensors()
    published = await trainer.publish(4, tensors)
    into = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in tensors.items()}
    assert await policy.fetch(4, into) == published == await policy.latest()
    assert all(same_bits(into[name], tensors[name]) for name in tensors)
    async with policy.lease(published) as views:
        assert list(views) == list(tensors)
        assert all(same_bits(views[name], tensors[name]) for name in tensors)
        assert views["lm_head.weight"].data_ptr() == views["model.embed/with spaces.weight"].data_ptr()


async def test_other_tools_read_the_file(trainer: CarriedStore, tmp_path: Path) -> None:
    await trainer.publish(1, filled(1))
    found = load_file(tmp_path / "weights" / "version-00000001" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in filled(1).items())


async def test_the_last_versions_stay_and_older_ones_go(trainer: CarriedStore, policy: CarriedStore, tmp_path: Path):
    for version in range(1, 6):
        await trainer.publish(version, filled(version))
    assert names_in(tmp_path / "weights") == ["latest", "version-00000004", "version-00000005"]
    with pytest.raises(VersionUnavailable, match=r"version 3 is not in .* which holds \[4, 5\]"):
        await policy.fetch(3, filled(0))


async def test_a_reader_keeps_a_version_that_is_dropped_meanwhile(trainer: CarriedStore, policy: CarriedStore) -> None:
    await trainer.publish(1, filled(1))
    async with policy.lease(1) as views:
        for version in (2, 3, 4):
            await trainer.publish(version, filled(version))
        assert all(torch.equal(views[name], tensor) for name, tensor in filled(1).items())


async def test_an_unannounced_version_is_read_by_its_manifest_and_is_not_the_latest(
    trainer: CarriedStore, policy: CarriedStore
) -> None:
    await trainer.publish(1, filled(1))
    committed = await trainer.commit(2, filled(2))
    assert (await policy.latest()).version == 1
    into = filled(0)
    await policy.fetch(committed, into)
    assert torch.equal(into["a"], filled(2)["a"])
    await trainer.announce(committed)
    assert (await policy.latest()).version == 2


async def test_an_empty_folder_has_no_latest(policy: CarriedStore) -> None:
    with pytest.raises(VersionUnavailable, match="no version has been announced"):
        await policy.latest()


async def test_a_version_that_does_not_rise_is_an_error(trainer: CarriedStore) -> None:
    await trainer.publish(2, filled(2))
    for version in (2, 1):
        with pytest.raises(WeightError, match=f"cannot publish version {version} after version 2"):
            await trainer.publish(version, filled(version))


async def test_only_one_process_publishes_in_a_folder(trainer: CarriedStore, tmp_path: Path) -> None:
    await trainer.publish(1, filled(1))
    with pytest.raises(WeightError, match="give every run a folder of its own"):
        await store_in(tmp_path / "weights").publish(2, filled(2))


async def test_a_resumed_run_takes_the_versions_of_its_former_life_away(
    trainer: CarriedStore, policy: CarriedStore, tmp_path: Path
) -> None:
    for version in (7, 8):
        await trainer.publish(version, filled(version))
    trainer.close()
    await store_in(tmp_path / "weights").publish(8, filled(80))
    into = filled(0)
    await policy.fetch(8, into)
    assert torch.equal(into["a"], filled(80)["a"])


async def test_what_a_killed_publisher_left_half_written_is_no_version_and_goes(
    trainer: CarriedStore, policy: CarriedStore, tmp_path: Path
) -> None:
    half = tmp_path / "weights" / ".version-00000009.partial"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(VersionUnavailable):
        await policy.fetch(9, filled(0))
    await trainer.publish(9, filled(9))
    assert names_in(tmp_path / "weights") == ["latest", "version-00000009"]


async def test_a_flipped_bit_is_an_error(trainer: CarriedStore, policy: CarriedStore, tmp_path: Path) -> None:
    await trainer.publish(1, filled(1))
    file = tmp_path / "weights" / "version-00000001" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(WeightMismatch, match="version 1: the publisher wrote"):
        await policy.fetch(1, filled(0))


async def test_a_cut_file_is_an_error_with_its_path(trainer: CarriedStore, policy: CarriedStore, tmp_path: Path):
    await trainer.publish(1, filled(1))
    file = tmp_path / "weights" / "version-00000001" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(WeightError, match=r"model\.safetensors cannot be read"):
        await policy.fetch(1, filled(0))


async def test_floating_point_tensors_are_cast_and_others_are_not(tmp_path: Path, policy: CarriedStore) -> None:
    trainer = store_in(tmp_path / "weights", transfer_dtype=torch.bfloat16)
    await trainer.publish(1, filled(1))
    trainer.close()
    into = {"a": torch.zeros(3, 4, dtype=torch.bfloat16), "b": torch.zeros(5, dtype=torch.int32)}
    await policy.fetch(1, into)
    assert torch.equal(into["a"], filled(1)["a"].bfloat16())


async def test_a_version_that_does_not_fit_leaves_the_reader_untouched(trainer: CarriedStore, policy: CarriedStore):
    await trainer.publish(1, filled(1))
    into = {"a": torch.zeros(3, 5), "b": torch.zeros(5, dtype=torch.int32)}
    with pytest.raises(WeightMismatch, match=r"a is \(3, 5\), not \(3, 4\)"):
        await policy.fetch(1, into)
    assert not into["b"].any()


async def test_a_full_disk_is_an_error_and_leaves_nothing(trainer: CarriedStore, tmp_path: Path, monkeypatch) -> None:
    await trainer.publish(1, filled(1))

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("forgelite.weights.filesystem.save_file", fail)
    with pytest.raises(WeightError, match=r"version 2 could not be written .* No space left"):
        await trainer.publish(2, filled(2))
    assert names_in(tmp_path / "weights") == ["latest", "version-00000001"]


async def test_a_folder_that_was_moved_is_still_read(trainer: CarriedStore, tmp_path: Path) -> None:
    await trainer.publish(1, filled(1))
    (tmp_path / "weights").rename(tmp_path / "elsewhere")
    into = filled(0)
    await store_in(tmp_path / "elsewhere").fetch(1, into)
    assert torch.equal(into["a"], filled(1)["a"])
    assert json.loads((tmp_path / "elsewhere" / "version-00000001" / "manifest.json").read_text())["version"] == 1
