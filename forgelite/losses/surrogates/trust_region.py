"""Surrogates that look at how far the probability of a token has moved, not at its ratio.

The ratio of a rare token swings widely while the distribution hardly changes; these leave it alone. A token outside
the region has no gradient. `p` is the probability now, `q` the one it was sampled with.
"""

from __future__ import annotations

import torch

from forgelite.losses.inputs import masked
from forgelite.losses.tokens import PolicyTokens, Surrogate

_TINY = 1e-8  # keeps the logarithm of 1 - p finite at p = 1


def dppo_tv(tokens: PolicyTokens, *, threshold_low: float, threshold_high: float) -> Surrogate:
    """`-r A` where `p - q <= threshold_high` (A > 0) or `p - q >= -threshold_low` (elsewhere), else 0.

    Source: DPPO (arXiv:2602.04879) with the total variation of the sampled token, as in PRIME-RL and SkyRL.
    """
    change = tokens.logprobs.detach().exp() - tokens.behaviour_logprobs.exp()
    inside = torch.where(tokens.advantages > 0, change <= threshold_high, change >= -threshold_low)
    return _inside(inside, tokens)


def dppo_kl(tokens: PolicyTokens, *, threshold_low: float, threshold_high: float) -> Surrogate:
    """`-r A`, but 0 where the policy has moved on in the direction of A and `D` exceeds its threshold.

    `D = q (log q - log p) + (1 - q) log((1 - q) / (1 - p))` is the divergence of the two-way choice between the token
    and all others. Left out: A > 0, p > q, D > threshold_high; and A < 0, p < q, D > threshold_low.
    Source: DPPO (arXiv:2602.04879) with the binary KL, as in SkyRL and verl.
    """
    log_p, log_q = tokens.logprobs.detach(), tokens.behaviour_logprobs
    p, q = log_p.exp(), log_q.exp()
    divergence = q * (log_q - log_p) + (1.0 - q) * ((1.0 - q + _TINY) / (1.0 - p + _TINY)).log()
    too_high = (tokens.advantages > 0) & (p > q) & (divergence > threshold_high)
    too_low = (tokens.advantages < 0) & (p < q) & (divergence > threshold_low)
    return _inside(~(too_high | too_low), tokens)


def ipo(tokens: PolicyTokens, *, threshold: float, kl_tau: float) -> Surrogate:
    """`-r A` where `|p - q| <= threshold`, else 0; plus `kl_tau (log r)^2` on every token, the dropped ones as well.

    The trust region of PRIME-RL's `ipo_threshold`, the same for both signs of the advantage.
    """
    change = tokens.logprobs.detach().exp() - tokens.behaviour_logprobs.exp()
    term = _inside(change.abs() <= threshold, tokens)
    return Surrogate(per_token=term.per_token + kl_tau * tokens.log_ratio.square(), clipped=term.clipped)


def _inside(inside: torch.Tensor, tokens: PolicyTokens) -> Surrogate:
    per_token = -masked(tokens.ratio * tokens.advantages, inside)
    return Surrogate(per_token=per_token, clipped=~inside & tokens.mask)
