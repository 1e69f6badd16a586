"""From the rewards of one group to its advantages. Pure functions of numbers; failed members are not among them."""

from __future__ import annotations

import math
from collections.abc import Sequence


def group_normalised(rewards: Sequence[float], eps: float = 1e-4) -> list[float]:
    """`(r - mean) / (std + eps)` with the sample standard deviation (n - 1), as in GRPO.

    Source: DeepSeekMath (2024), equation 4; eps and the sample deviation as in TRL.
    A group of one, or of equal rewards, gets zeros.
    """
    centred = group_centred(rewards)
    if len(rewards) < 2:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + eps) for c in centred]


def group_centred(rewards: Sequence[float], eps: float = 0.0) -> list[float]:
    """`r - mean`, as in Dr.GRPO (Liu et al., 2025). `eps` has no effect here."""
    del eps
    mean = math.fsum(rewards) / len(rewards)
    return [r - mean for r in rewards]


def has_no_variance(rewards: Sequence[float]) -> bool:
    """Whether all rewards are equal, so that every advantage is zero and the group teaches nothing."""
    return all(r == rewards[0] for r in rewards)


ADVANTAGES = {"group_normalised": group_normalised, "group_centred": group_centred}
