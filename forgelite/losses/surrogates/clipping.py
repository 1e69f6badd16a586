"""Surrogates that bound the ratio of a token."""

from __future__ import annotations

import torch

from forgelite.losses.tokens import PolicyTokens, Surrogate


def clipped_ratio(ratio: torch.Tensor, advantages: torch.Tensor, *, clip_low: float, clip_high: float) -> Surrogate:
    """`max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)`.

    Args:
        ratio: [R, L] float32, with gradient.
        advantages: [R, L] float32.
    """
    free = -ratio * advantages
    bounded = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return Surrogate(per_token=torch.maximum(free, bounded), clipped=(bounded > free).detach())


def clip(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> Surrogate:
    """`max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)`, token by token.

    PPO (arXiv:1707.06347, eq. 7), with the upper bound apart from the lower one ("clip-higher", DAPO,
    arXiv:2503.14476). No gradient where A > 0 and r > 1 + clip_high, nor where A < 0 and r < 1 - clip_low.
    """
    return clipped_ratio(tokens.ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high)


def dual_clip(tokens: PolicyTokens, *, clip_low: float, clip_high: float, dual_clip: float) -> Surrogate:
    """`clip`, and where A < 0 at most `-dual_clip A`.

    Source: arXiv:1912.09729, with c = dual_clip. Without gradient where `clip` has none, and where A < 0 and
    r > dual_clip. A correction multiplies the result: a weight above 1 may carry it over the bound, as in verl.
    """
    once = clip(tokens, clip_low=clip_low, clip_high=clip_high)
    largest = -dual_clip * tokens.advantages
    negative = tokens.advantages < 0
    return Surrogate(
        per_token=torch.where(negative, torch.minimum(once.per_token, largest), once.per_token),
        clipped=once.clipped | (negative & (largest < once.per_token).detach()),
    )


def cispo(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> Surrogate:
    """`-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi`: no token loses its gradient.

    Source: MiniMax-M1 (arXiv:2506.13585). Libraries differ in the bounds: `clip_low=1, clip_high=4` are SkyRL's
    [0, 5] and TRL's `epsilon_high=5`; 0.2 and 0.2 are verl's.
    """
    ratio = tokens.ratio.detach()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return Surrogate(per_token=-weight * tokens.advantages * tokens.logprobs, clipped=weight != ratio)


def sapo(tokens: PolicyTokens, *, tau_positive: float, tau_negative: float) -> Surrogate:
    """`-(4 / tau) sigmoid(tau (r - 1)) A`, with tau_positive where A > 0 and tau_negative elsewhere.

    Source: SAPO (arXiv:2511.20347). The gate has slope 1 at r = 1, so that on policy the gradient is that of the
    policy gradient, and it fades smoothly on both sides. Nothing counts as clipped.
    """
    positive = tokens.advantages > 0
    tau = torch.where(positive, tau_positive, tau_negative).to(tokens.advantages)
    gate = 4.0 / tau * torch.sigmoid(tau * (tokens.ratio - 1.0))
    return Surrogate(per_token=-gate * tokens.advantages, clipped=torch.zeros_like(positive))
