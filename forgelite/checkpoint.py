"""Checkpoints of a run: the trainer's state and the loop's, whole or not at all.

    <run.dir>/checkpoints/step-000020/trainer/    weights, optimizer, schedule, random state, version
                                      loop.json   dataset position, ledger, queued groups

A checkpoint is written under another name and renamed when it is complete, so the newest one with its final name
is always whole.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from forgelite.errors import ForgeliteError

_NAME = re.compile(r"step-(\d{6,})")


class SavesState(Protocol):
    """What a checkpoint needs of the trainer."""

    async def save(self, folder: str) -> None: ...
    async def load(self, folder: str) -> int: ...


async def save_checkpoint(state: Mapping[str, Any], *, folder: Path, trainer: SavesState, keep: int) -> None:
    """Write a checkpoint and remove the oldest ones.

    Args:
        state: the loop's `state_dict`.
        folder: where checkpoints lie; absolute, for the trainer is another process.
        trainer: at the version of `state`.
        keep: how many stay.
    """
    final = folder / f"step-{state['version']:06d}"
    unfinished = folder / f".{final.name}"
    await asyncio.to_thread(_begin, unfinished)
    await trainer.save(str(unfinished / "trainer"))
    await asyncio.to_thread(_finish, unfinished, final, state, keep)


def _begin(unfinished: Path) -> None:
    shutil.rmtree(unfinished, ignore_errors=True)  # left behind by a run that was killed here
    unfinished.mkdir(parents=True)


def _finish(unfinished: Path, final: Path, state: Mapping[str, Any], keep: int) -> None:
    (unfinished / "loop.json").write_text(json.dumps(state), encoding="utf-8")
    if final.exists():
        shutil.rmtree(final)
    unfinished.rename(final)
    for old in _checkpoints(final.parent)[:-keep]:
        shutil.rmtree(old)


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint; None when there is none."""
    return next(reversed(_checkpoints(folder)), None)


def checkpoint_step(checkpoint: Path) -> int:
    """Steps done at a checkpoint, from its name."""
    match = _NAME.fullmatch(checkpoint.name)
    if match is None:
        raise ValueError(f"{checkpoint} is not the name of a checkpoint")
    return int(match.group(1))


async def load_checkpoint(checkpoint: Path, trainer: SavesState) -> dict[str, Any]:
    """Bring the trainer to a checkpoint, and return the loop's state.

    Raises:
        ForgeliteError: the trainer's state is of another version than the loop's.
    """
    state = json.loads(await asyncio.to_thread((checkpoint / "loop.json").read_text, encoding="utf-8"))
    version = await trainer.load(str(checkpoint / "trainer"))
    if version != state["version"]:
        raise ForgeliteError(f"{checkpoint}: the trainer is at version {version}, the loop at {state['version']}")
    return state


def _checkpoints(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    found = [p for p in folder.iterdir() if _NAME.fullmatch(p.name)]
    return sorted(found, key=checkpoint_step)
