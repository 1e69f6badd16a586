"""The copy of a whole version out of a slot, with the fingerprint of what arrived."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch

from forgelite.weights.fingerprint import combine, fingerprint_of
from forgelite.weights.manifest import describe, memory_of
from forgelite.weights.transfer import copy, copy_many, is_move

Tensors = Mapping[str, torch.Tensor]


def read_into(target: Tensors, source: Tensors, *, digested: bool = False, threads: int = 1) -> str | None:
    """Copy every tensor of `source` into the one of its name in `target`.

    Args:
        target: name -> tensor of any strides and device.
        source: name -> tensor of the same shape.
        digested: whether to take the fingerprint.
        threads: how many copy, at most.

    Returns:
        The fingerprint of what lies in `target` afterwards; None if it was not asked for. Where every tensor is
        moved byte by byte to a place of its own, it is taken of the blocks while they are in the cache. Otherwise
        `target` is read once more.
    """
    if not _arrives_as_it_leaves(target, source):
        for name, tensor in source.items():
            copy(target[name], tensor)
        return fingerprint_of({name: target[name] for name in source}) if digested else None
    distinct = {memory_of(tensor): name for name, tensor in source.items()}  # tied tensors are copied once
    pairs = [(target[name], source[name]) for name in distinct.values()]
    digests = copy_many(pairs, digested=digested, threads=threads)
    if digests is None:
        return None
    by_memory = dict(zip(distinct, digests, strict=True))
    return combine(describe(source), {name: by_memory[memory_of(tensor)] for name, tensor in source.items()})


def _arrives_as_it_leaves(target: Tensors, source: Tensors) -> bool:
    """Whether the bytes moved out of `source` are those that lie in `target` when all are moved.

    Not so when a target is strided or on another device, or when two of them overlap without being tied in
    `source`: the second would overwrite the first.
    """
    if not all(is_move(target[name], tensor) for name, tensor in source.items()):
        return False
    places = {memory_of(tensor): target[name] for name, tensor in source.items()}
    if any(memory_of(target[name]) != memory_of(places[memory_of(tensor)]) for name, tensor in source.items()):
        return False
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in places.values() if t.nbytes)
    return all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
