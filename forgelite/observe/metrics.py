"""Metrics of a run, one line a step.

A rate is a `Rate`: numerator and denominator are written beside its value, so that rates over any stretch of the run
are sums divided by sums, never means of ratios.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO


@dataclass(kw_only=True, slots=True, frozen=True)
class Rate:
    """A quotient that can be added up. Example: `Rate(numerator=0.2, denominator=1.6)` is 0.125."""

    numerator: float
    denominator: float

    @property
    def value(self) -> float | None:
        """The quotient; None where there is nothing to divide by."""
        return self.numerator / self.denominator if self.denominator else None


class MetricsLog:
    """Writes `metrics.jsonl`, and TensorBoard and Weights & Biases where they are asked for.

    Lines are appended, so that a resumed run goes on in the same file; each is flushed, so that a killed run keeps all
    finished steps.
    """

    def __init__(self, folder: Path, *, tensorboard: bool, wandb: bool, config: Mapping[str, Any]) -> None:
        """Args:
        folder: the run folder; it is made.
        tensorboard: also write `tensorboard/`.
        wandb: also log to Weights & Biases, with `config` as its config. Raises ImportError if it is missing.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._tensorboard = _open_tensorboard(folder / "tensorboard") if tensorboard else None
        self._wandb = _open_wandb(folder, config) if wandb else None

    def write(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Write one line; returns it. A number that is not finite is written as null, for JSON has none."""
        line: dict[str, Any] = {"step": step}
        for name, value in metrics.items():
            if isinstance(value, Rate):
                line[name] = value.value
                line[f"{name}/numerator"] = value.numerator
                line[f"{name}/denominator"] = value.denominator
            else:
                line[name] = value
        line = {name: None if _not_finite(value) else value for name, value in line.items()}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        numbers = {name: v for name, v in line.items() if isinstance(v, int | float) and name != "step"}
        if self._tensorboard is not None:
            for name, value in numbers.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)
        return line

    def close(self) -> None:
        """Flush and close everything; twice is once."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
            self._wandb = None


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`."""
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line]


def _not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _open_tensorboard(folder: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))


def _open_wandb(folder: Path, config: Mapping[str, Any]) -> Any:
    import wandb

    return wandb.init(dir=str(folder), name=folder.name, config=dict(config))
