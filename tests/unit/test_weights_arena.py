from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forgelite.errors import VersionUnavailable, WeightError, WeightMismatch
from forgelite.weights import SHARED_MEMORY, arena_layout
from forgelite.weights.arena_reader import ArenaReader
from forgelite.weights.arena_writer import ArenaWriter
from forgelite.weights.fingerprint import fingerprint_of
from tests.unit.weights_memory import awkward_tensors, own_segments, same_bits

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
]


def make_writer(tensors: dict[str, torch.Tensor], *, slots: int = 3, fingerprinted: bool = True) -> ArenaWriter:
    return ArenaWriter.create(tensors, folder=SHARED_MEMORY, run_id="test", slots=slots, fingerprinted=fingerprinted)


def filled(version: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 4), float(version)), "b": torch.full((5,), version, dtype=torch.int32)}


@pytest.fixture
def writer() -> Iterator[ArenaWriter]:
    made = make_writer(filled(0))
    yield made
    made.close()


@pytest.fixture
def reader(writer: ArenaWriter) -> Iterator[ArenaReader]:
    made = ArenaReader(writer.path)
    yield made
    made.close()


def read(reader: ArenaReader, version: int) -> dict[str, torch.Tensor]:
    with reader.lease(version) as (_, views):
        return {name: view.clone() for name, view in views.items()}


def test_every_layout_and_dtype_arrives_bit_for_bit() -> None:
    tensors = awkward_tensors()
    writer = make_writer(tensors)
    written = writer.write(1, tensors, timeout_s=1.0)
    reader = ArenaReader(writer.path)
    with reader.lease(1) as (found, views):
        assert found == written
        assert list(views) == list(tensors)
        assert [name for name in tensors if not same_bits(views[name], tensors[name])] == []
        assert fingerprint_of(views) == written.fingerprint
    reader.close()
    writer.close()


