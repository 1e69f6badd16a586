"""Surrogates with one ratio for all tokens of a sequence.

Every token of a sequence gets the loss of the sequence, so that the mean over its tokens, then over sequences, is the
mean over sequences. The advantage of a sequence is the mean over its trained tokens.
"""

from __future__ import annotations

import torch

from forgelite.losses.surrogates.clipping import clipped_ratio
from forgelite.losses.tokens import PolicyTokens, Surrogate, bounded_exp


def gspo(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> Surrogate:
    """`max(-s A, -clip(s, 1 - clip_low, 1 + clip_high) A)`, with `s = exp(mean_t log r)`.

    Source: GSPO (arXiv:2507.18071, eq. 5 and 7). All tokens of a clipped sequence lose their gradient at once; the
    others have s A / T times that of their log-probability.
    """
    ratio = bounded_exp(tokens.sequences.mean(tokens.log_ratio))
    advantages = tokens.sequences.mean(tokens.advantages)
    return clipped_ratio(ratio, advantages, clip_low=clip_low, clip_high=clip_high)


def gmpo(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> Surrogate:
    """`-A exp(mean_t l')`, with `l' = min(l, clip(l))` where A > 0 and `max(l, clip(l))` elsewhere, `l = log r`.

    Source: GMPO (arXiv:2507.20673). The bounds -clip_low and clip_high are in log units: 0.4 stands for ratios
    from e^-0.4 to e^0.4. A clipped token loses its gradient, and the others keep theirs.
    """
    advantages = tokens.sequences.mean(tokens.advantages)
    held = tokens.log_ratio.clamp(-clip_low, clip_high)
    chosen = torch.where(advantages > 0, torch.minimum(tokens.log_ratio, held), torch.maximum(tokens.log_ratio, held))
    return Surrogate(
        per_token=-advantages * bounded_exp(tokens.sequences.mean(chosen)),
        clipped=(chosen != tokens.log_ratio).detach(),
    )
