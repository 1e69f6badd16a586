"""Estimators of the divergence of the policy from the frozen reference, KL(policy || reference), token by token.

`x` is the log-ratio of the policy to the reference. Source of k1, k2 and k3: J. Schulman, "Approximating KL
divergence", 2020. In k3, `x` is clamped to +-MAX_LOG_RATIO; a clamped token has no gradient.

| name       | value             | times grad logprob | what it is                                               |
|------------|-------------------|--------------------|----------------------------------------------------------|
| k1         | x                 | 1                  | unbiased; as a loss its expected gradient is zero        |
| k2         | x^2 / 2           | x                  | biased; its gradient on policy is that of the divergence |
| k3         | e^-x - 1 + x      | 1 - e^-x           | unbiased, never negative; gradient of KL(ref || policy)  |
| k3_unbiased| rho (e^-x - 1 + x)| rho x              | value and gradient right, also off policy                |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from forgelite.losses.tokens import MAX_LOG_RATIO, bounded_exp


def k1(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor) -> torch.Tensor:
    """`x`. Arguments as `k3`."""
    del behaviour_logprobs
    return logprobs - reference_logprobs


def k2(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor) -> torch.Tensor:
    """`x^2 / 2`. Arguments as `k3`."""
    del behaviour_logprobs
    return 0.5 * (logprobs - reference_logprobs).square()


def k3(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor) -> torch.Tensor:
    """`exp(-x) - 1 + x`.

    Args:
        logprobs: Float32 of any shape, with gradient.
        reference_logprobs: The same shape.
        behaviour_logprobs: The same shape; used by `k3_unbiased` alone.
    """
    del behaviour_logprobs
    x = (logprobs - reference_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-x) + x


def k3_unbiased(
    logprobs: torch.Tensor, reference_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor
) -> torch.Tensor:
    """`rho * k3` with `rho = exp(logprobs - behaviour_logprobs)`, whose gradient counts. Arguments as `k3`.

    The gradient is rho * k3 + rho * (1 - exp(-x)) = rho * x, that of the divergence itself. With rho detached it
    would be that of k3 again. Source: DeepSeek-V3.2 (2025); `use_bias_correction_kl` in TRL.
    """
    return bounded_exp(logprobs - behaviour_logprobs) * k3(logprobs, reference_logprobs, behaviour_logprobs)


DIVERGENCES: Mapping[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k3_unbiased": k3_unbiased,
}
