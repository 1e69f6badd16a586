from __future__ import annotations

import os
from pathlib import Path

import pytest

from forgelite.weights import locks, segment


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def test_a_live_owners_file_is_left_alone_half_created_or_finished(folder: Path) -> None:
    half, half_path = segment.create(folder, "run")
    whole, whole_path = segment.create(folder, "run")
    final = segment.show(whole_path)
    assert segment.reclaim(folder) == []
    assert sorted(folder.iterdir()) == sorted([half_path, final])
    os.close(half)
    os.close(whole)


def test_a_dead_owners_file_is_removed_half_created_or_finished(folder: Path) -> None:
    half, half_path = segment.create(folder, "run")
    whole, whole_path = segment.create(folder, "run")
    final = segment.show(whole_path)
    os.close(half)
    os.close(whole)
    assert sorted(segment.reclaim(folder)) == sorted([half_path, final])
    assert list(folder.iterdir()) == []


def test_only_the_files_of_one_run_are_removed_when_it_is_named(folder: Path) -> None:
    for run in ("a", "a-b"):
        descriptor, path = segment.create(folder, run)
        segment.show(path)
        os.close(descriptor)
    removed = segment.reclaim(folder, "a")
    assert [path.name.startswith("forgelite-a-b") for path in removed] == [False]
    assert [path.name.startswith("forgelite-a-b") for path in folder.iterdir()] == [True]


def test_foreign_files_are_left_alone(folder: Path) -> None:
    names = ["forgelite-run-1-0011aabb.weights.bak", "forgelite.weights", "other-run-1-0011aabb.weights"]
    for name in names:
        (folder / name).touch()
    (folder / "forgelite-run-1-0011aabb.weights").symlink_to(folder / names[0])
    assert segment.reclaim(folder) == []
    assert all((folder / name).exists() for name in names)


def test_a_file_taken_between_its_creation_and_its_lock_is_made_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Path] = []
    try_lock = locks.try_lock

    def reclaimed_first(descriptor: int, byte: int, *, exclusive: bool) -> bool:
        if not taken:
            taken.append(next(folder.iterdir()))
            assert segment.reclaim(folder) == taken
        return try_lock(descriptor, byte, exclusive=exclusive)

    monkeypatch.setattr(locks, "try_lock", reclaimed_first)
    descriptor, path = segment.create(folder, "run")
    assert path not in taken
    assert list(folder.iterdir()) == [path]
    os.close(descriptor)


@pytest.mark.parametrize("run_id", ["", "a/b", "a b", "*", "x" * 101])
def test_a_run_id_that_is_no_part_of_a_file_name_is_refused(folder: Path, run_id: str) -> None:
    with pytest.raises(ValueError, match="run id"):
        segment.create(folder, run_id)
    with pytest.raises(ValueError, match="run id"):
        segment.reclaim(folder, run_id)


def test_a_lock_conflicts_between_two_descriptors_of_one_process_and_names_its_holder(folder: Path) -> None:
    path = folder / "file"
    path.touch()
    one, two = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    assert locks.try_lock(one, 5, exclusive=False)
    assert locks.try_lock(two, 5, exclusive=False)
    assert not locks.try_lock(two, 5, exclusive=True)
    assert locks.try_lock(two, 6, exclusive=True)
    assert locks.holders(one, 5) == [os.getpid()]
    assert locks.holders(one, 7) == []
    os.close(one)
    assert locks.try_lock(two, 5, exclusive=True)
    assert not locks.is_locked(two, 5)
    os.close(two)
    assert locks.holders(os.open(path, os.O_RDONLY), 5) == []
