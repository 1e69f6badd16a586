"""The copy of a whole version out of a slot, with the fingerprint of what arrived."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch

from forgelite.weights.fingerprint import combine, fingerprint_of
from forgelite.weights.manifest import describe
from forgelite.weights.transfer import copy, copy_many, is_move

Tensors = Mapping[str, torch.Tensor]
Place = tuple[int, int, torch.dtype, torch.Size]


def read_into(target: Tensors, source: Tensors, *, digested: bool = False) -> str | None:
    """Copy every tensor of `source` into the one of its name in `target`.

    Args:
        target: name -> tensor of any strides and device.
        source: name -> tensor of the same shape.
        digested: whether to take the fingerprint.

    Returns:
        The fingerprint of what lies in `target` afterwards; None if it was not asked for. Where every tensor is
        moved byte by byte to a place of its own, it is taken of the blocks while they are in the cache. Otherwise
        `target` is read once more.
    """
    pairs = _moves(target, source)
    if pairs is None:
        for name, tensor in source.items():
            copy(target[name], tensor)
        return fingerprint_of({name: target[name] for name in source}) if digested else None
    digests = copy_many(list(pairs.values()), digested=digested)
    if digests is None:
        return None
    by_place = dict(zip(pairs, digests, strict=True))
    return combine(describe(source), {name: by_place[_place(tensor)] for name, tensor in source.items()})


def _moves(target: Tensors, source: Tensors) -> dict[Place, tuple[torch.Tensor, torch.Tensor]] | None:
    """The (target, source) pairs to move, tied ones once, by the place of their source.

    None unless the bytes that are moved are those that lie in `target` when all are moved. Not so when a target is
    strided or on another device, or when two of them overlap without being tied in `source`: the second would
    overwrite the first.
    """
    pairs: dict[Place, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, tensor in source.items():
        into = target[name]
        if not is_move(into, tensor):
            return None
        first, _ = pairs.setdefault(_place(tensor), (into, tensor))
        if first is not into and first.data_ptr() != into.data_ptr():
            return None
    spans = sorted((start := into.data_ptr(), start + into.nbytes) for into, _ in pairs.values() if into.nbytes)
    return pairs if all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)) else None


def _place(tensor: torch.Tensor) -> Place:
    # Of contiguous tensors equal exactly when they are tied; empty ones have no memory to share.
    return (tensor.data_ptr(), tensor.nbytes, tensor.dtype, tensor.shape)
