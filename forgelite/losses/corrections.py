"""Corrections for samples that another policy drew.

In every formula `d` is the gap of a token: its log-probability under the policy when the step began, minus the one it
was sampled with. The factors have no gradient. Sums and means are over the trained tokens, before any correction.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from forgelite.losses.tokens import Correction, CorrectionFunction, PolicyTokens, bounded_exp


def token_tis(tokens: PolicyTokens, *, cap: float) -> Correction:
    """`min(exp(d), cap)`, token by token (truncated importance sampling; Ionides, 2008)."""
    return _capped(bounded_exp(tokens.gap), cap)


def sequence_tis(tokens: PolicyTokens, *, cap: float) -> Correction:
    """`min(exp(sum_t d), cap)`: the ratio of the whole sequence, unbiased but for the cap, and of high variance."""
    return _capped(bounded_exp(tokens.sequences.total(tokens.gap)), cap)


def geometric_tis(tokens: PolicyTokens, *, cap: float) -> Correction:
    """`min(exp(mean_t d), cap)`: the geometric mean of the ratios of a sequence, whatever its length."""
    return _capped(bounded_exp(tokens.sequences.mean(tokens.gap)), cap)


def segment_tis(tokens: PolicyTokens, *, cap: float) -> Correction:
    """`min(exp(mean d), cap)`, the mean over the turn that a token is in: an unbroken run of trained tokens (ROLL)."""
    return _capped(bounded_exp(tokens.turns.mean(tokens.gap)), cap)


def icepop(tokens: PolicyTokens, *, low: float, high: float) -> Correction:
    """`exp(d)` where it is in [low, high], else 0 (IcePop; Ling Team, "Every Step Evolves", arXiv:2510.18855)."""
    return _banded(bounded_exp(tokens.gap), low, high)


def sequence_mis(tokens: PolicyTokens, *, low: float, high: float) -> Correction:
    """`exp(sum_t d)` where it is in [low, high], else 0, for the whole sequence (TRL's `sequence_mask`)."""
    return _banded(bounded_exp(tokens.sequences.total(tokens.gap)), low, high)


def geometric_rejection(tokens: PolicyTokens, *, low: float, high: float) -> Correction:
    """1 for the sequences with `low <= exp(mean_t d) <= high`, else 0 (verl's and SkyRL's geometric mask)."""
    ratio = bounded_exp(tokens.sequences.mean(tokens.gap))
    return _mask((ratio >= low) & (ratio <= high))


def veto(tokens: PolicyTokens, *, lowest: float) -> Correction:
    """0 for a sequence in which any `exp(d) < lowest`, else 1 (SLIME, verl)."""
    hopeless = (bounded_exp(tokens.gap) < lowest).float()
    return _mask(tokens.sequences.total(hopeless) == 0)


def opsm(tokens: PolicyTokens, *, threshold: float) -> Correction:
    """1 for the sequences with `A >= 0` or `K <= threshold`, else 0: `K = mean_t (log q - log p)`, A the sequence's.

    Source: off-policy sequence masking of DeepSeek-V3.2 (arXiv:2512.02556). `log p` is that of the policy now,
    `log q` that of sampling, so K covers the change of the weights and the gap between the two engines.
    """
    drift = tokens.sequences.mean(tokens.behaviour_logprobs - tokens.logprobs.detach())
    return _mask((tokens.sequences.mean(tokens.advantages) >= 0) | (drift <= threshold))


CORRECTIONS: Mapping[str, CorrectionFunction] = {
    "token_tis": token_tis,
    "sequence_tis": sequence_tis,
    "geometric_tis": geometric_tis,
    "segment_tis": segment_tis,
    "icepop": icepop,
    "sequence_mis": sequence_mis,
    "geometric_rejection": geometric_rejection,
    "veto": veto,
    "opsm": opsm,
}


def _capped(weight: torch.Tensor, cap: float) -> Correction:
    return Correction(factor=weight.clamp(max=cap), truncated=weight > cap)


def _banded(weight: torch.Tensor, low: float, high: float) -> Correction:
    keep = (weight >= low) & (weight <= high)
    return Correction(factor=weight * keep, truncated=torch.zeros_like(keep))


def _mask(keep: torch.Tensor) -> Correction:
    return Correction(factor=keep.float(), truncated=torch.zeros_like(keep))
