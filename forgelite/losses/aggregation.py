"""From the losses of tokens to the loss of a batch."""

from __future__ import annotations

import torch

from forgelite.losses.inputs import masked


def token_mean(per_token: torch.Tensor, mask: torch.Tensor, denominator: float) -> torch.Tensor:
    """This microbatch's share of the mean over all trained tokens: `sum(mask * per_token) / denominator`.

    The denominator is that of the whole batch on all ranks, so that neither the split into microbatches nor
    the number of ranks changes the sum of the shares (token-mean aggregation as in DAPO, arXiv:2503.14476).

    Args:
        per_token: [R, L] loss of each token.
        mask: [R, L] bool.
        denominator: Trained tokens in the whole batch, before any correction masks some of them.

    Returns:
        A scalar. Without a trained token it is zero, and still part of the graph.
    """
    if denominator <= 0:
        raise ValueError(f"the loss is averaged over {denominator} tokens: a batch needs a trained token")
    return masked(per_token, mask).sum() / denominator
