"""Supervised fine-tuning."""

from __future__ import annotations

from forgelite.losses.aggregation import token_mean
from forgelite.losses.inputs import BatchSize, LossInputs, LossOutput, masked


def cross_entropy_loss(inputs: LossInputs, *, size: BatchSize, trainer_version: int) -> LossOutput:
    """The mean negative log-probability of the trained tokens. Advantages and behaviour are not looked at.

    Args:
        inputs: One microbatch.
        size: Of the whole batch, on all ranks.
        trainer_version: Not used; every loss has the same signature.
    """
    del trainer_version
    loss = token_mean(-masked(inputs.logprobs, inputs.mask), inputs.mask, size)
    return LossOutput(loss=loss, sums={"cross_entropy": loss.detach()})
