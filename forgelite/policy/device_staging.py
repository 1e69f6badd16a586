"""The way of a version from shared memory to a GPU: once over the bus, while the engine samples.

    slot in shared memory (pinned) --one asynchronous copy, stream of its own--> staging buffer on the device
    between two steps: staging buffer --in place, device to device--> parameters

The parameters keep their addresses, which CUDA graphs hold. The staging buffer costs one set of weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from forgelite.errors import WeightError

_READ_ONLY = 8  # cudaHostRegisterReadOnly: the segment is mapped without the right to write
_PORTABLE = 1  # cudaHostRegisterPortable


class DeviceStaging:
    """A buffer on a CUDA device that holds one version. Used from one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._pinned: torch.UntypedStorage | None = None

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy a version to the device; returns when it is there, and disturbs no other stream.

        Args:
            tensors: by name, all of them contiguous views of one CPU storage, as a lease of the store gives them.

        Returns:
            name -> view of the staging buffer, valid until the next call.

        Raises:
            WeightError: the tensors do not share a storage, or the driver refuses to pin it.
        """
        whole, start = _range_of(tensors)
        self._pin(whole.untyped_storage())
        if self._buffer.numel() != whole.numel():
            self._buffer = torch.empty(whole.numel(), dtype=torch.uint8, device=self._device)
        with torch.cuda.stream(self._stream):
            # The last update may still read the buffer.
            self._stream.wait_stream(torch.cuda.default_stream(self._device))
            self._buffer.copy_(whole, non_blocking=True)
        self._stream.synchronize()
        return {
            name: self._buffer[(offset := tensor.data_ptr() - start) : offset + tensor.nbytes]
            .view(tensor.dtype)
            .view(tensor.shape)
            for name, tensor in tensors.items()
        }

    def close(self) -> None:
        """Give the pinned memory back. May be called twice."""
        if self._pinned is not None:
            _check(torch.cuda.cudart().cudaHostUnregister(self._pinned.data_ptr()))
            self._pinned = None

    def _pin(self, storage: torch.UntypedStorage) -> None:
        """Pin a segment once, and let go of the one before it. Keeping it keeps its memory mapped."""
        if self._pinned is not None and self._pinned.data_ptr() == storage.data_ptr():
            return
        self.close()
        flags = _READ_ONLY | _PORTABLE
        _check(torch.cuda.cudart().cudaHostRegister(storage.data_ptr(), storage.nbytes(), flags))
        self._pinned = storage


def _range_of(tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """[n] uint8: the smallest range of memory that holds all tensors, and its address."""
    filled = [tensor for tensor in tensors.values() if tensor.nbytes]
    storages = {tensor.untyped_storage().data_ptr() for tensor in filled}
    if len(storages) != 1:
        raise WeightError(f"a version for the GPU comes from one segment, not from {len(storages)} storages")
    storage = filled[0].untyped_storage()
    start = min(tensor.data_ptr() for tensor in filled)
    end = max(tensor.data_ptr() + tensor.nbytes for tensor in filled)
    whole = torch.empty(0, dtype=torch.uint8)
    return whole.set_(storage, start - storage.data_ptr(), (end - start,), (1,)), start


def _check(code: object) -> None:
    try:
        torch.cuda.check_error(int(code))
    except RuntimeError as error:
        raise WeightError(f"the driver refuses to pin the weights in shared memory: {error}") from error
