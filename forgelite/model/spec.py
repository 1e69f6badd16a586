"""From `model.*` to a torchtitan model: one way for a name with a flavour and for a Hugging Face folder."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, fields, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import (
    get_attention_config,
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.param_init import depth_scaled_std, skip_param_init
from torchtitan.models.llama3 import Llama3Model, parallelize_llama
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec

from forgelite.config.schema import ModelConfig
from forgelite.errors import ConfigError
from forgelite.model.attention import use_cpu_attention
from forgelite.model.hf_config import (
    Architecture,
    Experts,
    RopeScaling,
    architecture_of,
    config_of,
    read_config,
)

_SUPPORTED = ("llama3", "qwen3")


@dataclass(kw_only=True, slots=True)
class ModelDefinition:
    """Everything about a model but its weights."""

    arch: Architecture
    spec: ModelSpec
    hf_config: dict[str, Any]  # config.json, as read or as made up
    folder: Path | None  # Hugging Face folder with the starting weights; None: random ones
    companions: tuple[
        Path, ...
    ]  # folders whose other files (tokenizer, generation config) belong to the model; the last wins


def define_model(config: ModelConfig, *, device: torch.device, max_seq_len: int) -> ModelDefinition:
    """The model that `model.*` asks for.

    Args:
        config: `model.path`, or `model.name` and `model.flavor`, or both.
        device: Where it will run; decides the attention back end.
        max_seq_len: Longest sequence that will be computed: the size of the rotary caches, one a layer.

    Raises:
        ConfigError: unknown name or flavour, unsupported architecture, or a folder that does not hold the
            model that name and flavour say.
    """
    arch = hf_config = folder = None
    if config.name is not None:
        arch = _named_architecture(config.name, config.flavor)
        hf_config = config_of(arch)
    if config.path is not None:
        folder = Path(config.path)
        hf_config = read_config(folder)
        found = architecture_of(hf_config, f"model.path={config.path}")
        if arch is not None:
            _check_agreement(arch, found, config)
        arch = found
    if max_seq_len > arch.max_positions:
        raise ConfigError(f"trainer.training.seq_len={max_seq_len} exceeds the model's {arch.max_positions} positions")
    spec = _spec(replace(arch, max_positions=max_seq_len), config.flavor or "hf")
    if device.type == "cpu":
        use_cpu_attention(spec.model)
    companions = tuple(Path(p) for p in (config.path, config.tokenizer) if p is not None)
    return ModelDefinition(arch=arch, spec=spec, hf_config=hf_config, folder=folder, companions=companions)


def _named_architecture(name: str, flavor: str) -> Architecture:
    if name not in _SUPPORTED:
        raise ConfigError(f"model.name={name} is not supported, only {', '.join(_SUPPORTED)}")
    module = importlib.import_module(f"torchtitan.models.{name}")
    flavors = getattr(module, f"{name}_configs")
    if flavor not in flavors:
        raise ConfigError(f"model.flavor={flavor} is not one of {name}'s: {', '.join(flavors)}")
    moe = {"moe_comm_backend": "standard"} if "moe_comm_backend" in signature(flavors[flavor]).parameters else {}
    return _architecture_of_titan(name, module.model_registry(flavor, attn_backend="varlen", **moe).model)


def _architecture_of_titan(name: str, model: Decoder.Config) -> Architecture:
    layer = model.layers[0]
    attention, rope, moe = layer.attention, layer.attention.rope, layer.moe
    return Architecture(
        family=name,
        vocab_size=model.vocab_size,
        dim=model.dim,
        layers=len(model.layers),
        heads=attention.n_heads,
        kv_heads=attention.n_kv_heads or attention.n_heads,
        head_dim=attention.head_dim or model.dim // attention.n_heads,
        hidden=layer.feed_forward.w1.out_features if moe is None else moe.routed_experts.inner_experts.hidden_dim,
        eps=model.norm.eps,
        rope_theta=rope.theta,
        rope_scaling=RopeScaling(
            factor=rope.scaling_factor,
            low_freq_factor=rope.low_freq_factor,
            high_freq_factor=rope.high_freq_factor,
            original_max_position_embeddings=rope.original_max_position_embeddings,
        )
        if rope.scaling == "llama"
        else None,
        max_positions=rope.max_seq_len,
        tied=model.enable_weight_tying,
        experts=None
        if moe is None
        else Experts(
            count=moe.num_experts,
            per_token=moe.router.top_k,
            hidden=moe.routed_experts.inner_experts.hidden_dim,
        ),
    )


def _check_agreement(named: Architecture, found: Architecture, config: ModelConfig) -> None:
    # A checkpoint may extend the context or set another epsilon; these do not make it another model.
    free = {"max_positions", "eps", "rope_theta", "rope_scaling"}
    free |= {"hidden"} if found.experts is not None else set()
    different = [
        f"{f.name}: {getattr(found, f.name)} against {getattr(named, f.name)}"
        for f in fields(Architecture)
        if f.name not in free and getattr(found, f.name) != getattr(named, f.name)
    ]
    if different:
        raise ConfigError(
            f"model.path={config.path} is not model.name={config.name} model.flavor={config.flavor}: "
            f"{'; '.join(different)}. Leave one of them out."
        )


def _spec(arch: Architecture, flavor: str) -> ModelSpec:
    llama = arch.family == "llama3"
    output_std = arch.dim**-0.5 if llama else 0.02
    config = (Llama3Model if llama else Qwen3Model).Config(
        dim=arch.dim,
        vocab_size=arch.vocab_size,
        enable_weight_tying=arch.tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=arch.vocab_size,
            embedding_dim=arch.dim,
            param_init={"weight": skip_param_init} if arch.tied else _normal(1.0 if llama else 0.02),
        ),
        norm=_norm(arch.dim, arch.eps),
        lm_head=Linear.Config(
            in_features=arch.dim,
            out_features=arch.vocab_size,
            param_init=_truncated(output_std, 3 * output_std),
        ),
        layers=[_layer(arch, index) for index in range(arch.layers)],
    )
    return ModelSpec(
        name=arch.family,
        flavor=flavor,
        model=config,
        parallelize_fn=parallelize_llama if llama else parallelize_qwen3,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=Llama3StateDictAdapter if llama else Qwen3StateDictAdapter,
    )


def _layer(arch: Architecture, index: int) -> Any:  # a TransformerBlock.Config of either family
    llama = arch.family == "llama3"
    residual = _normal(depth_scaled_std(0.02, index) if llama else 0.02)
    block = (Llama3TransformerBlock if llama else Qwen3TransformerBlock).Config
    return block(
        attention_norm=_norm(arch.dim, arch.eps),
        ffn_norm=_norm(arch.dim, arch.eps),
        attention=make_gqa_config(
            dim=arch.dim,
            n_heads=arch.heads,
            n_kv_heads=arch.kv_heads,
            head_dim=arch.head_dim,
            wqkv_param_init=_normal(0.02),
            wo_param_init=residual,
            inner_attention=get_attention_config("varlen"),
            fuse_qkv=True,
            rope=_rope(arch),
            qk_norm=None if llama else _norm(arch.head_dim, arch.eps),
        ),
        feed_forward=None
        if arch.experts is not None
        else make_ffn_config(
            dim=arch.dim, hidden_dim=arch.hidden, w1_param_init=_normal(0.02), w2w3_param_init=residual
        ),
        moe=_moe(arch),
    )


def _moe(arch: Architecture) -> Any:  # a MoE.Config, or None
    experts = arch.experts
    if experts is None:
        return None
    init = partial(nn.init.normal_, std=0.02)
    return make_moe_config(
        num_experts=experts.count,
        router=make_router_config(
            dim=arch.dim,
            num_experts=experts.count,
            gate_param_init=_normal(0.02),
            top_k=experts.per_token,
            score_func="softmax",
            route_norm=True,
        ),
        routed_experts=make_routed_experts_config(
            dim=arch.dim,
            hidden_dim=experts.hidden,
            num_experts=experts.count,
            top_k=experts.per_token,
            param_init={"w1_EFD": init, "w2_EDF": init, "w3_EFD": init},
            comm_backend="standard",
        ),
        # A balancing bias changes the routing and has no name in a Hugging Face checkpoint, so the policy
        # would route differently from the trainer.
        load_balance_coeff=None,
    )


def _rope(arch: Architecture) -> Any:  # a RoPE.Config of either family
    if arch.family == "qwen3":
        return CosSinRoPE.Config(dim=arch.head_dim, max_seq_len=arch.max_positions, theta=arch.rope_theta)
    scaling = arch.rope_scaling
    options = (
        {}
        if scaling is None
        else {
            "scaling_factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    )
    return ComplexRoPE.Config(
        dim=arch.head_dim,
        max_seq_len=arch.max_positions,
        theta=arch.rope_theta,
        scaling="none" if scaling is None else "llama",
        **options,
    )


def _norm(size: int, eps: float) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=size, eps=eps, param_init={"weight": nn.init.ones_})


def _normal(std: float) -> dict[str, Any]:
    return {"weight": partial(nn.init.normal_, std=std)}


def _truncated(std: float, bound: float) -> dict[str, Any]:
    return {"weight": partial(nn.init.trunc_normal_, std=std, a=-bound, b=bound)}
