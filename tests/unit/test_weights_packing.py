from __future__ import annotations

from forgelite.weights.packing import pack, unpack
from tests.unit.weights_memory import awkward_tensors, same_bits


def test_what_is_packed_comes_out_bit_by_bit_and_ties_stay_ties() -> None:
    tensors = awkward_tensors()
    found = unpack(pack(tensors))
    assert list(found) == list(tensors)
    assert all(same_bits(found[name], tensors[name]) for name in tensors)
    assert found["lm_head.weight"].data_ptr() == found["model.embed/with spaces.weight"].data_ptr()
