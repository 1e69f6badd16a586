"""Log-probabilities of the tokens of a packed batch.

The output matrix is the largest of most models, so logits are computed only at the positions that predict a
trained token, and nothing of their softmax but one number a row is kept for the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torchtitan.models.common.decoder import Decoder

from forgelite.model.attention import attention_masks
from forgelite.types import TrainingBatch

_CHUNK = 2**24  # float32 logits worked on at once: 64 MB


@dataclass(kw_only=True, slots=True)
class TokenScores:
    """What the model says of the tokens of a batch. Zero where a token is not trained."""

    logprobs: torch.Tensor  # [R, L] float32, of token t given the tokens before it
    entropy: torch.Tensor | None  # [R, L] float32 in nats, without gradient; None: not asked for


def score_tokens(
    model: Decoder,
    batch: TrainingBatch,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    device: torch.device | None = None,
) -> TokenScores:
    """Log-probability (and entropy) of each trained token of a batch under `model`.

    Args:
        model: A torchtitan decoder whose `_skip_lm_head` is set, so that its forward gives hidden states.
        batch: Packed rows on the CPU. Tokens outside the loss mask are read as context only.
        temperature: Divides the logits; the temperature at which the tokens were sampled.
        with_entropy: Also give the entropy of the distribution that predicts each trained token.
        device: Where the model is. None: the CPU.

    Raises:
        ValueError: a trained token starts a sequence, so that nothing predicts it.
    """
    device = device or torch.device("cpu")
    rows, length = batch.token_ids.shape
    trained = batch.loss_mask.flatten().nonzero().squeeze(1)  # on the CPU: a GPU would have to wait here
    if (batch.positions.flatten()[trained] == 0).any():
        raise ValueError("a trained token starts a sequence: nothing predicts it, so it cannot be trained")
    if trained.numel() == 0:
        # A rank without trained tokens still runs the whole model; the number it gets is multiplied away.
        chosen, weight = torch.tensor([0]), 0.0
        predicted_by = chosen
    else:
        chosen, weight = trained, 1.0
        predicted_by = trained - 1

    positions = batch.positions.to(device, non_blocking=True)
    hidden = model(
        batch.token_ids.to(device, non_blocking=True),
        positions=positions,
        attention_masks=attention_masks(model, positions),
    )
    hidden = hidden.full_tensor() if isinstance(hidden, DTensor) else hidden
    selected = hidden.flatten(0, 1).index_select(0, predicted_by.to(device, non_blocking=True))
    logits = model.lm_head(selected[None])
    logits = (logits.full_tensor() if isinstance(logits, DTensor) else logits)[0]  # [N, V]
    chosen = chosen.to(device, non_blocking=True)
    targets = batch.token_ids.flatten().to(device, non_blocking=True).index_select(0, chosen)

    logprobs, entropy = _ChosenLogprobs.apply(logits, targets, 1.0 / temperature, with_entropy)
    empty = logprobs.new_zeros(rows * length)
    return TokenScores(
        logprobs=empty.index_copy(0, chosen, logprobs * weight).view(rows, length),
        entropy=empty.index_copy(0, chosen, entropy * weight).view(rows, length) if with_entropy else None,
    )


class _ChosenLogprobs(torch.autograd.Function):
    """Row-wise `log_softmax(scale * logits)[target]` and entropy in float32, chunk by chunk.

    With p = softmax(scale * logits), the derivative of the chosen log-probability by a logit is
    scale * (1[chosen] - p). Only the logits and the row sums are kept; p is computed again.
    """

    @staticmethod
    def forward(ctx, logits, targets, scale, with_entropy):  # [N, V], [N] int64
        logprobs = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
        entropy = torch.empty_like(logprobs) if with_entropy else None
        log_sum = torch.empty_like(logprobs)
        for part in _chunks(logits):
            scaled = logits[part].float() * scale
            log_sum[part] = scaled.logsumexp(1)
            logprobs[part] = scaled.gather(1, targets[part, None]).squeeze(1) - log_sum[part]
            if entropy is not None:
                scaled -= log_sum[part, None]
                entropy[part] = -(scaled.exp() * scaled.clamp(min=torch.finfo(torch.float32).min)).sum(1)
        ctx.save_for_backward(logits, targets, log_sum)
        ctx.scale = scale
        if entropy is not None:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad, _):  # [N]
        logits, targets, log_sum = ctx.saved_tensors
        out = torch.empty_like(logits)
        for part in _chunks(logits):
            weight = grad[part, None] * ctx.scale
            p = (logits[part].float() * ctx.scale).sub_(log_sum[part, None]).exp_()
            p.mul_(-weight).scatter_add_(1, targets[part, None], weight)
            out[part] = p
        return out, None, None, None


def _chunks(logits: torch.Tensor) -> list[slice]:
    rows = max(1, _CHUNK // max(1, logits.shape[1]))
    return [slice(start, start + rows) for start in range(0, logits.shape[0], rows)]
