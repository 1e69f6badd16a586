"""The full state of a trainer on disk, by torch.distributed.checkpoint: any number of ranks can read it."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from forgelite.model.hf import replace_folder
from forgelite.trainer.assembly import Parts


def save_state(parts: Parts, version: int, folder: Path) -> None:
    """Write weights, optimizer, schedule, version and random state. A collective.

    Written beside its place and renamed at the end: a folder that exists is whole.
    """
    folder = folder.absolute()
    work = folder.parent / f".{folder.name}.partial"
    if _first():
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
    _meet()
    with _quiet():
        dcp.save(_state(parts, version), checkpoint_id=work)
    if _first():
        replace_folder(work, folder)
    _meet()


def load_state(parts: Parts, folder: Path) -> int:
    """Read what `save_state` wrote into the parts, in place, and give its version. A collective.

    Raises:
        FileNotFoundError: there is no checkpoint.
    """
    if not (folder / ".metadata").is_file():
        raise FileNotFoundError(f"{folder} holds no trainer checkpoint")
    state = _state(parts, 0)
    with _quiet():
        dcp.load(state, checkpoint_id=folder)
        # state_dict() of a model with a fused qkv gives copies, so what was read is handed back
        parts.model.load_state_dict(state["model"], strict=True)
        parts.optimizers.load_state_dict(state["optimizer"])
        parts.schedulers.load_state_dict(state["lr_scheduler"])
    for optimizer, scheduler in zip(parts.optimizers, parts.schedulers, strict=True):
        for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
    torch.set_rng_state(state["rng"])
    return state["version"]


def _state(parts: Parts, version: int) -> dict[str, Any]:
    return {
        "model": parts.model.state_dict(),
        "optimizer": parts.optimizers.state_dict(),
        "lr_scheduler": parts.schedulers.state_dict(),
        "version": version,
        "rng": torch.get_rng_state(),
    }


def _first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # torch warns that a single process without a process group is a single process
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")
        # torchtitan recomputes the rate outside of a step
        warnings.filterwarnings("ignore", message="To get the last learning rate computed by the scheduler")
        yield
