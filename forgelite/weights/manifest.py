"""What a published version consists of, and the check of a set of tensors against it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from forgelite.errors import WeightMismatch

if TYPE_CHECKING:
    import torch

Carrier = Literal["shm", "rdma", "torchstore", "filesystem"]

_NAMES_SHOWN = 8


@dataclass(kw_only=True, slots=True, frozen=True)
class TensorInfo:
    """The name, shape and dtype of one tensor.

    Example: `TensorInfo(name="model.norm.weight", shape=(128,), dtype="bfloat16")`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's own name without "torch."


@dataclass(kw_only=True, slots=True, frozen=True)
class StoredPiece:
    """Where a rectangular part of one tensor lies.

    Example: rows 4 to 7 of `w`: `StoredPiece(name="w", start=(4, 0), shape=(4, 16), host="b",
    segment="/dev/shm/forgelite-toy-47-9c1d02ab.weights", offset=8192)`.
    """

    name: str  # of the tensor
    start: tuple[int, ...]  # index of the first element in the whole tensor
    shape: tuple[int, ...]
    host: str
    segment: str  # path of the shared-memory segment there
    offset: int  # bytes from the start of the version's slot


@dataclass(kw_only=True, slots=True, frozen=True)
class Manifest:
    """One committed version of the weights: where it lies and what is in it.

    Example: `Manifest(version=8, carrier="shm", segment="/dev/shm/forgelite-toy-4711-9c1d02ab.weights",
    tensors=(TensorInfo(name="w", shape=(2, 3), dtype="float32"),), nbytes=24,
    fingerprint="8f0c2b6a11d3e97c")`.
    """

    version: int  # completed optimizer steps of these weights
    carrier: Carrier  # how the bytes travel
    segment: str  # where they lie: path of a shared-memory segment or of a folder, or key in torchstore
    tensors: tuple[TensorInfo, ...]  # in the publisher's order
    nbytes: int  # bytes of payload; tied tensors count once
    fingerprint: str | None  # 16 hexadecimal digits, see fingerprint.py; None: switched off by the publisher
    pieces: tuple[StoredPiece, ...] = ()  # for readers on other hosts; empty: only this host can read it

    def __post_init__(self) -> None:
        if self.version < 0:
            raise ValueError(f"a version counts optimizer steps and cannot be {self.version}")

    def check_against(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise WeightMismatch unless `tensors` has exactly the names, shapes and dtypes of this version.

        Args:
            tensors: name -> tensor of any device and stride; only its description is read.
        """
        check_tensors(self.tensors, tensors, owner=f"version {self.version}")


def describe(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorInfo, ...]:
    """The name, shape and dtype of each tensor, in the order of the mapping."""
    return tuple(
        TensorInfo(name=name, shape=tuple(tensor.shape), dtype=_dtype_name(tensor)) for name, tensor in tensors.items()
    )


def check_tensors(expected: Sequence[TensorInfo], tensors: Mapping[str, torch.Tensor], *, owner: str) -> None:
    """Raise WeightMismatch unless `tensors` has exactly the names, shapes and dtypes of `expected`.

    Args:
        expected: the description to meet.
        tensors: name -> tensor.
        owner: what `expected` describes, for the message.

    Raises:
        WeightMismatch: it lists the missing and unexpected names, and each wrong shape and dtype.
    """
    wanted = {info.name: info for info in expected}
    missing = [name for name in wanted if name not in tensors]
    unexpected = [name for name in tensors if name not in wanted]
    shapes, dtypes = [], []
    for name, info in wanted.items():
        if name not in tensors:
            continue
        shape, dtype = tuple(tensors[name].shape), _dtype_name(tensors[name])
        if shape != info.shape:
            shapes.append(f"{name} is {shape}, not {info.shape}")
        if dtype != info.dtype:
            dtypes.append(f"{name} is {dtype}, not {info.dtype}")
    faults = {"missing": missing, "unexpected": unexpected, "wrong shape": shapes, "wrong dtype": dtypes}
    if any(faults.values()):
        text = "; ".join(f"{fault}: {shorten(names)}" for fault, names in faults.items() if names)
        raise WeightMismatch(f"{owner} does not fit these tensors: {text}")


def memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for two tensors exactly when they are the same elements of the same memory."""
    if tensor.numel() == 0:
        return (id(tensor),)  # no memory, hence tied to nothing
    lazy = (tensor.is_conj(), tensor.is_neg())  # `x.conj()` shares the memory of `x` and differs in value
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, lazy)


def shorten(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    names = list(names)
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"


def _dtype_name(tensor: torch.Tensor) -> str:
    return _name_of(tensor.dtype)


@functools.cache  # there are some twenty dtypes, and thousands of tensors
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
