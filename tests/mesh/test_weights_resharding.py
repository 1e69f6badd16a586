"""Distributed tensors of real gloo ranks: published by four, read by one and by four with another layout."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Partial, _StridedShard

from forgelite.errors import WeightMismatch
from forgelite.weights import SHARED_MEMORY, WeightStore, reclaim
from forgelite.weights.arena_reader import ArenaReader
from forgelite.weights.manifest import Manifest, describe
from forgelite.weights.resharding import fetch_shards
from forgelite.weights.sharding import ShardedPublisher
from tests.mesh.gloo_ranks import exchange, run_ranks
from tests.unit.weights_memory import MemoryDirectory, same_bits

WORLD = 4


def whole_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "rows": torch.randn(10, 6),  # 10 rows on 4 ranks: 3, 3, 3, 1
        "columns": torch.randn(5, 8).bfloat16(),
        "copies": torch.randn(7),
        "hybrid": torch.randn(8, 3),
        "grid": torch.randn(8, 8),
        "fewer rows than ranks": torch.arange(4).view(2, 2),
        "strided": torch.randn(8, 4),
        "two of four": torch.randn(6, 2),
        "plain": torch.randn(3, 3).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "flag": torch.tensor([True, False, True, True, False]),
    }


def publisher_layout(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    line = DeviceMesh("cpu", list(range(WORLD)))
    square = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    pair = DeviceMesh("cpu", [1, 3])
    layouts = {
        "rows": (line, [Shard(0)]),
        "columns": (line, [Shard(1)]),
        "copies": (line, [Replicate()]),
        "hybrid": (square, [Replicate(), Shard(0)]),
        "grid": (square, [Shard(0), Shard(1)]),
        "fewer rows than ranks": (line, [Shard(0)]),
        "two of four": (pair, [Shard(0)]),
        "flag": (line, [Shard(0)]),
    }
    placed = {name: distribute_tensor(tensors[name], *layout) for name, layout in layouts.items()}
    return {name: placed.get(name, tensor) for name, tensor in tensors.items()}


def reader_layout(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    line = DeviceMesh("cpu", list(range(WORLD)))
    square = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp"))
    layouts = {
        "rows": (line, [Shard(1)]),
        "columns": (square, [Shard(1), Shard(0)]),
        "copies": (line, [Shard(0)]),
        "grid": (line, [Shard(1)]),
        "strided": (line, [Replicate()]),
        "two of four": (square, [Replicate(), Shard(1)]),
    }
    return {
        name: distribute_tensor(torch.zeros_like(tensor), *layouts[name])
        if name in layouts
        else torch.zeros_like(tensor)
        for name, tensor in tensors.items()
    }


def publish(rank: int, run_id: str, version: int) -> Manifest:
    tensors = publisher_layout(whole_tensors())
    publisher = ShardedPublisher(rank=rank, exchange=exchange, host="a", run_id=run_id, folder=SHARED_MEMORY)
    return publisher.publish(version, describe(whole_tensors()), tensors.items)


def publish_and_read(rank: int, run_id: str) -> list[str]:
    """Publish, read in another layout; give the names that did not come out bit by bit."""
    manifest = publish(rank, run_id, 4)
    into = reader_layout(whole_tensors())
    asyncio.run(fetch_shards(WeightStore(directory=MemoryDirectory(), run_id=run_id), manifest, into))
    wrong = []
    for name, tensor in whole_tensors().items():
        found = into[name].full_tensor() if isinstance(into[name], DTensor) else into[name]
        if not same_bits(found, tensor):
            wrong.append(name)
    with ArenaReader(Path(manifest.segment)).lease(4) as (_, views):
        wrong += [f"whole {name}" for name, tensor in whole_tensors().items() if not same_bits(views[name], tensor)]
    return wrong


def publish_partial_sums(rank: int, run_id: str) -> None:
    mesh = DeviceMesh("cpu", list(range(WORLD)))
    sums = {"sum": DTensor.from_local(torch.ones(3), mesh, [Partial()])}
    publisher = ShardedPublisher(rank=rank, exchange=exchange, host="a", run_id=run_id, folder=SHARED_MEMORY)
    publisher.publish(1, describe({"sum": torch.ones(3)}), sums.items)


def publish_strided(rank: int, run_id: str) -> bool:
    """Rows cut for tensor parallelism first and by FSDP then, as torchtitan does."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    rows = torch.arange(32.0).view(8, 4)
    inner, outer = mesh.get_local_rank("tp"), mesh.get_local_rank("dp")
    mine = rows[4 * inner : 4 * inner + 4][2 * outer : 2 * outer + 2]
    placed = DTensor.from_local(
        mine.clone(), mesh, [_StridedShard(0, split_factor=2), Shard(0)], shape=rows.shape, stride=rows.stride()
    )
    publisher = ShardedPublisher(rank=rank, exchange=exchange, host="a", run_id=run_id, folder=SHARED_MEMORY)
    manifest = publisher.publish(1, describe({"rows": rows}), lambda: [("rows", placed)])
    with ArenaReader(Path(manifest.segment)).lease(1) as (_, views):
        return torch.equal(views["rows"], rows)


@pytest.fixture
def run_id() -> Iterator[str]:
    name = f"reshard-{os.getpid()}"
    yield name
    reclaim(SHARED_MEMORY, name)  # the ranks are killed at their end


def test_four_ranks_publish_and_readers_of_other_layouts_get_the_same_bits(run_id: str) -> None:
    assert run_ranks(WORLD, publish_and_read, run_id) == [[]] * WORLD


def test_rows_cut_by_tensor_parallelism_and_fsdp_come_out_in_order(run_id: str) -> None:
    assert run_ranks(WORLD, publish_strided, run_id) == [True] * WORLD


def test_partial_sums_are_refused_with_the_name(run_id: str) -> None:
    with pytest.raises(WeightMismatch, match=r"sum has the placements .* must be reduced"):
        run_ranks(WORLD, publish_partial_sums, run_id)
