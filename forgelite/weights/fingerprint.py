"""A 64-bit fingerprint of a set of tensors, equal on both ends when the bytes are.

Every tensor gets an XXH3-64 digest of all its bytes in row-major order; the fingerprint is the XXH3-64 digest
of the sorted lines (name, dtype, shape, digest). So it notices a value that flipped anywhere, two tensors
that changed places and a tensor that was left over from an older version, and depends neither on the order of
the mapping nor on strides, storage or ties. The digests of parts can be computed by different processes.

XXH3 is not a cryptographic hash: it guards against faults, not against an adversary. It is chosen for its
speed: it costs about half of a copy of the same bytes, zlib's crc32 and adler32 cost two to three copies. A
plain sum is no faster and misses values that changed places.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash

from forgelite.weights.manifest import describe, memory_of


@torch.inference_mode()  # also reads tensors that were made in inference mode
def fingerprint_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """The fingerprint of `tensors` as 16 hexadecimal digits.

    Args:
        tensors: name -> tensor of any strided layout, dtype and device. Those of other devices are copied to
        the
            CPU, and those that are not contiguous are copied too.
    """
    digests: dict[tuple[object, ...], int] = {}  # tied tensors are read once
    lines = []
    for info, tensor in zip(describe(tensors), tensors.values(), strict=True):
        memory = memory_of(tensor)
        if memory not in digests:
            digests[memory] = _digest(tensor)
        lines.append(f"{info.name!r} {info.dtype} {info.shape} {digests[memory]:016x}")
    return xxhash.xxh3_64_hexdigest("\n".join(sorted(lines)).encode())


def _digest(tensor: torch.Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return xxhash.xxh3_64_intdigest(flat.view(torch.uint8).numpy())
