"""What is logged of ratios, corrections and the gap to the behaviour policy: parts that can be added up."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from forgelite.losses.divergence import k3
from forgelite.losses.inputs import LossInputs, masked
from forgelite.losses.tokens import Correction, PolicyTokens, bounded_exp

Parts = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
"""Scalars to be added up, and scalars of which the largest counts."""

AGES = ("0", "1", "2_3", "4_7", "8_up")
"""Ages, in versions, by which the gap is told apart."""
_FIRST_AGES = (1, 2, 4, 8)  # at which the second and each later entry of AGES starts


def ratio_parts(tokens: PolicyTokens, clipped: torch.Tensor) -> Parts:
    """Sums and maxima from which `ratio/*` is computed.

    The ratio is that of the policy now to the one that sampled, whatever the loss is anchored at, so that runs can be
    compared.

    Args:
        tokens: Of the microbatch.
        clipped: [R, L] bool, tokens at which a bound of the surrogate holds.

    Returns:
        Sums `ratio`, `ratio_squared` (for the effective sample size), `clipped`; maximum `ratio`.
    """
    ratio = masked(bounded_exp(tokens.logprobs.detach() - tokens.behaviour_logprobs), tokens.mask)
    sums = {"ratio": ratio.sum(), "ratio_squared": ratio.square().sum(), "clipped": (clipped & tokens.mask).sum()}
    return sums, {"ratio": ratio.max()}


def correction_parts(corrections: Mapping[str, Correction], factor: torch.Tensor, mask: torch.Tensor) -> Parts:
    """Sums and maxima from which `correction/*` is computed.

    Args:
        corrections: By name.
        factor: [R, L] their product.
        mask: [R, L] bool.

    Returns:
        Sums `correction/weight`, `correction/weight_squared`, and for each correction `correction/<name>/masked` and
        `correction/<name>/truncated` tokens; maximum `correction/weight`.
    """
    weight = masked(factor, mask)
    sums = {"correction/weight": weight.sum(), "correction/weight_squared": weight.square().sum()}
    for name, correction in corrections.items():
        sums[f"correction/{name}/masked"] = ((correction.factor == 0) & mask).sum()
        sums[f"correction/{name}/truncated"] = (correction.truncated & mask).sum()
    return sums, {"correction/weight": weight.max()}


def mismatch_parts(inputs: LossInputs, trainer_version: int) -> Parts:
    """Sums and maxima of |logprob - behaviour logprob| over the tokens sampled by the trainer's own version.

    For those tokens both sides have the same weights, so that the gap is what the two engines disagree by.
    Older tokens differ because the policy has changed, and are left out.

    Returns:
        Sums `mismatch`, `mismatch_tokens`; maximum `mismatch`.
    """
    same = inputs.mask & (inputs.versions == trainer_version)
    gap = masked(inputs.logprobs.detach() - inputs.behaviour_logprobs, same).abs()
    return {"mismatch": gap.sum(), "mismatch_tokens": same.sum()}, {"mismatch": gap.max()}


def gap_by_age(tokens: PolicyTokens, versions: torch.Tensor, trainer_version: int) -> Parts:
    """The divergence between the policy that sampled and the policy now, by the age of the token.

    Estimated by `exp(d) - 1 - d`, `d` the gap of the token: k3 of KL(behaviour || policy), since the tokens come from
    the behaviour policy.

    Args:
        tokens: Of the microbatch.
        versions: [R, L] int32, version that sampled the token.
        trainer_version: Version of the weights now.

    Returns:
        Sums `gap_kl/<age>` and `gap_tokens/<age>` for each of AGES; no maxima.
    """
    bounds = torch.tensor(_FIRST_AGES, device=versions.device, dtype=versions.dtype)
    bucket = torch.bucketize(trainer_version - versions, bounds, right=True).flatten()
    behaviour, now = tokens.behaviour_logprobs, tokens.logprobs.detach()
    divergence = masked(k3(behaviour, now, behaviour), tokens.mask).flatten()
    empty = divergence.new_zeros(len(AGES))
    totals = empty.index_add(0, bucket, divergence).unbind()
    counts = empty.index_add(0, bucket, tokens.mask.flatten().to(empty.dtype)).unbind()
    sums = {f"gap_kl/{age}": total for age, total in zip(AGES, totals, strict=True)}
    return sums | {f"gap_tokens/{age}": count for age, count in zip(AGES, counts, strict=True)}, {}
