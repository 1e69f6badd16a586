from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from forgelite.errors import WeightError
from forgelite.weights import WeightStore
from tests.unit.weights_memory import MemoryDirectory

pytestmark = pytest.mark.root


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    """A memory file system of 4 MiB."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path], check=True)
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


async def test_weights_that_do_not_fit_are_an_error_with_both_numbers_and_leave_no_file(
    small_memory: Path,
) -> None:
    store = WeightStore(directory=MemoryDirectory(), run_id="full", folder=small_memory)
    tensors = {"w": torch.zeros(1 << 21, dtype=torch.uint8)}
    need = 3 * (1 << 21) + 2 * 4096
    with pytest.raises(WeightError, match=f"need {need} bytes in {small_memory}, which has {1 << 22} bytes free"):
        await store.publish(1, tensors)
    assert os.listdir(small_memory) == []
    await store.publish(1, {"w": tensors["w"][: 1 << 20]})
    store.close()


async def test_memory_that_somebody_took_in_the_last_moment_is_an_error_and_not_a_bus_error(
    small_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = WeightStore(directory=MemoryDirectory(), run_id="full", folder=small_memory)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=1 << 20, f_frsize=4096))
    with pytest.raises(WeightError, match="lower weights"):
        await store.publish(1, {"w": torch.zeros(1 << 21, dtype=torch.uint8)})
    assert os.listdir(small_memory) == []
