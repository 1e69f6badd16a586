"""Surrogates made of the log-probability itself."""

from __future__ import annotations

import torch

from forgelite.losses.tokens import PolicyTokens, Surrogate


def reinforce(tokens: PolicyTokens) -> Surrogate:
    """`-A log pi` (Williams, 1992). Biased for samples of another policy, unless a correction weighs them."""
    return Surrogate(per_token=-tokens.advantages * tokens.logprobs, clipped=torch.zeros_like(tokens.mask))


def topr(tokens: PolicyTokens, *, weight_positive: float, weight_negative: float) -> Surrogate:
    """`-weight_positive A log pi` where A > 0, else `-weight_negative sg(clip(r, 0, 1)) A log pi`.

    What was better than the baseline is learnt as it is; what was worse counts less, the less the policy still does
    it. Source: TOPR (arXiv:2503.14286), token by token as in ROLL. The sign is that of the advantage, the reward minus
    its baseline. Counted as clipped: A <= 0 and r > 1.
    """
    ratio = tokens.ratio.detach()
    positive = tokens.advantages > 0
    weight = torch.where(positive, weight_positive, weight_negative * ratio.clamp(max=1.0))
    return Surrogate(
        per_token=-weight * tokens.advantages * tokens.logprobs, clipped=~positive & (ratio > 1.0) & tokens.mask
    )


def kimi(tokens: PolicyTokens, *, tau: float) -> Surrogate:
    """`-A log pi + tau / 2 (log r)^2`, token by token.

    Source: Kimi k1.5 (arXiv:2501.12599); the form is also called DRO (arXiv:2405.19107). Mind the half when a value of
    tau is taken from elsewhere.
    """
    pull = 0.5 * tau * tokens.log_ratio.square()
    return Surrogate(per_token=-tokens.advantages * tokens.logprobs + pull, clipped=torch.zeros_like(tokens.mask))
