"""A directory of weights without a store behind it, and sets of tensors that are hard to move."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from forgelite.errors import VersionUnavailable
from forgelite.weights import SHARED_MEMORY, Manifest


class MemoryDirectory:
    """A Directory in this process's memory that keeps an account of what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int | None]] = []
        self._manifests: dict[int, Manifest] = {}
        self._latest: Manifest | None = None

    async def put_manifest(self, version: int, manifest: Manifest) -> None:
        self.calls.append(("put", version))
        self._manifests[version] = self._latest = manifest

    async def get(self, version: int) -> Manifest:
        self.calls.append(("get", version))
        if version not in self._manifests:
            raise VersionUnavailable(f"version {version} is unknown")
        return self._manifests[version]

    async def latest(self) -> Manifest:
        self.calls.append(("latest", None))
        if self._latest is None:
            raise VersionUnavailable("nothing was put")
        return self._latest

    async def drop(self, version: int) -> None:
        self.calls.append(("drop", version))
        self._manifests.pop(version, None)


def own_segments() -> list[Path]:
    """The segments in shared memory that this process made."""
    return [path for path in SHARED_MEMORY.iterdir() if f"-{os.getpid()}-" in path.name]


def awkward_tensors() -> dict[str, torch.Tensor]:
    """Every layout and dtype that a checkpoint has been seen to hold, and the names that go with them."""
    torch.manual_seed(0)
    base = torch.randn(6, 8)
    embedding = torch.nn.Parameter(torch.randn(5, 4))
    return {
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "offset": base.flatten()[3:11],
        "expanded": torch.randn(1, 4).expand(3, 4),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 7),
        "model.embed/with spaces.weight": embedding,
        "lm_head.weight": embedding,
        "bf16": torch.randn(3, 5).bfloat16(),
        "fp16": torch.randn(3).half(),
        "fp8": torch.randn(9).to(torch.float8_e4m3fn),
        "fp64": torch.randn(2, dtype=torch.float64),
        "int8": torch.arange(-5, 6, dtype=torch.int8),
        "int64": torch.tensor([-(2**62), 2**62]),
        "bool": torch.tensor([True, False, True]),
        "complex": torch.randn(2, 3, dtype=torch.complex64),
        "conjugate": torch.randn(2, 3, dtype=torch.complex64).conj(),
        "not a number": torch.tensor([float("nan"), float("inf"), -0.0]),
    }


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors have equal shape, dtype and bytes; tells -0.0 from 0.0 and takes NaN for itself."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    bits = [t.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
    return torch.equal(*bits)
