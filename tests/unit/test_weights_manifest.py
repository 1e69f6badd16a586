from __future__ import annotations

import pickle

import pytest
import torch

from forgelite.errors import WeightMismatch
from forgelite.weights import Manifest
from forgelite.weights.manifest import describe


def manifest_of(tensors: dict[str, torch.Tensor]) -> Manifest:
    return Manifest(version=3, carrier="shm", segment="x", tensors=describe(tensors), nbytes=1, fingerprint="0" * 16)


def test_tensors_of_equal_names_shapes_and_dtypes_fit_whatever_their_order() -> None:
    manifest = manifest_of({"a": torch.zeros(2, 3), "b": torch.zeros((), dtype=torch.bfloat16)})
    manifest.check_against({"b": torch.ones((), dtype=torch.bfloat16), "a": torch.ones(3, 2).t()})


def test_every_kind_of_mismatch_is_named_in_one_error() -> None:
    manifest = manifest_of(
        {
            "gone": torch.zeros(1),
            "flat": torch.zeros(6),
            "half": torch.zeros(2).bfloat16(),
            "ok": torch.zeros(1),
        }
    )
    found = {"flat": torch.zeros(2, 3), "half": torch.zeros(2), "ok": torch.zeros(1), "new": torch.zeros(1)}
    with pytest.raises(WeightMismatch) as caught:
        manifest.check_against(found)
    text = str(caught.value)
    assert "version 3" in text
    assert "missing: gone" in text
    assert "unexpected: new" in text
    assert "wrong shape: flat is (2, 3), not (6,)" in text
    assert "wrong dtype: half is float32, not bfloat16" in text
    assert "ok" not in text


def test_a_long_list_of_names_is_cut_with_its_count() -> None:
    manifest = manifest_of({f"layer{i}": torch.zeros(1) for i in range(20)})
    with pytest.raises(WeightMismatch, match=r"layer7 and 12 more"):
        manifest.check_against({})


def test_a_manifest_survives_pickling() -> None:
    manifest = manifest_of({"a": torch.zeros(2, 3)})
    assert pickle.loads(pickle.dumps(manifest)) == manifest


def test_a_negative_version_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        Manifest(version=-1, carrier="shm", segment="x", tensors=(), nbytes=0, fingerprint=None)
