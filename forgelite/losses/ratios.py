"""Importance ratios and what is logged of them."""

from __future__ import annotations

import torch

from forgelite.losses.inputs import LossInputs, masked

MAX_LOG_RATIO = 10.0
"""Bound on |log ratio| before `exp`, torchtitan's: e^10 = 22026. Beyond it a ratio says only "very
different", and further out it would overflow float32. A clamped token has no gradient."""


def log_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    """`logprobs - old_logprobs` in float32, clamped to +-MAX_LOG_RATIO. Any shape."""
    return (logprobs.float() - old_logprobs.float()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio_parts(ratio: torch.Tensor, clipped: torch.Tensor, mask: torch.Tensor) -> tuple[dict, dict]:
    """Sums and maxima from which `ratio/*` is computed.

    Args:
        ratio: [R, L] importance ratios; 1 where the mask is False.
        clipped: [R, L] bool, trained tokens whose gradient the clipping removed.
        mask: [R, L] bool.

    Returns:
        Sums `ratio`, `ratio_squared` (for the effective sample size), `clipped`; maximum `ratio`.
    """
    ratio = ratio.detach()
    kept = masked(ratio, mask)
    sums = {"ratio": kept.sum(), "ratio_squared": kept.square().sum(), "clipped": clipped.sum()}
    return sums, {"ratio": kept.max()}


def mismatch_parts(inputs: LossInputs, trainer_version: int) -> tuple[dict, dict]:
    """Sums and maxima of |logprob - behaviour logprob| over the tokens sampled by the trainer's own version.

    For those tokens both sides have the same weights, so that the gap is what the two engines disagree by.
    Older tokens differ because the policy has changed, and are left out.

    Returns:
        Sums `mismatch`, `mismatch_tokens`; maximum `mismatch`.
    """
    same = inputs.mask & (inputs.versions == trainer_version)
    gap = masked(inputs.logprobs.detach() - inputs.behaviour_logprobs, same).abs()
    return {"mismatch": gap.sum(), "mismatch_tokens": same.sum()}, {"mismatch": gap.max()}
