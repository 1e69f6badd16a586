"""What every loss takes and gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass(kw_only=True, slots=True)
class LossInputs:
    """One microbatch of token-aligned tensors. What stands at masked places does not matter, NaN included.

    A sequence lies in one row, in one piece.

    Example, one row of three tokens of which two are trained: `mask=[[False, True, True]]`,
    `logprobs=[[0.0, -0.7, -0.2]]`, `advantages=[[0.0, 1.5, 1.5]]`.
    """

    logprobs: torch.Tensor  # [R, L] float32, current policy, with gradient
    behaviour_logprobs: torch.Tensor  # [R, L] float32, of the distribution really sampled from
    advantages: torch.Tensor  # [R, L] float32
    mask: torch.Tensor  # [R, L] bool, True for tokens that are trained
    versions: torch.Tensor  # [R, L] int32, version that sampled the token
    sequence_ids: torch.Tensor  # [R, L] int32, sequence that the token belongs to, -1 for padding
    proximal_logprobs: torch.Tensor | None = None  # [R, L] float32, policy when the step began; None: not given
    reference_logprobs: torch.Tensor | None = None  # [R, L] float32; None: no reference
    entropy: torch.Tensor | None = None  # [R, L] float32, without gradient; None: not computed

    def __post_init__(self) -> None:
        shape = self.logprobs.shape
        names = ("behaviour_logprobs", "advantages", "mask", "versions", "sequence_ids", "proximal_logprobs")
        for name in (*names, "reference_logprobs", "entropy"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"loss input {name} is {tuple(tensor.shape)}, logprobs are {tuple(shape)}")


@dataclass(kw_only=True, slots=True, frozen=True)
class BatchSize:
    """What the loss of a whole batch, on all ranks together, is divided by. Corrections do not change it.

    Example, two sequences with 3 and 5 trained tokens and one with none: `BatchSize(tokens=8, sequences=2)`.
    """

    tokens: int  # trained
    sequences: int  # with at least one trained token

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.sequences < 1:
            raise ValueError(f"a loss is a mean over trained tokens and sequences, and the batch has none: {self}")

    @classmethod
    def of(cls, mask: torch.Tensor, sequence_ids: torch.Tensor) -> BatchSize:
        """Count.

        Args:
            mask: [R, L] bool, of the whole batch.
            sequence_ids: [R, L] of an integer type, different for every sequence of the batch.

        Raises:
            ValueError: no token is trained.
        """
        ids = sequence_ids[mask]
        return cls(tokens=ids.numel(), sequences=ids.unique().numel())


@dataclass(kw_only=True, slots=True)
class LossOutput:
    """A share of the loss, and the parts of the metrics that microbatches and ranks add up.

    The losses and metrics of all microbatches of all ranks, summed (the maxima: maximised), are the batch's.
    """

    loss: torch.Tensor  # scalar, with gradient
    sums: dict[str, torch.Tensor] = field(default_factory=dict)  # scalars, without gradient
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)  # scalars, without gradient


class Loss(Protocol):
    """A share of the loss of a batch, from one microbatch of it."""

    def __call__(self, inputs: LossInputs, *, size: BatchSize, trainer_version: int) -> LossOutput: ...


def masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` with zero where the mask is False.

    To be applied to the inputs of a formula, not to its result: NaN times zero is NaN, and a NaN in the
    branch of a `where` that is not taken still reaches the gradient.
    """
    return torch.where(mask, values, values.new_zeros(()))
