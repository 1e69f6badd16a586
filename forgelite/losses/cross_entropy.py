"""Supervised fine-tuning."""

from __future__ import annotations

from forgelite.config.loss import CrossEntropyLossConfig
from forgelite.losses.aggregation import token_mean
from forgelite.losses.inputs import LossInputs, LossOutput, masked


def cross_entropy_loss(
    inputs: LossInputs, config: CrossEntropyLossConfig, *, denominator: float, trainer_version: int
) -> LossOutput:
    """The mean negative log-probability of the trained tokens. Advantages and behaviour are not looked at.

    Args:
        inputs: One microbatch.
        config: Not used; every loss has the same signature.
        denominator: Trained tokens of the whole batch, on all ranks.
        trainer_version: Not used.
    """
    loss = token_mean(-masked(inputs.logprobs, inputs.mask), inputs.mask, denominator)
    return LossOutput(loss=loss, sums={"cross_entropy": loss.detach()})
