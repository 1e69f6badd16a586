"""Batches and tensors survive the journey as bytes, and a damaged message is noticed."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forgelite.types import TrainingBatch
from forgelite.wire import decode_batch, decode_tensors, encode_batch, encode_tensors

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool]


def _batch(rows: int = 3, length: int = 7) -> TrainingBatch:
    floats = torch.linspace(-5, 0, rows * length).view(rows, length)
    return TrainingBatch(
        token_ids=torch.arange(rows * length).view(rows, length),
        positions=torch.arange(length).expand(rows, length),  # not contiguous
        sequence_ids=torch.arange(rows, dtype=torch.int32)[:, None].expand(rows, length),
        loss_mask=torch.arange(length).expand(rows, length) > 2,
        logprobs=floats,
        versions=torch.full((rows, length), 7, dtype=torch.int32),
        advantages=-floats,
    )


@pytest.mark.parametrize("reference", [None, torch.full((3, 7), float("nan"))])
def test_a_decoded_batch_is_the_encoded_one(reference: torch.Tensor | None) -> None:
    batch = replace(_batch(), reference_logprobs=reference)
    decoded = decode_batch(encode_batch(batch))
    for field in fields(batch):
        sent, received = getattr(batch, field.name), getattr(decoded, field.name)
        if sent is None:
            assert received is None
        else:
            assert sent.dtype == received.dtype
            assert torch.equal(sent.nan_to_num(-1e9), received.nan_to_num(-1e9))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), max_size=4))
def test_tensors_of_any_shape_and_dtype_survive(kinds: list[tuple[torch.dtype, list[int]]]) -> None:
    sent = [(torch.rand(shape) * 100).to(dtype) for dtype, shape in kinds]
    received = decode_tensors(encode_tensors(sent))
    assert len(received) == len(sent)
    for a, b in zip(sent, received, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(a, b)


def test_a_message_cut_short_anywhere_is_an_error() -> None:
    data = encode_batch(_batch())
    for end in [*range(0, 40), len(data) // 2, len(data) - 1]:
        with pytest.raises(ValueError, match="message"):
            decode_batch(data[:end])


def test_a_message_with_bytes_after_its_end_is_an_error() -> None:
    with pytest.raises(ValueError, match="its header promises"):
        decode_batch(encode_batch(_batch()) + b"\0")


def test_tensors_are_not_taken_for_a_batch() -> None:
    with pytest.raises(ValueError, match="missing"):
        decode_batch(encode_tensors([torch.zeros(2)]))


def test_a_batch_with_a_wrong_dtype_is_refused_before_it_is_sent() -> None:
    wrong = replace(_batch(), versions=torch.zeros(3, 7, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"versions is torch\.int64"):
        encode_batch(wrong)


def test_a_batch_whose_tensors_differ_in_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"advantages is torch.float32 \(3, 6\)"):
        encode_batch(replace(_batch(), advantages=torch.zeros(3, 6)))


def test_decoded_tensors_may_be_written_to() -> None:
    (tensor,) = decode_tensors(encode_tensors([torch.zeros(4)]))
    tensor += 1
    assert tensor.tolist() == [1.0] * 4
