"""From the losses of tokens to the loss of a batch.

Each function gives one microbatch's share. The denominators are those of the whole batch on all ranks, so that
neither the split into microbatches nor the number of ranks changes the sum of the shares. They count trained tokens
and sequences before any correction: leaving some out does not make the others weigh more.
"""

from __future__ import annotations

import torch

from forgelite.config.policy_loss import Aggregation
from forgelite.losses.inputs import BatchSize, masked
from forgelite.losses.runs import Runs


def token_mean(per_token: torch.Tensor, mask: torch.Tensor, size: BatchSize) -> torch.Tensor:
    """`sum_it m L / N`: every token counts the same (DAPO, arXiv:2503.14476).

    Args:
        per_token: [R, L] loss of each token.
        mask: [R, L] bool.
        size: Of the whole batch.

    Returns:
        A scalar. Without a trained token it is zero, and still part of the graph.
    """
    return masked(per_token, mask).sum() / size.tokens


def sequence_mean(per_token: torch.Tensor, sequences: Runs, size: BatchSize) -> torch.Tensor:
    """`1/B sum_i (1/T_i) sum_t m L`: every sequence counts the same (GRPO, arXiv:2402.03300).

    Args:
        per_token: [R, L] loss of each token.
        sequences: Of the microbatch; each of them lies whole in it.
        size: Of the whole batch.
    """
    return (masked(per_token, sequences.mask) / sequences.trained).sum() / size.sequences


def constant_mean(per_token: torch.Tensor, mask: torch.Tensor, size: BatchSize, length: int) -> torch.Tensor:
    """`sum_it m L / (B * length)`: the length of an answer does not change how much its tokens count.

    Source: Dr.GRPO (arXiv:2503.20783), where the constant is the largest length of a completion.

    Args:
        per_token: [R, L] loss of each token.
        mask: [R, L] bool.
        size: Of the whole batch.
        length: A constant of the configuration. With 1 it is the mean over sequences of their sums.
    """
    return masked(per_token, mask).sum() / (size.sequences * length)


def aggregate(
    per_token: torch.Tensor, sequences: Runs, size: BatchSize, *, how: Aggregation, constant_length: int | None
) -> torch.Tensor:
    """The aggregation of the name `how`; `constant_length` belongs to `constant`."""
    if how == "token_mean":
        return token_mean(per_token, sequences.mask, size)
    if how == "sequence_mean":
        return sequence_mean(per_token, sequences, size)
    if constant_length is None:
        raise ValueError("loss.aggregation=constant needs loss.constant_length")
    return constant_mean(per_token, sequences.mask, size, constant_length)
