from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forgelite.weights.fingerprint import fingerprint_of, sample_of
from tests.unit.weights_memory import awkward_tensors


def two_tensors() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(6.0).reshape(2, 3) + 10}


def test_equal_tensors_have_the_same_fingerprint_whatever_their_order_strides_and_ties() -> None:
    tensors = awkward_tensors()
    copies = {name: tensor.detach().resolve_conj().clone() for name, tensor in reversed(tensors.items())}
    resolved = {name: tensor.resolve_conj() for name, tensor in tensors.items()}
    assert fingerprint_of(copies) == fingerprint_of(resolved)


@given(place=st.integers(0, 999), bit=st.integers(0, 7))
def test_one_flipped_bit_at_any_place_changes_the_fingerprint(place: int, bit: int) -> None:
    tensors = {"w": torch.zeros(1000, dtype=torch.uint8)}
    before = fingerprint_of(tensors)
    tensors["w"][place] = 1 << bit
    assert fingerprint_of(tensors) != before


def test_two_tensors_that_changed_places_change_the_fingerprint() -> None:
    tensors = two_tensors()
    swapped = {"a": tensors["b"], "b": tensors["a"]}
    assert fingerprint_of(swapped) != fingerprint_of(tensors)


def test_two_values_that_changed_places_change_the_fingerprint() -> None:
    assert fingerprint_of({"w": torch.tensor([1.0, 2.0])}) != fingerprint_of({"w": torch.tensor([2.0, 1.0])})


def test_a_tensor_left_over_from_an_older_version_changes_the_fingerprint() -> None:
    older, newer = two_tensors(), {name: tensor + 1 for name, tensor in two_tensors().items()}
    assert fingerprint_of({**newer, "b": older["b"]}) != fingerprint_of(newer)


@pytest.mark.parametrize(
    "other",
    [torch.zeros(8, dtype=torch.int32), torch.zeros(4, 2), torch.zeros(2, 4)],
    ids=["dtype", "transposed shape", "shape"],
)
def test_equal_bytes_of_another_dtype_or_shape_have_another_fingerprint(other: torch.Tensor) -> None:
    assert fingerprint_of({"w": other}) != fingerprint_of({"w": torch.zeros(8)})


@pytest.mark.parametrize("elements", [1 << 12, (1 << 12) + 1, (1 << 20) + 4097])
def test_a_sample_notices_another_versions_megabyte_a_shift_and_a_copy_that_broke_off(elements: int) -> None:
    tensors = {"w": torch.arange(elements, dtype=torch.int32)}
    before = sample_of(tensors)
    stale = tensors["w"].clone()
    stale[: 1 << 18] += 1
    cut = tensors["w"].clone()
    cut[-1] = 0
    others = (stale, cut, tensors["w"].roll(1))
    assert len({before, *(sample_of({"w": other}) for other in others)}) == 4
    assert sample_of({"w": tensors["w"].clone()}) == before
