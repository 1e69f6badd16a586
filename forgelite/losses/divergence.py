"""Divergence of the policy from the frozen reference."""

from __future__ import annotations

import torch

from forgelite.losses.ratios import MAX_LOG_RATIO


def k3(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """Estimate KL(policy || reference) token by token: `exp(-x) - 1 + x`, `x` the log-ratio to the reference.

    Never negative, and unbiased when the tokens come from the policy (J. Schulman, "Approximating KL
    divergence", 2020, estimator k3). Its gradient, `1 - exp(-x)` times that of the log-probability, is that
    of the forward KL. `x` is clamped to +-MAX_LOG_RATIO; a clamped token has no gradient.

    Args:
        logprobs: Float32 of any shape, with gradient.
        reference_logprobs: The same shape.
    """
    x = (logprobs - reference_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-x) + x
