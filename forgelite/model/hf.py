"""Weights in and out of a model, under the names and in the layout of Hugging Face checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model_spec import ModelSpec

from forgelite.errors import ConfigError, WeightMismatch
from forgelite.model.spec import ModelDefinition

_SHARD_BYTES = 5 * 2**30
_WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".safetensors.index.json",
    ".bin.index.json",
)


def load_hf(model: Decoder, spec: ModelSpec, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy a Hugging Face checkpoint into a model, which may be sharded. A collective: all ranks call it.

    Args:
        model: The model, on its device.
        spec: What it was built from.
        tensors: Whole tensors by Hugging Face name, on every rank, of any float type.

    Raises:
        WeightMismatch: a tensor is missing, unexpected or of another shape; the message names it.
    """
    given = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    _check_names(given, dict(_expected(model, spec)))
    if spec.model.enable_weight_tying and "lm_head.weight" in given:
        if not torch.equal(given["lm_head.weight"], given["model.embed_tokens.weight"]):
            raise WeightMismatch("lm_head.weight differs from model.embed_tokens.weight, but the config ties them")
        del given["lm_head.weight"]
    converted = spec.state_dict_adapter(spec.model, None).from_hf(given)
    current = model.state_dict()
    model.load_state_dict({name: _placed(tensor, current[name]) for name, tensor in converted.items()}, strict=True)


def read_hf(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the safetensors files in a folder, by name.

    Raises:
        ConfigError: there are none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model.path={folder}: there are no safetensors in it")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
    return tensors


def export_hf(model: Decoder, spec: ModelSpec) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights by Hugging Face name, one whole tensor at a time. A collective: all ranks draw to the end.

    The tensors may share memory with the model: copy what is to be kept past the next optimizer step. A tied
    head is not listed, as in the checkpoints of transformers.
    """
    adapter = spec.state_dict_adapter(spec.model, None)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            yield from adapter.to_hf({name: whole.detach()}).items()


def export_hf_shards(model: Decoder, spec: ModelSpec) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights by Hugging Face name, as this process holds them. A collective: all ranks draw to the end.

    A tensor that is spread over the ranks comes as a distributed one. A fused q/k/v, which has to be taken apart,
    is gathered, but of one layer at a time. Experts come from the ranks that hold them. Otherwise as `export_hf`.
    """
    adapter = spec.state_dict_adapter(spec.model, None)
    with torch.no_grad():
        for prefix, part in _model_parts(model):
            for name, tensor in part.state_dict(prefix=prefix).items():
                yield from adapter.to_hf({name: tensor.detach()}).items()


def describe_hf(model: Decoder, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """A tensor on the meta device for each whole tensor that `export_hf` gives, by its name. A collective."""
    adapter = spec.state_dict_adapter(spec.model, None)
    described: dict[str, torch.Tensor] = {}
    for prefix, part in _model_parts(model):
        for name, tensor in part.state_dict(prefix=prefix).items():
            described |= adapter.to_hf({name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")})
    return described


def _model_parts(model: Decoder) -> Iterator[tuple[str, torch.nn.Module]]:
    """The layers one by one, and whatever else the model has, each with the prefix of its names."""
    for name, part in model.named_children():
        if name == "layers":
            yield from ((f"layers.{number}.", layer) for number, layer in part.named_children())
        else:
            yield f"{name}.", part


def write_hf_folder(folder: Path, definition: ModelDefinition, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write config.json, the tokenizer files of the starting model and the weights as safetensors.

    Written beside its place and renamed, so that a reader sees the old folder, none, or the whole new one.

    Args:
        folder: The folder to make or to replace.
        definition: Model and origin of config and tokenizer.
        tensors: Whole tensors by Hugging Face name.
    """
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        dtype = _write_safetensors(work, tensors)
        config = {k: v for k, v in definition.hf_config.items() if k != "torch_dtype"} | {"dtype": dtype}
        (work / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for source in definition.companions:
            _copy_companions(source, work)
        work.chmod(0o777 & ~_umask())
        replace_folder(work, folder)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def replace_folder(new: Path, folder: Path) -> None:
    """Put `new` in the place of `folder`, which may exist, by renames in one directory."""
    if not folder.exists():
        os.rename(new, folder)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
    os.rename(folder, old)
    os.rename(new, folder)
    shutil.rmtree(old)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _expected(model: Decoder, spec: ModelSpec) -> Iterator[tuple[str, torch.Size]]:
    adapter = spec.state_dict_adapter(spec.model, None)
    for name, tensor in model.state_dict().items():
        shape_only = torch.empty(tensor.shape, device="meta")
        yield from ((hf_name, t.shape) for hf_name, t in adapter.to_hf({name: shape_only}).items())


def _check_names(given: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Size]) -> None:
    allowed = set(expected) | {"lm_head.weight"}
    problems = [f"missing {name}" for name in sorted(set(expected) - set(given))]
    problems += [f"unexpected {name}" for name in sorted(set(given) - allowed)]
    problems += [
        f"{name} is {tuple(given[name].shape)}, not {tuple(shape)}"
        for name, shape in expected.items()
        if name in given and given[name].shape != shape
    ]
    if problems:
        raise WeightMismatch(f"the checkpoint does not fit the model: {'; '.join(problems)}")


def _placed(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if not isinstance(like, DTensor):
        return tensor
    local = tensor.to(like.device, like.dtype)
    return distribute_tensor(local, like.device_mesh, like.placements)


def _write_safetensors(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    shards: list[dict[str, torch.Tensor]] = [{}]
    size, total, dtype = 0, 0, torch.float32
    for name, tensor in tensors:
        if size + tensor.nbytes > _SHARD_BYTES and shards[-1]:
            _write_shard(folder, shards)
            shards.append({})
            size = 0
        shards[-1][name] = tensor.detach().to("cpu", copy=True).contiguous()
        size, total, dtype = size + tensor.nbytes, total + tensor.nbytes, tensor.dtype
    _write_shard(folder, shards)
    _name_shards(folder, shards, total)
    return str(dtype).removeprefix("torch.")


def _write_shard(folder: Path, shards: list[dict[str, torch.Tensor]]) -> None:
    save_file(shards[-1], folder / f"shard-{len(shards)}", metadata={"format": "pt"})
    shards[-1] = dict.fromkeys(shards[-1])  # written: only the names are still needed


def _name_shards(folder: Path, shards: list[dict[str, Any]], total: int) -> None:
    if len(shards) == 1:
        (folder / "shard-1").rename(folder / "model.safetensors")
        return
    index = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number}").rename(folder / file)
        index |= dict.fromkeys(names, file)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
    (folder / "model.safetensors.index.json").write_text(text + "\n")


def _copy_companions(source: Path, target: Path) -> None:
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name != "config.json" and not file.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(file, target / file.name)
