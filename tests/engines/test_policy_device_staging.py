"""The way of a version to a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from forgelite.errors import WeightError
from forgelite.policy.device_staging import DeviceStaging
from forgelite.weights import SHARED_MEMORY
from forgelite.weights.arena_reader import ArenaReader
from forgelite.weights.arena_writer import ArenaWriter
from tests.unit.weights_memory import awkward_tensors, same_bits

pytestmark = pytest.mark.gpu


@pytest.fixture
def staging() -> Iterator[DeviceStaging]:
    made = DeviceStaging(torch.device("cuda", 0))
    yield made
    made.close()


def test_a_leased_version_arrives_on_the_device_bit_for_bit(staging: DeviceStaging) -> None:
    tensors = {name: tensor for name, tensor in awkward_tensors().items() if tensor.nbytes}
    writer = ArenaWriter.create(tensors, folder=SHARED_MEMORY, run_id="staging", slots=2, fingerprinted=False)
    reader = ArenaReader(writer.path)
    for version in (1, 2):  # the second time the segment is pinned already
        writer.write(version, tensors, timeout_s=1.0)
        with reader.lease(version) as (_, views):
            staged = staging.stage(views)
        assert all(tensor.is_cuda for tensor in staged.values())
        assert all(same_bits(staged[name].cpu(), tensor) for name, tensor in tensors.items())
    reader.close()
    writer.close()


def test_tensors_of_several_storages_are_refused(staging: DeviceStaging) -> None:
    with pytest.raises(WeightError, match="from one segment, not from 2 storages"):
        staging.stage({"a": torch.zeros(2), "b": torch.zeros(2)})
