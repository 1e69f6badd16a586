"""Processes that meet in a gloo group and run one function each; forked from a server that has loaded torch."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.mesh.gloo_ranks", "torch.distributed.tensor"])
SECONDS = 60.0


def run_ranks(world: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `work(rank, *arguments)` gives on each of `world` ranks; the first error of a rank is raised."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = []
        processes = []
        for rank in range(world):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=_run, args=(theirs, f"file://{folder}/meet", rank, world, work, arguments), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            answers = []
            for rank, pipe in enumerate(pipes):
                assert pipe.poll(SECONDS), f"rank {rank} gave no answer within {SECONDS} s"
                answers.append(pipe.recv())
        finally:
            for process in processes:
                process.kill()
                process.join()
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def exchange(value: Any) -> list[Any]:
    """An `Exchange` over the group."""
    heard = [None] * dist.get_world_size()
    dist.all_gather_object(heard, value)
    return heard


def _run(pipe: Connection, meet: str, rank: int, world: int, work: Callable[..., Any], arguments: tuple) -> None:
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)
    try:
        answer: Any = work(rank, *arguments)
    except Exception as error:  # goes to the test, which raises it
        answer = error
    pipe.send(answer)
    pipe.poll(SECONDS)  # until killed: a rank that ends early would break the others' last collective
