"""The copy of tensors into others, and the digest of their bytes on the way.

A copy between two contiguous CPU tensors of one dtype is a memmove. With the threshold of
`mesh.environment.COPIES` glibc writes large ones around the cache, which saves the read of every line that is
about to be overwritten: about half of the time of `copy_`.

The digest is taken block by block, of the source, right after the block was copied: the block still lies in the
core's cache, where XXH3 is several times as fast as from memory. A second pass over the same bytes would cost as
much as the copy itself. docs/weights.md has the figures.

Large sets of tensors are shared by a few threads: both copy and digest run outside of the interpreter's lock, one core
does not fill the memory's bandwidth, and where no other core is free nothing is lost.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import xxhash

# Larger blocks have left the second-level cache before they are hashed; smaller ones fall below the threshold from
# which glibc writes around the cache.
BLOCK_BYTES = 1 << 18
# Of threads that share a copy. Every block hands the interpreter's lock over twice, and waking up for it costs more
# than what of a larger block has left the cache.
SHARED_BLOCK_BYTES = 1 << 21

MAX_THREADS = 4  # that share a copy; from four on the bandwidth of the memory is the limit
_WORTH_A_THREAD = 1 << 25  # bytes: a few milliseconds, many times what it costs to start one
_SHARED = (
    1 << 19
)  # bytes of a tensor, on average: of smaller ones the interpreter does most of the work, under its lock


def copy_many(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, digested: bool, threads: int | None = None
) -> list[int] | None:
    """Copy each source into its target.

    Args:
        pairs: (target, source), as for `copy`; no two targets overlap.
        digested: whether to take digests.
        threads: that share the pairs; None: one, and for large tensors one more for each 32 MB, as far as there are
            cores, at most `MAX_THREADS`.

    Returns:
        The digest of each pair, as of `copy_digested`; None if they were not asked for.
    """
    count = _threads_for(pairs) if threads is None else threads
    digests = [0] * len(pairs)
    # The largest first, each to whoever is free: the threads end at about the same time.
    order = iter(sorted(range(len(pairs)), key=lambda i: -pairs[i][1].nbytes)) if count > 1 else iter(range(len(pairs)))
    if count == 1:
        _copy_each(order, pairs, digests if digested else None, BLOCK_BYTES)
    else:
        work = partial(_copy_each, order, pairs, digests if digested else None, SHARED_BLOCK_BYTES)
        with ThreadPoolExecutor(count, thread_name_prefix="weights-copy") as pool:
            for share in [pool.submit(work) for _ in range(count)]:
                share.result()
    return digests if digested else None


def _threads_for(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> int:
    nbytes = sum(source.nbytes for _, source in pairs)
    if nbytes < _SHARED * len(pairs):
        return 1
    return min(1 + nbytes // _WORTH_A_THREAD, len(os.sched_getaffinity(0)), MAX_THREADS)


@torch.inference_mode()  # a target may be a parameter that needs gradients, or made in inference mode
def _copy_each(
    order: Iterator[int],
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    digests: list[int] | None,
    block_bytes: int,
) -> None:
    for i in order:  # several threads may draw from it: a step of this iterator holds the interpreter's lock
        target, source = pairs[i]
        if digests is None:
            _copy(target, source)
        else:
            digests[i] = _copy_digested(target, source, block_bytes)


@torch.inference_mode()
def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` into `target`, converting the dtype where it differs.

    Args:
        target: of the shape of `source`, any strides and device.
        source: any strides and device.
    """
    _copy(target, source)


@torch.inference_mode()
def copy_digested(target: torch.Tensor, source: torch.Tensor) -> int:
    """Copy as `copy` does, and return the digest of the bytes that were copied.

    In a move it is the digest of the source, read once more from the cache; otherwise that of the target.

    Args:
        target: of the shape of `source`, any strides and device.
        source: any strides and device.

    Returns:
        The digest that `fingerprint.tensor_digest` has for `target` afterwards.
    """
    return _copy_digested(target, source, BLOCK_BYTES)


def is_move(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether copying is moving bytes: both contiguous, on the CPU, of one shape and dtype."""
    return (
        target.dtype == source.dtype
        and target.shape == source.shape
        and target.is_cpu
        and source.is_cpu
        and target.is_contiguous()
        and source.is_contiguous()
        and not (source.is_conj() or source.is_neg() or target.is_conj() or target.is_neg())
    )


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """[nbytes] The bytes of a tensor in row-major order; a view where it is contiguous and on the CPU."""
    if tensor.is_cpu and tensor.is_contiguous() and tensor.nbytes and not (tensor.is_conj() or tensor.is_neg()):
        # Ten times as fast as the way over NumPy, which counts with thousands of small tensors.
        array = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
        array.owner = tensor  # keeps the memory
        return memoryview(array).cast("B")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.resolve_conj().resolve_neg().view(torch.uint8).numpy())


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if is_move(target, source):
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        target.copy_(source)


def _copy_digested(target: torch.Tensor, source: torch.Tensor, block_bytes: int) -> int:
    if is_move(target, source):
        return _move_digested(target, source, block_bytes)
    state = xxhash.xxh3_64()
    if target.is_cpu and target.is_contiguous() and source.is_contiguous() and target.shape == source.shape:
        # Converted block by block, for the same reason.
        flat_target, flat_source = target.detach().reshape(-1), source.detach().reshape(-1)
        elements = max(1, block_bytes // target.element_size())
        for start in range(0, target.numel(), elements):
            part = flat_target[start : start + elements]
            part.copy_(flat_source[start : start + elements])
            state.update(bytes_of(part))
    else:
        target.copy_(source)
        state.update(bytes_of(target))
    return state.intdigest()


def _move_digested(target: torch.Tensor, source: torch.Tensor, block_bytes: int) -> int:
    nbytes, to, origin = source.nbytes, target.data_ptr(), source.data_ptr()
    read = bytes_of(source)
    if nbytes <= block_bytes:
        ctypes.memmove(to, origin, nbytes)
        return xxhash.xxh3_64_intdigest(read)
    state = xxhash.xxh3_64()
    for start in range(0, nbytes, block_bytes):
        size = min(block_bytes, nbytes - start)
        ctypes.memmove(to + start, origin + start, size)
        state.update(read[start : start + size])
    return state.intdigest()
