"""Publish and fetch on one host, beside a plain copy of the same bytes in the same rounds."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from forgelite.errors import VersionUnavailable
from forgelite.weights import Manifest, WeightStore

Tensors = dict[str, torch.Tensor]


@dataclass(kw_only=True, slots=True, frozen=True)
class Case:
    """What is moved. Example: `Case(nbytes=540_000_000, tensors=300, dtype=torch.float32)`."""

    nbytes: int
    tensors: int
    dtype: torch.dtype = torch.float32
    fingerprint: bool = True


@dataclass(kw_only=True, slots=True, frozen=True)
class Times:
    """Seconds of each round. Example: `Times(memcpy=[0.1], publish=[0.07], fetch=[0.05], fetch_all=[0.08],
    fetch_two=[])`."""

    memcpy: list[float]
    publish: list[float]
    fetch: list[float]
    fetch_all: list[float]  # with verify="all"
    fetch_two: list[float]  # until both readers were done; empty when it was not asked for

    def ratio(self, name: str) -> float:
        """The median of `name` by the median of memcpy."""
        return statistics.median(getattr(self, name)) / statistics.median(self.memcpy)


class ManifestsInMemory:
    """A directory for one process."""

    def __init__(self) -> None:
        self._known: dict[int, Manifest] = {}

    async def put_manifest(self, version: int, manifest: Manifest) -> None:
        self._known[version] = manifest

    async def get(self, version: int) -> Manifest:
        if version not in self._known:
            raise VersionUnavailable(f"version {version} was not put")
        return self._known[version]

    async def latest(self) -> Manifest:
        return await self.get(max(self._known, default=-1))

    async def drop(self, version: int) -> None:
        self._known.pop(version, None)


def make_tensors(case: Case, *, seed: int | None) -> Tensors:
    """Tensors of equal size that have all their pages; random ones, or zeros when `seed` is None."""
    elements = max(1, case.nbytes // case.tensors // case.dtype.itemsize)
    if seed is None:
        return {f"layers.{i}.weight": torch.zeros(elements, dtype=case.dtype) for i in range(case.tensors)}
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layers.{i}.weight": torch.randn(elements, generator=generator).to(case.dtype) for i in range(case.tensors)
    }


def measure(case: Case, *, rounds: int, two_readers: bool = False) -> Times:
    """Time a plain copy, a publish and a fetch in turns, so that a machine that drifts drifts for all of them.

    Args:
        case: what is moved.
        rounds: how often; one more goes before, for page faults.
        two_readers: also let two processes fetch at once.
    """
    return asyncio.run(_measure(case, rounds, two_readers))


async def _measure(case: Case, rounds: int, two_readers: bool) -> Times:
    source, target = make_tensors(case, seed=0), make_tensors(case, seed=None)
    times = Times(memcpy=[], publish=[], fetch=[], fetch_all=[], fetch_two=[])
    publisher, reader = (_store(case) for _ in range(2))
    with _readers(case, 2 if two_readers else 0) as pipes:
        for version in range(rounds + 1):
            memcpy = _seconds(lambda: _copy(target, source))
            begin = time.perf_counter()
            manifest = await publisher.commit(version, source)
            published = time.perf_counter()
            await reader.fetch(manifest, target)
            fetched = time.perf_counter()
            await reader.fetch(manifest, target, verify="all")
            verified = time.perf_counter()
            both = _fetch_everywhere(pipes, manifest) if pipes else None
            if version == 0:
                continue
            times.memcpy.append(memcpy)
            times.publish.append(published - begin)
            times.fetch.append(fetched - published)
            times.fetch_all.append(verified - fetched)
            if both is not None:
                times.fetch_two.append(both)
    if not all(torch.equal(target[name], tensor) for name, tensor in source.items()):
        raise RuntimeError("what was fetched is not what was published")
    reader.close()
    publisher.close()
    return times


def _store(case: Case) -> WeightStore:
    return WeightStore(
        directory=ManifestsInMemory(), run_id=f"bench-{os.getpid()}", retain=1, fingerprint=case.fingerprint
    )


def _copy(target: Tensors, source: Tensors) -> None:
    for name, tensor in source.items():
        target[name].copy_(tensor)


def _seconds(action: Callable[[], None]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


@contextmanager
def _readers(case: Case, count: int) -> Iterator[list[Connection]]:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_read_on_demand, args=(theirs, case), daemon=True)
            process.start()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            pipe.recv()
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join()


def _read_on_demand(pipe: Connection, case: Case) -> None:
    """In a process of its own: fetch each version that comes, answer with when it began and ended."""
    torch.set_num_threads(1)
    target, store = make_tensors(case, seed=None), _store(case)

    async def serve() -> None:
        pipe.send("ready")
        while True:
            manifest = pipe.recv()
            begin = time.monotonic()
            await store.fetch(manifest, target)
            pipe.send((begin, time.monotonic()))

    asyncio.run(serve())


def _fetch_everywhere(pipes: list[Connection], manifest: Manifest) -> float:
    """Seconds from the first reader's begin to the last one's end; the clock is the same in all processes."""
    for pipe in pipes:
        pipe.send(manifest)
    spans = [pipe.recv() for pipe in pipes]
    return max(end for _, end in spans) - min(begin for begin, _ in spans)
