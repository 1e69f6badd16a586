"""A 64-bit fingerprint of a set of tensors, equal on both ends when the bytes are.

Every tensor gets an XXH3-64 digest of all its bytes in row-major order; the fingerprint is the XXH3-64 digest
of the sorted lines (name, dtype, shape, digest). So it notices a value that flipped anywhere, two tensors
that changed places and a tensor that was left over from an older version, and depends neither on the order of
the mapping nor on strides, storage or ties. The digests of parts can be computed by different processes, and
while the parts are copied (`transfer.copy_digested`).

XXH3 is not a cryptographic hash: it guards against faults, not against an adversary. It is chosen for its
speed: 50 GB/s from a core's cache, and as fast as memory can be read otherwise. zlib's crc32 and adler32 cost
two to three copies. A plain sum is no faster and misses values that changed places.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import xxhash

from forgelite.weights.manifest import TensorInfo, describe, memory_of
from forgelite.weights.transfer import bytes_of


@torch.inference_mode()  # also reads tensors that were made in inference mode
def fingerprint_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """The fingerprint of `tensors` as 16 hexadecimal digits.

    Args:
        tensors: name -> tensor of any strided layout, dtype and device. Those of other devices are copied to
            the CPU, and those that are not contiguous are copied too.
    """
    known: dict[tuple[object, ...], int] = {}  # tied tensors are read once
    digests = {}
    for name, tensor in tensors.items():
        memory = memory_of(tensor)
        if memory not in known:
            known[memory] = tensor_digest(tensor)
        digests[name] = known[memory]
    return combine(describe(tensors), digests)


def tensor_digest(tensor: torch.Tensor) -> int:
    """The 64-bit digest of the bytes of one tensor in row-major order."""
    return xxhash.xxh3_64_intdigest(bytes_of(tensor))


def combine(tensors: Iterable[TensorInfo], digests: Mapping[str, int]) -> str:
    """The fingerprint, from what is known of each tensor.

    Args:
        tensors: what the bytes mean.
        digests: name -> digest of the bytes, for every one of them.
    """
    lines = (f"{info.name!r} {info.dtype} {info.shape} {digests[info.name]:016x}" for info in tensors)
    return xxhash.xxh3_64_hexdigest("\n".join(sorted(lines)).encode())
