"""What others do with the same bytes, and what a version costs between hosts: rows of `benchmarks.weight_sync`.

Every case but the speeds and the speed-up is a ratio to memcpy (`copy_` tensor by tensor between private buffers, one
thread) of the same bytes, measured right before it. The peers move 135M float32 parameters as 300 tensors:

- torchstore 0.1.2: `put_state_dict` and `get_state_dict`, the volume in another process
- safetensors on tmpfs: `save_file` and `load_file`; and forgelite's carrier `filesystem` over it, fingerprint included
- gloo: a broadcast to one other process, tensor by tensor
- RDMA over TCP, to a process of this host and to one in another network namespace: one plain `RDMABuffer.read_into` of
  all bytes, and forgelite's puller, which also leases, compares the fingerprint and commits
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.namespaces import obstacle, two_hosts
from benchmarks.table import Row, spread

ROOT = Path(__file__).resolve().parents[1]
SHARED_MEMORY = Path("/dev/shm")
TENSORS = 300
PORT = 7101
DEADLINE_S = 240.0
WORKER = (
    "import sys; from monarch.actor import run_worker_loop_forever as run; run(address=sys.argv[1], ca=sys.argv[2])"
)


def rows(quick: bool) -> list[Row]:
    """All rows; a rough answer with a tenth of the bytes when `quick`."""
    megabytes, repeats = (51, 3) if quick else (515, 5)
    weights = {f"w{i}": torch.randn((megabytes << 20) // 4 // TENSORS) for i in range(TENSORS)}
    return [
        *_files(weights, repeats),
        *_gloo(weights, repeats),
        *_torchstore(weights, repeats),
        *_hosts(megabytes, repeats),
    ]


def _files(weights: dict[str, torch.Tensor], repeats: int) -> list[Row]:
    from safetensors.torch import load_file, save_file

    from forgelite.weights.carried import CarriedStore
    from forgelite.weights.filesystem import WeightFolder

    memcpy = _memcpy(weights)
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="forgelite-bench-") as folder:
        file = Path(folder, "weights.safetensors")
        saved = _times(lambda: save_file(weights, file), repeats)
        into = {name: torch.empty_like(tensor) for name, tensor in weights.items()}

        def load() -> None:
            for name, tensor in load_file(file).items():
                into[name].copy_(tensor)

        loaded = _times(load, repeats)
        carrier = WeightFolder(Path(folder, "versions"))
        store = CarriedStore(carrier=carrier, directory=carrier)
        versions = iter(range(1, 1000))
        published = _times(lambda: asyncio.run(store.publish(next(versions), weights)), repeats)
        last = carrier.versions()[-1]
        fetched = _times(lambda: asyncio.run(store.fetch(last, into)), repeats)
        store.close()
    return [
        _ratio("safetensors_save", saved, memcpy),
        _ratio("safetensors_load", loaded, memcpy),
        _ratio("filesystem_publish", published, memcpy),
        _ratio("filesystem_fetch", fetched, memcpy),
    ]


def _gloo(weights: dict[str, torch.Tensor], repeats: int) -> list[Row]:
    import torch.multiprocessing as processes

    with tempfile.TemporaryDirectory() as folder:
        memcpy = _memcpy(weights)
        shapes = [tensor.shape for tensor in weights.values()]
        file = Path(folder, "seconds.json")
        processes.spawn(_broadcast, args=(folder, shapes, repeats, str(file)), nprocs=2)
        return [_ratio("gloo_broadcast", json.loads(file.read_text()), memcpy)]


def _broadcast(rank: int, folder: str, shapes: Sequence[torch.Size], repeats: int, file: str) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    tensors = [torch.ones(shape) for shape in shapes]

    def send() -> None:
        for tensor in tensors:
            dist.broadcast(tensor, 0)
        dist.barrier()

    seconds = _times(send, repeats)
    if rank == 0:
        Path(file).write_text(json.dumps(seconds))
    dist.destroy_process_group()


def _torchstore(weights: dict[str, torch.Tensor], repeats: int) -> list[Row]:
    memcpy = _memcpy(weights)
    put, get = asyncio.run(_torchstore_times(weights, min(repeats, 3)))
    return [_ratio("torchstore_put_state_dict", put, memcpy), _ratio("torchstore_get_state_dict", get, memcpy)]


async def _torchstore_times(weights: dict[str, torch.Tensor], repeats: int) -> tuple[list[float], list[float]]:
    from monarch.actor import default_bootstrap_cmd, this_host

    from forgelite.mesh.environment import station_environment
    from forgelite.weights.torchstore_client import start_store, stop_store
    from forgelite.weights.torchstore_compat import load_torchstore

    name = f"bench-{os.getpid()}"
    environment = station_environment(PYTHONPATH=str(ROOT))
    volume = this_host().spawn_procs(
        per_host={"procs": 1}, bootstrap_command=lambda _: default_bootstrap_cmd().with_env(environment)
    )
    await start_store(volume, name=name)
    torchstore = load_torchstore()
    into = {key: torch.zeros_like(tensor) for key, tensor in weights.items()}
    puts, gets = [], []
    for version in range(repeats + 1):
        key = f"version.{version}"
        start = time.perf_counter()
        await torchstore.put_state_dict(weights, key, store_name=name)
        puts.append(time.perf_counter() - start)
        start = time.perf_counter()
        await torchstore.get_state_dict(key, into, store_name=name)
        gets.append(time.perf_counter() - start)
    await stop_store(name)
    await volume.stop()
    return puts[1:], gets[1:]


def _hosts(megabytes: int, repeats: int) -> list[Row]:
    weights = {"all": torch.randn((megabytes << 20) // 4)}
    memcpy = _memcpy(weights)
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.weight_sync_hosts"]
    command += [str(megabytes), str(TENSORS), str(repeats)]
    within = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=True)
    found = _seconds(within.stdout)
    result = [
        _ratio("rdma_tcp_one_host_plain", found["plain"], memcpy),
        _ratio("rdma_tcp_one_host", found["pull"], memcpy),
    ]
    if why := obstacle():
        return [*result, Row(case="cross_host_speedup", value=None, unit="x", goal=2.0, note=why)]
    found = _between_namespaces(command)
    speedup = statistics.median(found["plain"]) / statistics.median(found["pull"])
    return [
        *result,
        _ratio("rdma_tcp_two_hosts_plain", found["plain"], memcpy),
        _ratio("rdma_tcp_two_hosts", found["pull"], memcpy),
        _speed("cross_host_plain_mb_s", megabytes, found["plain"]),
        _speed("cross_host_mb_s", megabytes, found["pull"]),
        Row(case="cross_host_speedup", value=speedup, unit="x", goal=2.0, note="by one plain read_into, medians"),
    ]


def _between_namespaces(command: Sequence[str]) -> dict[str, list[float]]:
    from forgelite.mesh.environment import root_environment, station_environment

    environment = root_environment({}) | station_environment(PYTHONPATH=str(ROOT))
    with two_hosts() as (near, far):
        own, other = f"tcp://{near.address}:0", f"tcp://{far.address}:{PORT}"
        quiet = {"cwd": ROOT, "environment": environment, "stderr": subprocess.DEVNULL}
        worker = [sys.executable, "-W", "ignore", "-c", WORKER, other, "trust_all_connections"]
        host = far.start(worker, stdout=subprocess.DEVNULL, **quiet)
        try:
            root = near.start([*command, own, other], stdout=subprocess.PIPE, **quiet)
            try:
                output, _ = root.communicate(timeout=DEADLINE_S)
            finally:
                root.kill()
        finally:
            host.kill()
            host.wait()
    if root.returncode:
        raise RuntimeError(f"the measurement between namespaces ended with code {root.returncode}: {output}")
    return _seconds(output)


def _seconds(output: str) -> dict[str, list[float]]:
    return json.loads(output.strip().splitlines()[-1])


def _memcpy(weights: dict[str, torch.Tensor]) -> float:
    into = {name: torch.empty_like(tensor) for name, tensor in weights.items()}

    def copy() -> None:
        for name, tensor in weights.items():
            into[name].copy_(tensor)

    torch.set_num_threads(1)
    return statistics.median(_times(copy, 7))


def _times(action: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each repeat, after one that is not counted."""
    action()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return seconds


def _ratio(case: str, seconds: Sequence[float], memcpy: float) -> Row:
    ratios = [value / memcpy for value in seconds]
    return Row(case=case, value=statistics.median(ratios), unit="x", note=spread(ratios))


def _speed(case: str, megabytes: int, seconds: Sequence[float]) -> Row:
    speeds = [(megabytes << 20) / 1e6 / value for value in seconds]
    return Row(case=case, value=statistics.median(speeds), unit="MB/s", note=spread(speeds))
