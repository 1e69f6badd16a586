"""Publishers and readers in processes of their own, to be killed by the tests.

They are forked from a server that has loaded torch already, so that one costs milliseconds. Each gets one end
of a pipe, by which it says how far it is, and on which it blocks until it is killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from forgelite.errors import VersionUnavailable
from forgelite.weights import SHARED_MEMORY, segment
from forgelite.weights.arena_reader import ArenaReader
from forgelite.weights.arena_writer import ArenaWriter

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.faults.weights_processes"])


@contextlib.contextmanager
def running(target: Callable[..., None], *args: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    """Run `target(pipe, *args)` in a process that is killed at the end of the block."""
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()
        ours.close()


def kill(process: BaseProcess) -> None:
    """kill -9, and wait until the kernel has taken everything away."""
    process.kill()
    process.join()


def filled(version: int, *, tensors: int = 4, size: int = 1 << 20) -> dict[str, torch.Tensor]:
    """Tensors of `size` bytes whose every element is the version."""
    return {f"w{i}": torch.full((size // 8,), version, dtype=torch.int64) for i in range(tensors)}


def is_whole(views: dict[str, torch.Tensor], version: int) -> bool:
    return all(bool((view == version).all()) for view in views.values())


def make_writer(run_id: str, *, retain: int = 2) -> ArenaWriter:
    return ArenaWriter.create(filled(0), folder=SHARED_MEMORY, run_id=run_id, slots=retain + 1, fingerprinted=True)


def publish_for_ever(pipe: Connection, run_id: str) -> None:
    """Publish 0, 1, 2 and so on, and say each number before its writing begins."""
    writer = make_writer(run_id)
    pipe.send(writer.path)
    version = 0
    while True:
        pipe.send(version)
        writer.write(version, filled(version), timeout_s=10.0)
        version += 1


def stop_in_the_middle_of(pipe: Connection, run_id: str, last: int) -> None:
    """Publish up to `last`, and stop when the first of its tensors is copied."""
    writer = make_writer(run_id)
    for version in range(last):
        writer.write(version, filled(version), timeout_s=10.0)

    def copy_one_and_stop(source: dict[str, torch.Tensor], slot: dict[str, torch.Tensor]) -> None:
        slot["w0"].copy_(source["w0"])
        pipe.send(writer.path)
        pipe.recv()

    writer._copy = copy_one_and_stop
    writer.write(last, filled(last), timeout_s=10.0)


def stop_half_created(pipe: Connection, run_id: str) -> None:
    """Own a file that has no final name yet."""
    _, path = segment.create(SHARED_MEMORY, run_id)
    pipe.send(path)
    pipe.recv()


def hold_a_lease(pipe: Connection, path: Path, version: int) -> None:
    with ArenaReader(path).lease(version):
        pipe.send("held")
        pipe.recv()


def read_until_told(pipe: Connection, path: Path) -> None:
    """Read the newest version again and again; answer how many reads were whole, torn and back in time."""
    reader = ArenaReader(path)
    counts = {"whole": 0, "torn": 0, "backwards": 0, "unavailable": 0}
    newest = -1
    pipe.send("attached")
    while not pipe.poll():
        try:
            version = reader.versions()[-1]
            with reader.lease(version) as (manifest, views):
                counts["backwards"] += manifest.version < newest
                newest = manifest.version
                counts["whole" if is_whole(views, version) else "torn"] += 1
        except VersionUnavailable:
            counts["unavailable"] += 1
    pipe.send(counts)
