"""Advantages of a whole batch brought to one scale."""

from __future__ import annotations

import torch

from forgelite.losses.inputs import masked

_EPS = 1e-8  # added to the variance


def whitened(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`(A - mean) / sqrt(var + 1e-8)` over the trained tokens of the whole batch, on all ranks together.

    As in REINFORCE++ (arXiv:2501.03262, section 3.2; verl's `masked_whiten`). The variance is that of the sample
    (n - 1). A longer sequence has more tokens and counts more.

    Args:
        advantages: [R, L] float32, of the whole batch.
        mask: [R, L] bool.

    Returns:
        [R, L] float32, 0 where a token is not trained.
    """
    trained = advantages[mask].double()
    centred = trained - trained.mean()
    variance = centred.square().sum() / max(1, trained.numel() - 1)
    scaled = masked(advantages.double(), mask) - trained.mean()
    return masked((scaled * (variance + _EPS).rsqrt()).float(), mask)