@st.composite
def tensor_sets(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name in draw(st.lists(st.text(max_size=12), min_size=1, max_size=6, unique=True)):
        if tensors and draw(st.booleans()):
            tensors[name] = tensors[draw(st.sampled_from(sorted(tensors)))]  # tied
            continue
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        nbytes = torch.empty(shape, dtype=dtype).nbytes
        if dtype is torch.bool:
            tensor = (torch.arange(nbytes) % 2 == 0).reshape(shape)
        else:
            tensor = torch.randint(0, 256, (nbytes,), dtype=torch.uint8).view(dtype).reshape(shape)
        tensors[name] = tensor.transpose(0, -1) if tensor.ndim > 1 and draw(st.booleans()) else tensor
    return tensors


@settings(deadline=None, max_examples=60)
@given(tensors=tensor_sets())
def test_any_set_of_tensors_arrives_bit_for_bit(tensors: dict[str, torch.Tensor]) -> None:
    writer = make_writer(tensors, slots=2)
    try:
        written = writer.write(7, tensors, timeout_s=1.0)
        reader = ArenaReader(writer.path)
        with reader.lease(7) as (found, views):
            assert found == written
            assert all(same_bits(views[name], tensor) for name, tensor in tensors.items())
            assert fingerprint_of(views) == written.fingerprint
        reader.close()
    finally:
        writer.close()


def test_tied_tensors_are_stored_once_and_read_as_one_memory() -> None:
    weight = torch.randn(100, 100)
    tensors = {"embedding": weight, "lm_head": weight}
    writer = make_writer(tensors)
    assert writer.write(1, tensors, timeout_s=1.0).nbytes == weight.nbytes
    reader = ArenaReader(writer.path)
    with reader.lease(1) as (_, views):
        assert views["embedding"].data_ptr() == views["lm_head"].data_ptr()
    reader.close()
    writer.close()


def test_tensors_that_stop_being_tied_are_refused_by_name() -> None:
    weight = torch.randn(4)
    writer = make_writer({"embedding": weight, "lm_head": weight})
    with pytest.raises(WeightMismatch, match="lm_head and embedding shared their memory"):
        writer.write(1, {"embedding": weight, "lm_head": weight.clone()}, timeout_s=1.0)
    assert writer.versions() == []
    writer.close()


def test_the_last_versions_stay_whole_while_the_next_one_is_written(
    writer: ArenaWriter, reader: ArenaReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in (1, 2, 3):
        writer.write(version, filled(version), timeout_s=1.0)
    during: dict[int, bool] = {}
    copy = writer._copy

    def look_and_copy(*args: object) -> None:
        during.update({version: version in reader.versions() for version in (1, 2, 3, 4)})
        copy(*args)

    monkeypatch.setattr(writer, "_copy", look_and_copy)
    writer.write(4, filled(4), timeout_s=1.0)
    assert during == {1: False, 2: True, 3: True, 4: False}
    assert reader.versions() == [2, 3, 4]


def test_a_write_that_breaks_off_leaves_the_other_versions_and_an_error(
    writer: ArenaWriter, reader: ArenaReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in (1, 2, 3):
        writer.write(version, filled(version), timeout_s=1.0)

    def break_off(source: dict[str, torch.Tensor], slot: dict[str, torch.Tensor]) -> None:
        slot["a"].copy_(source["a"])
        raise RuntimeError("cut")

    with monkeypatch.context() as patch:
        patch.setattr(writer, "_copy", break_off)
        with pytest.raises(RuntimeError, match="cut"):
            writer.write(4, filled(4), timeout_s=1.0)
    assert reader.versions() == [2, 3]
    for version in (1, 4):
        with pytest.raises(VersionUnavailable, match=rf"version {version} .* holds \[2, 3\]"):
            read(reader, version)
    writer.write(4, filled(4), timeout_s=1.0)
    assert torch.equal(read(reader, 4)["b"], filled(4)["b"])
    assert reader.versions() == [2, 3, 4]


@pytest.mark.parametrize("version", [5, 4], ids=["twice", "backwards"])
def test_a_version_that_does_not_rise_is_refused(writer: ArenaWriter, reader: ArenaReader, version: int) -> None:
    writer.write(5, filled(5), timeout_s=1.0)
    with pytest.raises(WeightError, match=f"cannot publish version {version} after version 5"):
        writer.write(version, filled(9), timeout_s=1.0)
    assert reader.versions() == [5]
    assert torch.equal(read(reader, 5)["a"], filled(5)["a"])


def test_versions_may_leave_numbers_out(writer: ArenaWriter, reader: ArenaReader) -> None:
    for version in (0, 10, 20, 23, 60):
        writer.write(version, filled(version), timeout_s=1.0)
    assert reader.versions() == [20, 23, 60]
    assert all(torch.equal(read(reader, v)["a"], filled(v)["a"]) for v in (20, 23, 60))


def test_other_tensors_than_the_first_ones_are_refused_before_a_byte_is_written(writer: ArenaWriter) -> None:
    writer.write(1, filled(1), timeout_s=1.0)
    with pytest.raises(WeightMismatch, match="missing: b; unexpected: c"):
        writer.write(2, {"a": filled(2)["a"], "c": filled(2)["b"]}, timeout_s=1.0)
    assert writer.versions() == [1]


def test_a_leased_version_is_not_overwritten_and_the_error_names_it(writer: ArenaWriter, reader: ArenaReader) -> None:
    for version in (1, 2, 3):
        writer.write(version, filled(version), timeout_s=1.0)
    with reader.lease(1) as (_, views):
        expected = f"slot 0 still holds version 1 under a lease of process \\[{os.getpid()}\\] after 0.01 s"
        with pytest.raises(WeightError, match=expected):
            writer.write(4, filled(4), timeout_s=0.01)
        assert torch.equal(views["a"], filled(1)["a"])
    writer.write(4, filled(4), timeout_s=0.01)
    assert reader.versions() == [2, 3, 4]


def test_one_of_two_leases_of_a_version_is_enough_to_keep_it(writer: ArenaWriter, reader: ArenaReader) -> None:
    for version in (1, 2, 3):
        writer.write(version, filled(version), timeout_s=1.0)
    with reader.lease(1):
        with reader.lease(1):
            pass
        with pytest.raises(WeightError, match="still holds version 1"):
            writer.write(4, filled(4), timeout_s=0.01)


def test_a_version_that_is_being_overwritten_cannot_be_leased(
    writer: ArenaWriter, reader: ArenaReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.write(1, filled(1), timeout_s=1.0)
    slot_of = reader._slot_of

    def overwritten_after_the_look(version: int) -> int:
        slot = slot_of(version)
        if version == 1:
            for later in (2, 3, 4):
                writer.write(later, filled(later), timeout_s=1.0)
        return slot

    monkeypatch.setattr(reader, "_slot_of", overwritten_after_the_look)
    with pytest.raises(VersionUnavailable, match="version 1"), reader.lease(1):
        pass


def test_a_closed_arena_is_gone_for_newcomers_and_whole_for_who_has_it(
    writer: ArenaWriter, reader: ArenaReader
) -> None:
    writer.write(1, filled(1), timeout_s=1.0)
    assert reader.owner_is_alive()
    writer.close()
    writer.close()
    assert not writer.path.exists()
    assert not reader.owner_is_alive()
    assert torch.equal(read(reader, 1)["a"], filled(1)["a"])
    with pytest.raises(FileNotFoundError):
        ArenaReader(writer.path)
    with pytest.raises(WeightError, match="is closed"):
        writer.write(2, filled(2), timeout_s=1.0)


def test_views_stay_mapped_when_their_reader_is_gone(writer: ArenaWriter) -> None:
    writer.write(1, filled(1), timeout_s=1.0)
    reader = ArenaReader(writer.path)
    with reader.lease(1) as (_, views):
        kept = views["a"]
    reader.close()
    del reader, views
    assert torch.equal(kept, filled(1)["a"])


def test_a_file_that_is_no_segment_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.weights"
    path.write_bytes(b"not weights" * 1000)
    with pytest.raises(WeightError, match="no weight segment"):
        ArenaReader(path)


@pytest.mark.parametrize("slots", [1, arena_layout.MAX_SLOTS + 1])
def test_a_number_of_slots_that_the_header_cannot_hold_is_refused(slots: int) -> None:
    with pytest.raises(ValueError, match=str(slots)):
        make_writer(filled(0), slots=slots)


def test_nothing_is_no_version() -> None:
    with pytest.raises(WeightMismatch, match="no tensors"):
        make_writer({})


def test_a_sparse_tensor_is_refused_by_name() -> None:
    with pytest.raises(WeightMismatch, match=r"w is a torch\.sparse_coo"):
        make_writer({"w": torch.eye(3).to_sparse()})


def test_more_than_there_is_memory_is_an_error_that_holds_both_numbers_and_leaves_no_file() -> None:
    enormous = torch.zeros(1).expand(2**50)  # 4 PiB by description, 4 bytes in truth
    with pytest.raises(WeightError, match=r"need 9007199\d+ bytes in .* has \d+ bytes free; lower weights.retain"):
        make_writer({"w": enormous}, slots=2)
    assert own_segments() == []
