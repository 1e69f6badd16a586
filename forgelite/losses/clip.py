"""PPO's clipped surrogate with two bounds."""

from __future__ import annotations

import torch

from forgelite.config.loss import ClipLossConfig
from forgelite.losses.aggregation import token_mean
from forgelite.losses.divergence import k3
from forgelite.losses.inputs import LossInputs, LossOutput, masked
from forgelite.losses.ratios import log_ratio, mismatch_parts, ratio_parts


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, *, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`max(-r * A, -clip(r, 1 - low, 1 + high) * A)`, token by token.

    PPO (arXiv:1707.06347, eq. 7), with the upper bound apart from the lower one ("clip-higher", DAPO,
    arXiv:2503.14476). No gradient where A > 0 and r > 1 + high, nor where A < 0 and r < 1 - low.

    Args:
        ratio: Float32 of any shape, with gradient.
        advantages: The same shape.

    Returns:
        The loss of each token, and a bool tensor: where clipping took the gradient away.
    """
    free = -ratio * advantages
    bounded = -ratio.clamp(1.0 - low, 1.0 + high) * advantages
    return torch.maximum(free, bounded), (bounded > free).detach()


def clip_loss(inputs: LossInputs, config: ClipLossConfig, *, denominator: float, trainer_version: int) -> LossOutput:
    """The clipped surrogate of the ratio to the behaviour policy, plus `kl_coefficient` times k3.

    The ratio is taken against the probabilities that the tokens were really sampled with, so that it is also
    the correction for stale weights; nothing else may correct for them.

    Args:
        inputs: One microbatch.
        config: Bounds and KL weight.
        denominator: Trained tokens of the whole batch, on all ranks.
        trainer_version: Version of the weights that `inputs.logprobs` come from.

    Raises:
        ValueError: a KL weight above 0 without reference log-probabilities.
    """
    mask = inputs.mask
    logprobs = masked(inputs.logprobs, mask)
    ratio = log_ratio(logprobs, masked(inputs.behaviour_logprobs, mask)).exp()
    per_token, clipped = clipped_surrogate(
        ratio, masked(inputs.advantages, mask), low=config.clip_low, high=config.clip_high
    )
    loss = token_mean(per_token, mask, denominator)
    sums = {"policy": loss.detach()}

    if inputs.reference_logprobs is not None:
        divergence = token_mean(k3(logprobs, masked(inputs.reference_logprobs, mask)), mask, denominator)
        sums["kl_ref"] = divergence.detach()
        if config.kl_coefficient:
            loss = loss + config.kl_coefficient * divergence
    elif config.kl_coefficient:
        raise ValueError(
            f"loss.kl_coefficient={config.kl_coefficient} needs reference logprobs, and the batch has none"
        )

    ratio_sums, ratio_maxima = ratio_parts(ratio, clipped, mask)
    gap_sums, gap_maxima = mismatch_parts(inputs, trainer_version)
    return LossOutput(loss=loss, sums=sums | ratio_sums | gap_sums, maxima=ratio_maxima | gap_maxima)
