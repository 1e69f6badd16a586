from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest
import torch
from torch import nn

from forgelite.errors import ConfigError, WeightMismatch
from forgelite.policy.weights_loading import CheckpointSchema, TensorSpec
from forgelite.policy.zero_copy import bind, prepare_swap
from forgelite.weights import arena_layout


class Model(nn.Module):
    """What vLLM makes of two projections and a vocabulary of 5."""

    packed_modules_mapping: ClassVar = {"gate_up_proj": ["gate_proj", "up_proj"]}

    def __init__(self, *, rows: int = 6, vocabulary: int = 64) -> None:
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.gate_up_proj = nn.Linear(4, rows, bias=False)
        self.embed_tokens = nn.Embedding(vocabulary, 4)


def tensors(value: float, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {
        "mlp.up_proj.weight": torch.full((3, 4), value + 0.5, dtype=dtype),
        "embed_tokens.weight": torch.full((5, 4), value, dtype=dtype),
        "mlp.gate_proj.weight": torch.full((3, 4), value, dtype=dtype),
    }


def schema(engine_dtype: torch.dtype = torch.float32) -> CheckpointSchema:
    specs = {name: TensorSpec(shape=tuple(t.shape), dtype=t.dtype) for name, t in tensors(0.0).items()}
    return CheckpointSchema(tensors=specs, tied_head=False, engine_dtype=engine_dtype)


def in_slot(given: Mapping[str, torch.Tensor], *, fill: int = 0) -> dict[str, torch.Tensor]:
    layout = arena_layout.plan(given, slots=2, retained=1, fingerprinted=False)
    views = arena_layout.slot_views(layout, torch.full((layout.total_bytes,), fill, dtype=torch.uint8), 0)
    for name, tensor in given.items():
        views[name].copy_(tensor)
    return views


def test_fused_and_padded_parameters_become_views_in_vllms_order() -> None:
    model, views = Model(), in_slot(tensors(1.0))
    prepare_swap(model, bind(model, schema()), views, schema())()

    assert torch.equal(model.mlp.gate_up_proj.weight[:, 0], torch.tensor([1.0, 1.0, 1.0, 1.5, 1.5, 1.5]))
    assert model.mlp.gate_up_proj.weight.data_ptr() == views["mlp.gate_proj.weight"].data_ptr()
    assert torch.equal(model.embed_tokens.weight[:, 0], torch.tensor([1.0] * 5 + [0.0] * 59))
    assert model.embed_tokens.weight.data_ptr() == views["embed_tokens.weight"].data_ptr()


def test_nothing_changes_before_the_swap_is_made() -> None:
    model, first = Model(), in_slot(tensors(1.0))
    bindings = bind(model, schema())
    prepare_swap(model, bindings, first, schema())()
    swap = prepare_swap(model, bindings, in_slot(tensors(2.0)), schema())
    assert model.mlp.gate_up_proj.weight.data_ptr() == first["mlp.gate_proj.weight"].data_ptr()
    swap()
    assert bool((model.embed_tokens.weight[:5] == 2.0).all())


def test_tensors_with_a_gap_between_them_are_refused_by_name() -> None:
    model = Model()
    with pytest.raises(
        WeightMismatch, match=r"mlp.gate_up_proj.weight needs them \(mlp.up_proj.weight does not follow"
    ):
        prepare_swap(model, bind(model, schema()), tensors(1.0), schema())


def test_padding_that_is_not_zero_is_refused() -> None:
    model = Model()
    with pytest.raises(WeightMismatch, match=r"embed_tokens.weight needs them \(its padding is not zero\)"):
        prepare_swap(model, bind(model, schema()), in_slot(tensors(1.0), fill=1), schema())


def test_padding_beyond_the_memory_is_refused() -> None:
    model, views = Model(), in_slot(tensors(1.0))
    views["embed_tokens.weight"] = torch.zeros(5, 4)
    with pytest.raises(WeightMismatch, match=r"embed_tokens.weight needs them \(no room is reserved"):
        prepare_swap(model, bind(model, schema()), views, schema())


def test_another_dtype_than_the_engines_is_refused_with_the_key_that_changes_it() -> None:
    model = Model().to(torch.bfloat16)  # of a float32 checkpoint: a copy would convert
    with pytest.raises(WeightMismatch, match=r"a view cannot convert: set weights.transfer_dtype=bfloat16"):
        prepare_swap(model, bind(model, schema()), in_slot(tensors(1.0)), schema(torch.bfloat16))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Model(rows=8), r"mlp.gate_up_proj.weight is \(8, 4\), which .* do not make up"),
        (Model(vocabulary=4), r"embed_tokens.weight is \(4, 4\), which .* do not make up"),
    ],
    ids=["rows", "too small"],
)
def test_a_parameter_that_the_checkpoint_does_not_make_up_is_a_configuration_error(model: Model, message: str) -> None:
    with pytest.raises(ConfigError, match=f"weights.swap=zero_copy: vLLM's parameter {message}"):
        bind(model, schema())


def test_a_tensor_without_a_parameter_is_a_configuration_error() -> None:
    model = Model()
    del model.embed_tokens
    with pytest.raises(ConfigError, match=r"has no parameter for embed_tokens.weight and 0 more"):
        bind(model, schema())
