from __future__ import annotations

import torch

from forgelite.weights import arena_layout
from forgelite.weights.fused_order import padded_rows, side_by_side

LAYER = "model.layers.0."


def test_projections_that_an_engine_fuses_form_groups_in_its_order() -> None:
    tensors = {
        f"{LAYER}self_attn.k_proj.weight": torch.zeros(2, 8),
        f"{LAYER}mlp.up_proj.weight": torch.zeros(6, 8),
        f"{LAYER}self_attn.q_proj.weight": torch.zeros(4, 8),
        f"{LAYER}mlp.down_proj.weight": torch.zeros(8, 6),
        f"{LAYER}self_attn.v_proj.weight": torch.zeros(2, 8),
        f"{LAYER}self_attn.v_proj.bias": torch.zeros(2),
        f"{LAYER}mlp.gate_proj.weight": torch.zeros(6, 8),
    }
    assert list(side_by_side(tensors)) == [
        tuple(f"{LAYER}self_attn.{member}_proj.weight" for member in "qkv"),
        (f"{LAYER}mlp.gate_proj.weight", f"{LAYER}mlp.up_proj.weight"),
        (f"{LAYER}mlp.down_proj.weight",),
        (f"{LAYER}self_attn.v_proj.bias",),
    ]


def test_experts_and_projections_that_do_not_fit_together_stay_alone() -> None:
    tensors = {
        "mlp.experts.0.gate_proj.weight": torch.zeros(6, 8),
        "mlp.experts.0.up_proj.weight": torch.zeros(6, 8),
        "mlp.gate_proj.weight": torch.zeros(6, 8),
        "mlp.up_proj.weight": torch.zeros(6, 8, dtype=torch.bfloat16),
    }
    assert list(side_by_side(tensors)) == [(name,) for name in tensors]


def test_the_vocabulary_is_padded_to_sixty_four_rows_and_nothing_else_is() -> None:
    assert padded_rows("model.embed_tokens.weight", 65) == 128
    assert padded_rows("lm_head.weight", 64) == 64
    assert padded_rows("model.norm.weight", 65) == 65


def test_a_group_lies_without_a_gap_and_the_padding_belongs_to_nobody() -> None:
    tensors = {
        "embed_tokens.weight": torch.zeros(5, 3),
        "mlp.gate_proj.weight": torch.zeros(5, 3),
        "mlp.up_proj.weight": torch.zeros(5, 3),
        "norm.weight": torch.zeros(3),
    }
    layout = arena_layout.plan(tensors, slots=2, retained=1, fingerprinted=False)
    offsets = {entry.info.name: entry.offset for entry in layout.entries}
    assert offsets["mlp.gate_proj.weight"] >= 64 * 3 * 4
    assert offsets["mlp.up_proj.weight"] == offsets["mlp.gate_proj.weight"] + 5 * 3 * 4
    assert offsets["norm.weight"] % 64 == 0
    assert list(offsets) == list(tensors)


def test_a_tensor_travels_in_the_transfer_dtype_unless_it_is_no_wide_float() -> None:
    tensors = {
        "wide": torch.zeros(3),
        "eight": torch.zeros(3).to(torch.float8_e4m3fn),
        "ids": torch.zeros(3, dtype=torch.int32),
    }
    layout = arena_layout.plan(tensors, slots=2, retained=1, fingerprinted=False, transfer_dtype=torch.bfloat16)
    assert [(e.info.dtype, e.nbytes) for e in layout.entries] == [("bfloat16", 6), ("float8_e4m3fn", 3), ("int32", 12)]
