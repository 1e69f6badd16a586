"""Tensors as bytes: how batches and log-probabilities travel between actors.

A message is a magic word, the length of a JSON header, the header, then the tensors' own bytes in order:

    b"FLT1" | header length, 8 bytes little-endian | {"tensors": [[name, dtype, shape], ...]} | raw bytes

Nothing is pickled, so a message can neither run code nor depend on the version of a class, and its length is
known from its header: a message cut short is an error. The tensors of a message share one block of memory, a
copy of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields

import torch

from forgelite.types import TrainingBatch

_MAGIC = b"FLT1"
_PREFIX = len(_MAGIC) + 8
_ALIGNMENT = 16  # bytes; a tensor that starts on such a boundary can be viewed in place

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.int64,
        torch.int32,
        torch.bool,
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
    )
}
_BATCH_DTYPES = {
    "token_ids": torch.int64,
    "positions": torch.int64,
    "sequence_ids": torch.int32,
    "loss_mask": torch.bool,
    "logprobs": torch.float32,
    "versions": torch.int32,
    "advantages": torch.float32,
    "reference_logprobs": torch.float32,
}


def encode_batch(batch: TrainingBatch) -> bytes:
    """The batch as one message.

    Raises:
        ValueError: a tensor has another dtype than `TrainingBatch` says, or another shape than `token_ids`.
    """
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch) if getattr(batch, f.name) is not None}
    _check_batch(tensors)
    return _encode(tensors)


def decode_batch(data: bytes) -> TrainingBatch:
    """The batch in a message of `encode_batch`.

    Raises:
        ValueError: the message is cut short, too long, not a message, or not a batch.
    """
    tensors = _decode(data)
    _check_batch(tensors)
    return TrainingBatch(**tensors)


def encode_tensors(tensors: Sequence[torch.Tensor]) -> bytes:
    """Tensors of any shapes and dtypes as one message; their order is kept."""
    return _encode({str(index): tensor for index, tensor in enumerate(tensors)})


def decode_tensors(data: bytes) -> list[torch.Tensor]:
    """The tensors in a message of `encode_tensors`.

    Raises:
        ValueError: the message is cut short, too long, or not a message.
    """
    return list(_decode(data).values())


def _check_batch(tensors: Mapping[str, torch.Tensor]) -> None:
    missing = _BATCH_DTYPES.keys() - {"reference_logprobs"} - tensors.keys()
    unexpected = tensors.keys() - _BATCH_DTYPES.keys()
    if missing or unexpected:
        raise ValueError(f"not a training batch: missing {sorted(missing)}, unexpected {sorted(unexpected)}")
    shape = tensors["token_ids"].shape
    for name, tensor in tensors.items():
        if tensor.dtype != _BATCH_DTYPES[name] or tensor.shape != shape or tensor.ndim != 2:
            raise ValueError(
                f"training batch: {name} is {tensor.dtype} {tuple(tensor.shape)}, "
                f"not {_BATCH_DTYPES[name]} {tuple(shape)} with two dimensions"
            )


def _encode(tensors: Mapping[str, torch.Tensor]) -> bytes:
    entries, parts = [], []
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise ValueError(f"tensor {name} is {dtype}; only {sorted(_DTYPES)} can be sent")
        entries.append([name, dtype, list(tensor.shape)])
        raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        parts.append(raw.ljust(_padded(len(raw)), b"\0"))
    header = json.dumps({"tensors": entries}).encode()
    header = header.ljust(_padded(_PREFIX + len(header)) - _PREFIX)
    return b"".join([_MAGIC, len(header).to_bytes(8, "little"), header, *parts])


def _decode(data: bytes) -> dict[str, torch.Tensor]:
    if len(data) < _PREFIX or data[: len(_MAGIC)] != _MAGIC:
        raise ValueError(f"not a tensor message: {len(data)} bytes that start with {bytes(data[:8])!r}")
    start = _PREFIX + int.from_bytes(data[len(_MAGIC) : _PREFIX], "little")
    if start > len(data):
        raise ValueError(f"tensor message cut short: its header ends at byte {start}, it has {len(data)}")
    entries = json.loads(data[_PREFIX:start])["tensors"]
    sizes = [math.prod(shape) * _DTYPES[dtype].itemsize for _, dtype, shape in entries]
    expected = start + sum(_padded(size) for size in sizes)
    if len(data) != expected:
        raise ValueError(f"tensor message has {len(data)} bytes, its header promises {expected}")
    buffer = bytearray(data)  # torch wants writable memory; one copy for all tensors
    tensors, offset = {}, start
    for (name, dtype, shape), size in zip(entries, sizes, strict=True):
        count = math.prod(shape)
        flat = (
            torch.frombuffer(buffer, dtype=_DTYPES[dtype], count=count, offset=offset)
            if count
            else torch.empty(0, dtype=_DTYPES[dtype])
        )
        tensors[name] = flat.view(shape)
        offset += _padded(size)
    return tensors


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
