"""A trainer of two processes, in Monarch actors as `launch` spawns them: it trains, and publishes its shards."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from monarch.actor import this_proc
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from forgelite.config import TrainerConfig
from forgelite.config.loss import ClipLossConfig
from forgelite.launching import free_port
from forgelite.mesh.environment import station_environment
from forgelite.mesh.fleet import Fleet
from forgelite.mesh.processes import Station
from forgelite.stations import TrainerHandle
from forgelite.trainer.actor import TrainerActor, TrainerSetup
from forgelite.weights import SHARED_MEMORY, WeightStore, reclaim, start_directory, stop_directory
from forgelite.weights.manifest import Manifest
from forgelite.weights.opening import StoreSettings, open_sharded_store, open_store
from forgelite.weights.resharding import fetch_shards
from tests.engines.tiny import model_config, one_each, save_llama, save_qwen3, save_qwen3_moe, sequences
from tests.mesh.gloo_ranks import run_ranks
from tests.unit.weights_memory import MemoryDirectory

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

BATCH = one_each(sequences())
CASES = {  # name: model, trainer.parallelism
    "fsdp": (save_llama, {}),
    "tensor-parallel-tied": (save_qwen3, {"tensor_parallel_degree": 2}),
    "expert-parallel": (save_qwen3_moe, {"expert_parallel_degree": 2}),
}


def settings(**options: object) -> StoreSettings:
    common = {"run_id": f"shards-{os.getpid()}", "carrier": "shm", "retain": 2, "fingerprint": True, "timeout_s": 60.0}
    return StoreSettings(**(common | options))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def processes() -> AsyncIterator[Station]:
    """Two processes of a trainer, and the directory of their run. Every test has an actor of its own in them."""
    await start_directory(this_proc(), name=settings().run_id)
    environment = station_environment(PYTHONPATH=os.getcwd())
    async with Fleet(stop_timeout_s=15.0) as fleet:
        yield fleet.spawn("trainer", TrainerActor, environment=environment, processes=2)
    await stop_directory(settings().run_id)
    reclaim(SHARED_MEMORY, settings().run_id)


def trainer_of(processes: Station, name: str) -> Station:
    return dataclasses.replace(processes, name=name, actor=processes.processes.spawn(name, TrainerActor))


async def set_up(station: Station, folder: Path, parallelism: dict, store: StoreSettings) -> TrainerHandle:
    config = {"optimizer": {"lr": 1e-2}, "training": {"seq_len": 64}, "parallelism": parallelism}
    setup = TrainerSetup(
        model=model_config(folder),
        trainer=TrainerConfig.model_validate(config),
        loss=ClipLossConfig(),
        steps=10,
        seed=0,
        temperature=1.0,
        open_shards=partial(open_sharded_store, store),
        processes=2,
        master_port=free_port(),
    )
    await station.call(station.actor.setup.call(setup), 120.0, "setup")
    return TrainerHandle(station, timeout_s=120.0)


@pytest.mark.parametrize("case", CASES)
async def test_two_ranks_train_and_a_reader_gets_exactly_their_weights(
    processes: Station, tmp_path: Path, case: str
) -> None:
    save, parallelism = CASES[case]
    handle = await set_up(trainer_of(processes, case), save(tmp_path / "model"), parallelism, settings())
    await handle.publish()
    for _ in range(2):
        result = await handle.train_step(BATCH)
    await handle.publish()
    await handle.save_hf(str(tmp_path / "hf"))
    saved = load_file(tmp_path / "hf" / "model.safetensors")
    reader = open_store(settings())
    async with reader.lease(2) as views:
        assert result.version == 2
        assert views.keys() == saved.keys()
        assert all(torch.equal(views[name], tensor) for name, tensor in saved.items())
    start = load_file(tmp_path / "model" / "model.safetensors")
    async with reader.lease(0) as views:
        assert all(torch.equal(views[name], start[name]) for name in views)
    wrong = await asyncio.to_thread(run_ranks, 2, read_columns, handle.manifest, str(tmp_path / "hf"))
    assert wrong == [[], []]
    reader.close()
    await handle.close()


async def test_shards_travel_in_the_transfer_dtype(processes: Station, tmp_path: Path) -> None:
    store = settings(transfer_dtype="bfloat16")
    handle = await set_up(trainer_of(processes, "bf16"), save_llama(tmp_path / "model"), {}, store)
    await handle.publish()
    start = load_file(tmp_path / "model" / "model.safetensors")
    reader = open_store(store)
    async with reader.lease(handle.manifest) as views:
        assert all(torch.equal(view, start[name].bfloat16()) for name, view in views.items())
    reader.close()
    await handle.close()


def read_columns(rank: int, manifest: Manifest, folder: str) -> list[str]:
    """Read with matrices cut along their columns; give the names that differ from what was saved."""
    mesh = DeviceMesh("cpu", [0, 1])
    saved = load_file(Path(folder) / "model.safetensors")
    into = {
        name: distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(1) if tensor.dim() == 2 else Replicate()])
        for name, tensor in saved.items()
    }
    asyncio.run(fetch_shards(WeightStore(directory=MemoryDirectory(), run_id="columns"), manifest, into))
    assert all(isinstance(tensor, DTensor) for tensor in into.values())
    return [name for name, tensor in saved.items() if not torch.equal(into[name].full_tensor(), tensor)]
