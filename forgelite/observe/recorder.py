"""The run folder: what is written while a run goes, and what stands there at its end.

<run.dir>/config.yaml       the resolved configuration
          metrics.jsonl     one object a step
          rollouts.jsonl    sampled texts with reward, versions, age
          record/           every trained batch, see `recording` (loop.record)
          tensorboard/      the same metrics
          checkpoints/      see the apps
          summary.json      final figures and why the run ended
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from forgelite.errors import ConfigError
from forgelite.observe.metrics import MetricsLog, read_metrics
from forgelite.observe.progress import Progress
from forgelite.observe.recording import FOLDER, RecordHeader, RecordWriter
from forgelite.observe.report import write_json, write_text
from forgelite.observe.rollouts import RolloutLog
from forgelite.types import Group


def claim_folder(folder: Path, *, resume: bool) -> tuple[TextIO, Path | None]:
    """Make the run folder and take it for this process. An earlier run in it is moved aside, never overwritten.

    Args:
        folder: `run.dir`.
        resume: go on in what is there.

    Returns:
        The claim, which lasts until it is closed or the process ends; and where the earlier run is now (None if
        there was none, or it is resumed).

    Raises:
        ConfigError: another process has claimed the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    claim, moved = _lock(folder), None
    if not resume and (folder / "config.yaml").exists():
        began = datetime.fromtimestamp((folder / "config.yaml").stat().st_mtime)
        moved = _unused(folder.with_name(f"{folder.name}-{began:%Y%m%d-%H%M%S}"))
        folder.rename(moved)
        claim.close()
        folder.mkdir()
        claim = _lock(folder)
    return claim, moved


def _lock(folder: Path) -> TextIO:
    file = (folder / ".lock").open("w", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(f"run.dir={folder} is in use by another run that is still going") from None
    return file


def _unused(path: Path) -> Path:
    return next(
        p for n in itertools.count() if not (p := path if n == 0 else path.with_name(f"{path.name}-{n}")).exists()
    )


class Recorder:
    """Writes the run folder and feeds the display. A context manager: leaving it writes `summary.json`.

    It is an observer of `forgelite.loop.Loop`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        config_yaml: str,
        config: Mapping[str, Any],
        progress: Progress,
        tensorboard: bool,
        wandb: bool,
        rollouts_per_step: int | None,
        record: RecordHeader | None = None,
        first_step: int = 0,
        claim: TextIO | None = None,
    ) -> None:
        """Args:
        folder: the run folder, which exists.
        config_yaml, config: the resolved configuration, as text and as plain data.
        progress: the display.
        tensorboard, wandb, rollouts_per_step: `metrics.*`.
        record: the header of the record; None: there is none.
        first_step: where a resumed run goes on; what its predecessor wrote of later steps is removed, since
            they will be done again.
        claim: of the folder, given up with the recorder.
        """
        self._folder = folder
        self._claim = claim
        self._progress = progress
        self._started = time.monotonic()
        self._summary: dict[str, Any] = {"steps": first_step}
        # First, for it may refuse, and a run that is refused has changed nothing.
        self._record = None if record is None else RecordWriter(folder / FOLDER, record, first_step=first_step)
        if first_step:
            self._go_on()
        for name in ("metrics.jsonl", "rollouts.jsonl"):
            _drop_steps_after(folder / name, first_step)
        (folder / "config.yaml").write_text(config_yaml, encoding="utf-8")
        self._metrics = MetricsLog(folder, tensorboard=tensorboard, wandb=wandb, config=config)
        self._rollouts = RolloutLog(folder, per_step=rollouts_per_step)

    async def on_step(self, steps: int, metrics: Mapping[str, Any], groups: Sequence[Group]) -> None:
        """Write a line of metrics, and the rollouts behind it."""
        if groups and self._record is not None:
            rewards = {name: value for name, value in metrics.items() if name.startswith("reward/")}
            await asyncio.to_thread(self._record.write, steps, groups, rewards)
        line = self._metrics.write(steps, metrics)
        if groups:
            self._rollouts.write(steps, steps - 1, groups)
        self._summary["steps"] = steps
        for name in ("eval/reward", "eval/loss"):
            if line.get(name) is not None:
                self._summary.setdefault(name, {"before": line[name]})["after"] = line[name]
        self._progress.step(line)

    def on_end(self, metrics: Mapping[str, Any]) -> None:
        """Keep the final account for the summary."""
        self._summary |= {name: value for name, value in metrics.items() if name.count("/") == 1}

    def on_note(self, text: str) -> None:
        """Show something that the user should know."""
        self._progress.note(text)

    def on_phase(self, text: str) -> None:
        """Show what the run is doing outside its steps."""
        self._progress.phase(text)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._metrics.close()
        self._rollouts.close()
        self._progress.close()
        reason = _exit_reason(error)
        self._summary |= _over_the_run(read_metrics(self._folder))
        write_json(
            self._folder / "summary.json",
            {
                "exit_reason": reason,
                "error": f"{type(error).__name__}: {error}" if reason == "failed" else None,
                **self._summary,
                "seconds": round(self._summary.get("seconds", 0.0) + time.monotonic() - self._started, 3),
            },
        )
        if self._claim is not None:
            self._claim.close()

    def _go_on(self) -> None:
        """Take over from the run that is resumed what the summary says of the whole run."""
        path = self._folder / "summary.json"
        if path.exists():  # a run that was killed has left none
            before = json.loads(path.read_text(encoding="utf-8"))
            kept = ("seconds", "eval/reward", "eval/loss")
            self._summary |= {name: before[name] for name in kept if name in before}


def _exit_reason(error: BaseException | None) -> str:
    if error is None:
        return "completed"
    return "failed" if isinstance(error, Exception) else "interrupted"


def _over_the_run(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The rates of the whole run, from the numerators and denominators of its steps."""
    totals = {}
    for name in ("reward/mean", "tokens_per_s/generated"):
        with_it = [line for line in lines if line.get(f"{name}/denominator")]
        if with_it:
            numerator = sum(line[f"{name}/numerator"] for line in with_it)
            totals[name] = numerator / sum(line[f"{name}/denominator"] for line in with_it)
    return totals


def _drop_steps_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    write_text(path, "".join(kept))
