"""A whole version as one run of bytes, for carriers whose cost is by the key and not by the byte.

8 bytes: length of the index    index (JSON)    the tensors, as they lie in a slot of the arena
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch

from forgelite.weights import arena_layout
from forgelite.weights.transfer import copy

_LENGTH_BYTES = 8


def pack(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """[nbytes] uint8 Copies of all tensors, tied ones once, with what is needed to take them apart.

    Args:
        tensors: name -> plain strided tensor of any device, dtype and stride.
    """
    layout = arena_layout.plan(tensors, slots=2, retained=1, fingerprinted=False)
    index = json.dumps([(e.info.name, e.info.shape, e.info.dtype, e.offset, e.nbytes) for e in layout.entries]).encode()
    start = _start(len(index))
    packed = torch.empty(start + layout.slot_bytes, dtype=torch.uint8)
    packed[:_LENGTH_BYTES] = torch.tensor([len(index)]).view(torch.uint8)
    packed[_LENGTH_BYTES : _LENGTH_BYTES + len(index)] = torch.frombuffer(bytearray(index), dtype=torch.uint8)
    done: set[tuple[int, int]] = set()
    for entry in layout.entries:
        if entry.place not in done:  # tied tensors once
            copy(_view(packed, start + entry.offset, entry.info.dtype, entry.info.shape), tensors[entry.info.name])
            done.add(entry.place)
    return packed


def unpack(packed: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of `pack`, as views of its bytes.

    Args:
        packed: [nbytes] uint8, contiguous.
    """
    length = int(packed[:_LENGTH_BYTES].view(torch.int64))
    index = bytes(packed[_LENGTH_BYTES : _LENGTH_BYTES + length].numpy())
    start = _start(length)
    return {name: _view(packed, start + offset, dtype, shape) for name, shape, dtype, offset, _ in json.loads(index)}


def _start(index_bytes: int) -> int:
    return (_LENGTH_BYTES + index_bytes + arena_layout.PAGE - 1) // arena_layout.PAGE * arena_layout.PAGE


def _view(packed: torch.Tensor, offset: int, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    like = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    return packed[offset : offset + like.nbytes].view(like.dtype).view(like.shape)
