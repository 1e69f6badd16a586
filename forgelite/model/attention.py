"""Attention over packed rows on a CPU.

None of torchtitan's attention back ends trains on a CPU (varlen needs CUDA's flash attention, flex has no
CPU backward, sdpa is refused for language models). `CpuAttention` takes their place. It is a
`VarlenAttention`, so that torchtitan shards it like one, but its `attention_masks` are a mask made once per
forward by `row_mask`. On CUDA torchtitan's own module is used and its own metadata are handed over.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.models.common.decoder import Decoder


class CpuAttention(VarlenAttention):
    """Causal attention inside each sequence of a packed row, by `scaled_dot_product_attention`."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        torch.nn.Module.__init__(self)  # VarlenAttention's own would look for a CUDA flash attention
        if config.window_size != (-1, 0):
            raise ValueError(f"only causal attention without a window, not window_size={config.window_size}")
        self.window_size = config.window_size

    def forward(  # torchtitan's sharding looks the first three parameters up by name
        self,
        q_BLNH: torch.Tensor,  # [B, L, heads, head_dim]
        k_BLNH: torch.Tensor,  # [B, L, key-value heads, head_dim]
        v_BLNH: torch.Tensor,
        *,
        attention_masks: torch.Tensor | None,  # [B, 1, L, L], added to the scores; None: one sequence a row
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:  # [B, L, heads, head_dim]
        q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=attention_masks,
            is_causal=attention_masks is None,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return out.transpose(1, 2)


def use_cpu_attention(config: Decoder.Config) -> None:
    """Replace the attention back end of every layer of a torchtitan model config, in place."""
    for layer in config.layers:
        layer.attention.inner_attention = CpuAttention.Config()


def attention_masks(model: Decoder, positions: torch.Tensor) -> object:
    """What the model's attention needs to know of a packed batch, made once for all layers.

    Args:
        model: A torchtitan decoder.
        positions: [R, L] int64, restart at 0 where a sequence starts; every row starts at 0.
    """
    if isinstance(model.config.first_attention.inner_attention, CpuAttention.Config):
        return row_mask(positions)
    return model.get_attention_masks(positions)


def row_mask(positions: torch.Tensor) -> torch.Tensor | None:
    """The additive mask [R, 1, L, L] float32 of packed rows: 0 inside a sequence up to the query, else -inf.

    None where every row is a single sequence: plain causal attention, which is faster without a mask.
    """
    starts = positions == 0
    if not starts[:, 1:].any():
        return None
    rows, length = positions.shape
    sequence = starts.cumsum(1)
    visible = (sequence[:, :, None] == sequence[:, None, :]).tril()
    return torch.zeros(rows, 1, length, length).masked_fill_(~visible[:, None], float("-inf"))
