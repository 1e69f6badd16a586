"""New weights for the model of a running engine.

Tensors arrive under the names of the Hugging Face checkpoint. vLLM ignores names that it does not know and
does not miss the ones that are absent, so the set is compared with the checkpoint the engine started from,
and every shape and dtype with it, before the first parameter is written: a set that does not fit leaves the
old weights whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forgelite.errors import ConfigError, WeightMismatch
from forgelite.policy import cpu_shims

_MOST_LISTED = 8  # names that an error shows before it only counts
_TIED_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # buffers in old checkpoints; vLLM computes them
_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(kw_only=True, slots=True, frozen=True)
class TensorSpec:
    """Shape and dtype of one tensor of a checkpoint.

    Example: `TensorSpec(shape=(128, 64), dtype=torch.bfloat16)`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(kw_only=True, slots=True, frozen=True)
class CheckpointSchema:
    """What a complete set of weights looks like.

    Example: the schema of a tied model of one tensor: `CheckpointSchema(tensors={"model.embed_tokens.weight":
    spec}, tied_head=True, engine_dtype=torch.float32)`.
    """

    tensors: Mapping[str, TensorSpec]  # by checkpoint name
    tied_head: bool  # the output head is the embedding; sending it as well is allowed, if it is equal
    engine_dtype: torch.dtype  # what the engine computes in

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise unless `tensors` is exactly such a set.

        A tensor may have the dtype of the engine or the one it has in the checkpoint, which is converted as
        it was at start-up. Any other conversion would lose or invent digits unasked.

        Raises:
            WeightMismatch: lists missing and unexpected names, wrong shapes and wrong dtypes.
        """
        optional = {_TIED_HEAD} if self.tied_head else set()
        faults = _listed("missing", self.tensors.keys() - tensors.keys() - optional)
        faults += _listed("unexpected", tensors.keys() - self.tensors.keys() - optional)
        shapes, dtypes = [], []
        for name in tensors.keys() & self.tensors.keys():
            spec, tensor = self.tensors[name], tensors[name]
            if tuple(tensor.shape) != spec.shape:
                shapes.append(f"{name} is {tuple(tensor.shape)}, not {spec.shape}")
            if tensor.dtype not in (self.engine_dtype, spec.dtype):
                dtypes.append(f"{name} is {tensor.dtype}")
        faults += _listed("wrong shape", shapes)
        faults += _listed(f"neither {self.engine_dtype} nor the checkpoint's dtype", dtypes)
        if not faults and self.tied_head and {_TIED_HEAD, _EMBEDDING} <= tensors.keys():
            faults += _tied_head_fault(tensors[_TIED_HEAD], tensors[_EMBEDDING])
        if faults:
            raise WeightMismatch(
                "these weights do not fit the policy's model, which keeps its old ones. " + "; ".join(faults)
            )


def read_schema(model_path: str | Path, *, tied_head: bool, engine_dtype: torch.dtype) -> CheckpointSchema:
    """The schema of a checkpoint folder, from the headers of its safetensors files.

    Args:
        model_path: a folder with `config.json` and `*.safetensors`.
        tied_head: whether the output head is the embedding ("tie_word_embeddings" in config.json).
        engine_dtype: what the engine computes in.

    Raises:
        ConfigError: the folder holds no safetensors file, or one with a dtype that cannot be updated.
    """
    tensors: dict[str, TensorSpec] = {}
    for file in sorted(Path(model_path).glob("*.safetensors")):
        for name, entry in _safetensors_header(file).items():
            if name.endswith(_IGNORED_SUFFIXES):
                continue
            if entry["dtype"] not in _SAFETENSORS_DTYPES:
                raise ConfigError(
                    f"model.path: {file.name} holds {name} as {entry['dtype']}; a policy can only be updated "
                    f"in {sorted(_SAFETENSORS_DTYPES)}, so start from a checkpoint that is not quantised"
                )
            dtype = _SAFETENSORS_DTYPES[entry["dtype"]]
            tensors[name] = TensorSpec(shape=tuple(entry["shape"]), dtype=dtype)
    if not tensors:
        raise ConfigError(f"model.path={model_path} holds no *.safetensors file with weights")
    if tied_head:
        tensors.pop(_TIED_HEAD, None)
    return CheckpointSchema(tensors=tensors, tied_head=tied_head, engine_dtype=engine_dtype)


def prepare_copy(
    model_runner: Any, tensors: Mapping[str, torch.Tensor], schema: CheckpointSchema
) -> Callable[[], None]:
    """Check a complete set of weights; returns what writes it into the model, to be called between two steps.

    The KV cache is left as it is; the caller resets it.

    Args:
        model_runner: vLLM's own, in this process. Its type differs by device and has no public base.
        tensors: by checkpoint name, on any device, only read.
        schema: of the checkpoint that the engine started from.

    Raises:
        WeightMismatch: the set does not fit. What is returned raises whatever vLLM raises in the middle of the
            write, and the model is then half old, half new.
    """
    schema.check(tensors)
    weights = [(name, tensor) for name, tensor in tensors.items() if name in schema.tensors]
    if model_runner.device.type == "cpu":
        return lambda: _write(model_runner.get_model(), weights)
    # vLLM's own route: re-creates kernel layouts (experts) and keeps the addresses that CUDA graphs hold.
    return lambda: model_runner.reload_weights(weights_iterator=weights)


@torch.no_grad()
def _write(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    with cpu_shims.unpacked_experts(model):
        written = model.load_weights(weights)
    missed = {name for name, _ in model.named_parameters()} - (written or set())
    if missed:
        raise RuntimeError("; ".join(_listed("vLLM did not write", missed)))


def _tied_head_fault(head: torch.Tensor, embedding: torch.Tensor) -> list[str]:
    if torch.equal(head, embedding):
        return []
    return [f"{_TIED_HEAD} differs from {_EMBEDDING}, to which it is tied"]


def _listed(what: str, items: Iterable[str]) -> list[str]:
    ordered = sorted(items)
    if not ordered:
        return []
    rest = f" and {len(ordered) - _MOST_LISTED} more" if len(ordered) > _MOST_LISTED else ""
    return [f"{what}: {', '.join(ordered[:_MOST_LISTED])}{rest}"]


def _safetensors_header(file: Path) -> dict[str, dict[str, Any]]:
    """The header of a safetensors file: eight bytes with its length, then JSON by tensor name."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return header
