"""Trajectories of different lengths become rows of one length with little padding.

Best-fit decreasing: the longest sequence first, each into the fullest row that still has room. At most 11/9 of
the optimal number of rows plus one (Johnson, 1973). The order of the sequences inside a batch does not matter to the
loss (law 9), so the packer is free to choose it, and chooses the same one for the same lengths.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import torch

from forgelite.types import TrainingBatch, Trajectory


def plan_rows(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Assign sequences to rows.

    Args:
        lengths: tokens of each sequence, each in [1, row_length].
        row_length: most tokens in a row.

    Returns:
        For each row the indices of its sequences.

    Raises:
        ValueError: a sequence is empty or longer than a row; the message gives its index.
    """
    for i, length in enumerate(lengths):
        if not 0 < length <= row_length:
            raise ValueError(
                f"sequence {i} has {length} tokens and cannot be packed into rows of {row_length} "
                "(trainer.training.seq_len)"
            )
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(room, (lengths[i], -1))
        if at == len(room):
            rows.append([])
            free, row = row_length, len(rows) - 1
        else:
            free, row = room.pop(at)
        rows[row].append(i)
        insort(room, (free - lengths[i], row))
    return rows


def pack(trajectories: Sequence[Trajectory], row_length: int) -> TrainingBatch:
    """Pack trajectories into a batch; rows are as long as the fullest one needs, at most `row_length`.

    A trajectory without an advantage gets 0. Reference logprobs are in the batch when every trajectory has them.
    `sequence_ids` are indices into `trajectories`.

    Raises:
        ValueError: there is nothing to pack, or a trajectory does not fit a row.
    """
    if not trajectories:
        raise ValueError("a batch needs at least one trajectory")
    lengths = [len(t.token_ids) for t in trajectories]
    rows = plan_rows(lengths, row_length)
    width = max(sum(lengths[i] for i in row) for row in rows)
    has_reference = all(t.reference_logprobs is not None for t in trajectories)

    size = (len(rows), width)
    token_ids, positions = np.zeros(size, np.int64), np.zeros(size, np.int64)
    sequence_ids, versions = np.full(size, -1, np.int32), np.full(size, -1, np.int32)
    loss_mask = np.zeros(size, np.bool_)
    logprobs, advantages, reference = (np.zeros(size, np.float32) for _ in range(3))
    for r, row in enumerate(rows):
        start = 0
        for i in row:
            trajectory, end = trajectories[i], start + lengths[i]
            token_ids[r, start:end] = trajectory.token_ids
            positions[r, start:end] = np.arange(lengths[i])
            sequence_ids[r, start:end] = i
            loss_mask[r, start:end] = trajectory.loss_mask
            logprobs[r, start:end] = trajectory.logprobs
            advantages[r, start:end] = trajectory.advantage or 0.0
            for span in trajectory.spans:
                versions[r, start + span.start : start + span.end] = span.version
            if has_reference:
                reference[r, start:end] = trajectory.reference_logprobs
            start = end
        positions[r, start:] = np.arange(width - start)  # padding starts a sequence of its own
    return TrainingBatch(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        sequence_ids=torch.from_numpy(sequence_ids),
        loss_mask=torch.from_numpy(loss_mask),
        logprobs=torch.from_numpy(logprobs),
        versions=torch.from_numpy(versions),
        advantages=torch.from_numpy(advantages),
        reference_logprobs=torch.from_numpy(reference) if has_reference else None,
    )


def unpack(values: torch.Tensor, batch: TrainingBatch, count: int) -> list[list[float]]:
    """Take one number per token out of the rows again.

    Args:
        values: [R, L], aligned with `batch`.
        batch: what `pack` made.
        count: how many trajectories were packed.

    Returns:
        For each trajectory, in the order in which they were given to `pack`, its [T] values.
    """
    out: list[list[float]] = [[] for _ in range(count)]
    for row, ids in zip(values, batch.sequence_ids, strict=True):
        sequences, lengths = torch.unique_consecutive(ids, return_counts=True)
        for i, part in zip(sequences.tolist(), row.split(lengths.tolist()), strict=True):
            if i >= 0:
                out[i] = part.tolist()
    return out
