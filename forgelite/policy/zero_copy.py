"""New weights without a copy: the parameters of a CPU engine become views of the shared memory they lie in.

vLLM holds some tensors of a checkpoint fused (q, k and v; gate and up) and the vocabulary padded. In the store's
segment such tensors lie side by side, and the padding is reserved, so that each parameter is one view. A swap is
then a change of pointers. The version stays leased for as long as it is served.

Experts are the exception: their kernel reads a packed layout. They are copied and packed, as in the other mode.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from forgelite.errors import ConfigError, WeightMismatch
from forgelite.policy import cpu_shims
from forgelite.policy.weights_loading import CheckpointSchema

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True, frozen=True)
class Binding:
    """One parameter of the engine and the tensors that it views.

    Example: `Binding(parameter="model.layers.0.mlp.gate_up_proj.weight",
    sources=("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"))`.
    """

    parameter: str  # vLLM's name
    sources: tuple[str, ...]  # checkpoint names, in the order of the parameter's rows


@dataclass(kw_only=True, slots=True, frozen=True)
class Bindings:
    """How every tensor of a checkpoint reaches the engine.

    Example: of a dense model `Bindings(viewed=(binding, ...), copied=frozenset())`.
    """

    viewed: tuple[Binding, ...]
    copied: frozenset[str]  # checkpoint names of experts


def bind(model: nn.Module, schema: CheckpointSchema) -> Bindings:
    """Find for every parameter of vLLM's model the tensors of the checkpoint that it consists of.

    Args:
        model: vLLM's, with live linears (`cpu_shims.keep_linears_live`).
        schema: of the checkpoint that it was loaded from.

    Raises:
        ConfigError: a parameter or a tensor has no counterpart, or their sizes differ.
    """
    expert_parameters = {id(p) for layer in cpu_shims.packed_expert_layers(model) for p in layer.parameters()}
    viewed = []
    for name, parameter in model.named_parameters():
        if id(parameter) not in expert_parameters:
            sources = _sources(name, model.packed_modules_mapping)
            _check_sizes(name, parameter, sources, schema)
            viewed.append(Binding(parameter=name, sources=sources))
    bound = {source for binding in viewed for source in binding.sources}
    rest = frozenset(schema.tensors.keys() - bound)
    if rest and not expert_parameters:
        raise ConfigError(
            f"weights.swap=zero_copy: vLLM's model has no parameter for {sorted(rest)[0]} and {len(rest) - 1} more "
            f"tensors of the checkpoint; set weights.swap=copy"
        )
    if rest:
        log.info("weights.swap=zero_copy: %d tensors of experts are copied and packed at every update", len(rest))
    return Bindings(viewed=tuple(viewed), copied=rest)


def prepare_swap(
    model: nn.Module, bindings: Bindings, tensors: Mapping[str, torch.Tensor], schema: CheckpointSchema
) -> Callable[[], None]:
    """Everything of a swap that can be done while the engine samples; returns what is left for between two steps.

    Args:
        model: as given to `bind`.
        bindings: what `bind` found.
        tensors: by checkpoint name, side by side as `weights.fused_order` says. They must stay as they are until
            another swap has been made.
        schema: of the checkpoint.

    Raises:
        WeightMismatch: the set does not fit the model, is of another dtype than the engine's, or does not lie as
            it must. Nothing was changed.
    """
    schema.check(tensors)
    parameters = dict(model.named_parameters())
    views = [
        (parameters[binding.parameter], _view(binding, parameters[binding.parameter], tensors))
        for binding in bindings.viewed
    ]
    experts = [(name, tensors[name]) for name in tensors if name in bindings.copied]

    @torch.no_grad()
    def swap() -> None:
        if experts:
            # Before the first pointer, so that a failure leaves the old weights whole.
            with cpu_shims.unpacked_experts(model):
                model.load_weights(experts)
        for parameter, view in views:
            parameter.data = view

    return swap


def _sources(parameter: str, packed: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The checkpoint names behind `parameter`; vLLM's other names are those of the checkpoint."""
    module, _, kind = parameter.rpartition(".")
    parent, _, last = module.rpartition(".")
    return tuple(f"{parent}.{member}.{kind}" for member in packed[last]) if last in packed else (parameter,)


def _check_sizes(name: str, parameter: nn.Parameter, sources: Sequence[str], schema: CheckpointSchema) -> None:
    absent = [source for source in sources if source not in schema.tensors]
    if absent:
        raise ConfigError(
            f"weights.swap=zero_copy: vLLM's parameter {name} consists of {', '.join(sources)}, and the checkpoint "
            f"has no {absent[0]}; set weights.swap=copy"
        )
    shapes = [schema.tensors[source].shape for source in sources]
    rows = sum(shape[0] for shape in shapes)
    padded = len(sources) == 1 and rows <= parameter.shape[0]  # the vocabulary
    if any(shape[1:] != parameter.shape[1:] for shape in shapes) or not (rows == parameter.shape[0] or padded):
        raise ConfigError(
            f"weights.swap=zero_copy: vLLM's parameter {name} is {tuple(parameter.shape)}, which {shapes} of the "
            f"checkpoint do not make up; set weights.swap=copy"
        )


def _view(binding: Binding, parameter: nn.Parameter, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    first = tensors[binding.sources[0]]
    if first.dtype != parameter.dtype:
        raise WeightMismatch(
            f"{binding.sources[0]} is {first.dtype} and the engine computes in {parameter.dtype}, which a view cannot "
            f"convert: set weights.transfer_dtype={str(parameter.dtype).removeprefix('torch.')}, or weights.swap=copy"
        )
    expected = first.data_ptr()
    for source in binding.sources:
        tensor = tensors[source]
        if tensor.data_ptr() != expected or not tensor.is_contiguous():
            raise _not_in_place(binding, f"{source} does not follow the one before it")
        expected += tensor.nbytes
    end = first.storage_offset() + parameter.numel()
    if end * first.element_size() > first.untyped_storage().nbytes():
        raise _not_in_place(binding, "no room is reserved for its padding")
    view = first.as_strided(parameter.shape, parameter.stride(), first.storage_offset())
    filled = sum(tensors[source].shape[0] for source in binding.sources)
    if view[filled:].any():
        raise _not_in_place(binding, "its padding is not zero")
    return view


def _not_in_place(binding: Binding, why: str) -> WeightMismatch:
    return WeightMismatch(
        f"the weights do not lie as vLLM's parameter {binding.parameter} needs them ({why}), so they cannot be used in "
        f"place: publish them through the store, or set weights.swap=copy"
    )
