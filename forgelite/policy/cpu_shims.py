"""What vLLM 0.32 needs on a CPU to take new weights while it runs. Nothing here is used on a GPU.

After loading, vLLM packs the weights of every linear layer and of the experts into layouts of the CPU kernels
and serves from the packed copies. A later write to the parameters is then lost, or fails. Each function below
undoes one such effect, or another that a CPU alone has; `tests/engines/test_policy_shims.py` shows for each what
goes wrong without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn


def allow_amx() -> None:
    """Ask the operating system for the AMX tile registers.

    vLLM picks its AMX attention kernel for bfloat16 from the CPU's feature flags alone. Without this
    permission, which is granted per process, that kernel dies of SIGILL. oneDNN asks too when it multiplies
    in bfloat16, so whether the first step survives would depend on which kernels the sizes of the model
    happen to select. Does nothing on a CPU without AMX.
    """
    torch.cpu._init_amx()


def keep_linears_live() -> None:
    """Make every linear layer compute with its parameter, not with a packed copy. Call before the model is
    built.

    vLLM packs a linear's weight into a closure and leaves an empty parameter behind: `model.load_weights`
    then fails, and a tied output head keeps serving its old copy. A plain `F.linear` reads the parameter at
    every call. In float32 it is also the faster of the two.
    """
    import vllm.model_executor.layers.utils as layer_utils

    pack = layer_utils.dispatch_cpu_unquantized_gemm
    if hasattr(pack, "replaces"):  # an engine was built in this process before
        return

    def dispatch(layer: nn.Module, remove_weight: bool) -> None:
        if layer.weight.ndim != 2 or layer.weight.is_meta:
            pack(layer, remove_weight)
        else:
            layer.cpu_linear = nn.functional.linear

    dispatch.replaces = pack
    layer_utils.dispatch_cpu_unquantized_gemm = dispatch


def hold_generators_of_partial_prefills(model_runner: Any) -> None:
    """Keep the generator of a sequence from the sampler until the last part of its prompt is prefilled.

    Where a prompt, or what is prefilled again after an update, exceeds the tokens of a step, it is prefilled in parts.
    vLLM samples a token after each part, throws it away, and rewinds the generator by an offset that the generators
    of a CPU do not have: the step raises and the engine is dead. A generator that was not drawn from need not be
    rewound, and what is sampled does not depend on how a prompt was cut.

    Args:
        model_runner: vLLM's, after the model is loaded.
    """
    sample = model_runner.sample_tokens

    def sample_tokens(grammar_output: Any) -> Any:
        batch = model_runner.input_batch
        partial = np.flatnonzero(model_runner.discard_request_mask.np[: batch.num_reqs]).tolist()
        held = {index: batch.generators.pop(index) for index in partial if index in batch.generators}
        try:
            return sample(grammar_output)
        finally:
            batch.generators.update(held)

    model_runner.sample_tokens = sample_tokens


@contextmanager
def unpacked_experts(model: nn.Module) -> Iterator[None]:
    """Give the experts unpacked parameters to load into, and pack them again at the end of the block.

    The expert kernel reads a packed layout that is kept in the parameters themselves. A checkpoint written
    over it is read as if it were packed, and vLLM packs only once, at start-up. Costs a second copy of the
    experts during the block. When the block raises, the packed weights of before are put back.
    """
    packed: list[tuple[nn.Parameter, torch.Tensor]] = []
    layers = list(packed_expert_layers(model))
    for layer in layers:
        for name, raw in _raw_expert_shapes(layer).items():
            parameter = getattr(layer, name)
            packed.append((parameter, parameter.data))
            parameter.data = torch.zeros(raw, dtype=parameter.dtype, device=parameter.device)
    try:
        yield
    except BaseException:
        for parameter, data in packed:
            parameter.data = data
        raise
    for layer in layers:
        layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def register_architecture(architectures: list[str]) -> None:
    """Load the model classes of a checkpoint into vLLM's registry.

    vLLM inspects an architecture that it knows by name only in a child interpreter, 9 seconds on two cores,
    and caches the answer on disk. A class that is already loaded is inspected in place.

    Args:
        architectures: the names under "architectures" in config.json. Unknown ones are left to vLLM's own
            error.
    """
    from vllm import ModelRegistry

    for name in architectures:
        entry = ModelRegistry.models.get(name)
        if entry is not None and hasattr(entry, "module_name"):
            ModelRegistry.register_model(name, entry.load_model_cls())


def packed_expert_layers(model: nn.Module) -> Iterator[Any]:
    """The layers whose expert kernel reads a packed layout."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(layer, "w13_weight"):
            yield layer


def _raw_expert_shapes(layer: nn.Module) -> dict[str, torch.Size]:
    """The shapes that the parameters had before packing, which may pad them; vLLM records them for
    reloading."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    raw, _ = get_layerwise_info(layer).restore_metadata
    return {name: raw[name].shape for name in ("w13_weight", "w2_weight", "w13_bias") if name in raw}
