"""A batch cut into the pieces that a model computes at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

import torch

from forgelite.types import TrainingBatch


def microbatches(batch: TrainingBatch, rows: int, *, index: int = 0, count: int = 1) -> Iterator[TrainingBatch]:
    """Every `count`-th row from `index` on, `rows` at a time, without columns that hold only padding.

    All of the `count` ranks yield the same number of pieces, so that their collectives match: one that has run
    out of rows yields a row of which nothing is trained.

    Args:
        batch: The whole batch, on the CPU.
        rows: Most rows of one piece.
        index: Which of the ranks this is.
        count: Ranks among which the rows are dealt, like cards.
    """
    total = batch.token_ids.shape[0]
    mine = range(index, total, count)
    for start in range(0, -(-total // count), rows):
        chosen = torch.tensor(mine[start : start + rows] or [0])
        part = _each(batch, lambda tensor, chosen=chosen: tensor[chosen])
        if start >= len(mine):
            part = replace(part, loss_mask=torch.zeros_like(part.loss_mask))
        yield _without_empty_columns(part)


def _without_empty_columns(batch: TrainingBatch) -> TrainingBatch:
    used = (batch.sequence_ids >= 0).any(0).nonzero()
    width = int(used[-1]) + 1 if used.numel() else 1
    return _each(batch, lambda tensor: tensor[:, :width])


def _each(batch: TrainingBatch, change: Callable[[torch.Tensor], torch.Tensor]) -> TrainingBatch:
    tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return TrainingBatch(**{k: None if tensor is None else change(tensor) for k, tensor in tensors.items()})
