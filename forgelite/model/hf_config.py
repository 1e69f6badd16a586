"""What is read from a Hugging Face config.json, and what is refused.

`Architecture` is the small common ground of a config.json and a torchtitan model config. Anything in a
config.json that would change the numbers and is not in it is refused by name: a model that silently computes
something else than the one it was loaded from is worse than none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from forgelite.errors import ConfigError

_FAMILIES = {"LlamaForCausalLM": "llama3", "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3"}
# Values under which an option changes nothing. Absent counts as the first.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1.0, 1, None),
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], None),
    "quantization_config": (None,),
}


@dataclass(kw_only=True, slots=True, frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of the rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(kw_only=True, slots=True, frozen=True)
class Experts:
    """The mixture-of-experts part of every layer."""

    count: int
    per_token: int
    hidden: int


@dataclass(kw_only=True, slots=True, frozen=True)
class Architecture:
    """All that is needed to build a llama3 or qwen3 decoder.

    Example: `Architecture(family="qwen3", vocab_size=151936, dim=1024, layers=28, heads=16, kv_heads=8,
    head_dim=128, hidden=3072, eps=1e-6, rope_theta=1e6, rope_scaling=None, max_positions=40960, tied=True,
    experts=None)` is Qwen3-0.6B.
    """

    family: str  # torchtitan's name: llama3 or qwen3
    vocab_size: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int  # of the feed-forward; not used where there are experts
    eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_positions: int
    tied: bool
    experts: Experts | None


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a Hugging Face folder.

    Raises:
        ConfigError: there is none.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"model.path={folder}: there is no config.json in it")
    return json.loads(file.read_text())


def architecture_of(config: Mapping[str, Any], source: str) -> Architecture:
    """The architecture that a config.json describes.

    Args:
        config: The parsed config.json.
        source: Where it comes from, for messages.

    Raises:
        ConfigError: the architecture or one of its options is not supported; the message names it.
    """
    names = config.get("architectures") or [None]
    family = _FAMILIES.get(names[0])
    if family is None:
        raise ConfigError(f"{source}: architecture {names[0]} is not supported, only {', '.join(_FAMILIES)}")
    for option, neutral in _NEUTRAL.items():
        value = config.get(option, neutral[0])
        if value not in neutral:
            raise ConfigError(f"{source}: {option}={value!r} is not supported, only {neutral[0]!r}")
    if family == "qwen3" and "sliding_attention" in (config.get("layer_types") or []):
        raise ConfigError(f"{source}: layer_types has sliding_attention, which is not supported")
    rope_theta, rope_scaling = _rope(config, family, source)
    dim, heads = config["hidden_size"], config["num_attention_heads"]
    return Architecture(
        family=family,
        vocab_size=config["vocab_size"],
        dim=dim,
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        # transformers' own default for Qwen3 is 128, whatever the other sizes
        head_dim=config.get("head_dim") or (dim // heads if family == "llama3" else 128),
        hidden=config["intermediate_size"],
        eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_positions=config["max_position_embeddings"],
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=_experts(config, source) if names[0] == "Qwen3MoeForCausalLM" else None,
    )


def config_of(arch: Architecture) -> dict[str, Any]:
    """A config.json for a model that did not come from one."""
    if arch.experts is not None:
        name, model_type = "Qwen3MoeForCausalLM", "qwen3_moe"
    else:
        name, model_type = {"llama3": ("LlamaForCausalLM", "llama"), "qwen3": ("Qwen3ForCausalLM", "qwen3")}[
            arch.family
        ]
    config: dict[str, Any] = {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.dim,
        "intermediate_size": arch.hidden,
        "num_hidden_layers": arch.layers,
        "num_attention_heads": arch.heads,
        "num_key_value_heads": arch.kv_heads,
        "head_dim": arch.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": arch.eps,
        "rope_theta": arch.rope_theta,
        "max_position_embeddings": arch.max_positions,
        "tie_word_embeddings": arch.tied,
        "attention_bias": False,
    }
    if arch.rope_scaling is not None:
        config["rope_scaling"] = {"rope_type": "llama3"} | {
            f.name: getattr(arch.rope_scaling, f.name) for f in fields(arch.rope_scaling)
        }
    if arch.experts is not None:
        config |= {
            "num_experts": arch.experts.count,
            "num_experts_per_tok": arch.experts.per_token,
            "moe_intermediate_size": arch.experts.hidden,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config


def _experts(config: Mapping[str, Any], source: str) -> Experts:
    if not config.get("norm_topk_prob", False):  # transformers' default
        raise ConfigError(f"{source}: norm_topk_prob=False is not supported: expert weights must add up to 1")
    return Experts(
        count=config.get("num_experts") or config["num_local_experts"],
        per_token=config["num_experts_per_tok"],
        hidden=config["moe_intermediate_size"],
    )


def _rope(config: Mapping[str, Any], family: str, source: str) -> tuple[float, RopeScaling | None]:
    # transformers 5 writes rope_parameters; earlier ones wrote rope_theta and rope_scaling
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = parameters.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"{source}: partial_rotary_factor={parameters['partial_rotary_factor']} is not supported")
    if kind == "default":
        return theta, None
    if kind != "llama3" or family != "llama3":
        raise ConfigError(f"{source}: rope scaling {kind!r} is not supported for {family}")
    return theta, RopeScaling(**{f.name: parameters[f.name] for f in fields(RopeScaling)})
