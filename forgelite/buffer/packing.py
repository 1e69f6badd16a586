"""Trajectories of different lengths become rows of one length with little padding.

Best-fit decreasing: the longest sequence first, each into the fullest row that still has room. At most 11/9 of
the optimal number of rows plus one (Johnson, 1973). The order of the sequences inside a batch does not matter to the
loss (law 9), so the packer is free to choose it, and chooses the same one for the same lengths.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

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

    token_ids, positions, sequence_ids, loss_mask, logprobs, versions, advantages, reference = ([] for _ in range(8))
    for row in rows:
        used = sum(lengths[i] for i in row)
        for i in row:
            t = trajectories[i]
            n = lengths[i]
            token_ids += t.token_ids
            positions += range(n)
            sequence_ids += [i] * n
            loss_mask += t.loss_mask
            logprobs += t.logprobs
            versions += _token_versions(t)
            advantages += [t.advantage or 0.0] * n
            if has_reference:
                reference += t.reference_logprobs
        pad = width - used
        token_ids += [0] * pad
        positions += range(pad)
        sequence_ids += [-1] * pad
        loss_mask += [False] * pad
        logprobs += [0.0] * pad
        versions += [-1] * pad
        advantages += [0.0] * pad
        if has_reference:
            reference += [0.0] * pad

    def grid(values: list, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).view(len(rows), width)

    return TrainingBatch(
        token_ids=grid(token_ids, torch.int64),
        positions=grid(positions, torch.int64),
        sequence_ids=grid(sequence_ids, torch.int32),
        loss_mask=grid(loss_mask, torch.bool),
        logprobs=grid(logprobs, torch.float32),
        versions=grid(versions, torch.int32),
        advantages=grid(advantages, torch.float32),
        reference_logprobs=grid(reference, torch.float32) if has_reference else None,
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
    for row_values, row_ids in zip(values.tolist(), batch.sequence_ids.tolist(), strict=True):
        for value, i in zip(row_values, row_ids, strict=True):
            if i >= 0:
                out[i].append(value)
    return out


def _token_versions(trajectory: Trajectory) -> list[int]:
    versions = [-1] * len(trajectory.token_ids)
    for span in trajectory.spans:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    return versions
