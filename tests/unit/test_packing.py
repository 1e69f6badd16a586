"""Packing trajectories into rows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forgelite.buffer.packing import pack, plan_rows, unpack
from tests.unit.trajectories import make_trajectory

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=60)


@given(LENGTHS)
def test_every_sequence_is_in_exactly_one_row_and_no_row_is_too_long(lengths):
    rows = plan_rows(lengths, 50)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 50 for row in rows)


@given(LENGTHS)
def test_rows_are_few(lengths):
    """Best-fit decreasing needs at most 11/9 of the optimum plus one, and the optimum is no less than the sum asks."""
    optimum = math.ceil(sum(lengths) / 50)
    # Against the volume bound alone, any-fit packing leaves rows more than half full but for one.
    assert len(plan_rows(lengths, 50)) <= 2 * optimum


def test_equal_sequences_fill_rows_without_padding():
    batch = pack([make_trajectory(f"g0/{i}", prompt=6, versions=[0] * 6) for i in range(128)], 96)
    assert batch.token_ids.shape == (16, 96)
    assert (batch.sequence_ids >= 0).all()


def test_rows_are_only_as_long_as_needed():
    batch = pack([make_trajectory(prompt=2, versions=[0] * 3)], 1000)
    assert batch.token_ids.shape == (1, 5)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=20))
def test_what_is_packed_can_be_unpacked(shapes):
    trajectories = [make_trajectory(f"g0/{i}", prompt=p, versions=[i % 3] * n) for i, (p, n) in enumerate(shapes)]
    batch = pack(trajectories, 16)
    assert unpack(batch.token_ids, batch, len(trajectories)) == [t.token_ids for t in trajectories]
    assert unpack(batch.loss_mask, batch, len(trajectories)) == [t.loss_mask for t in trajectories]
    assert int(batch.loss_mask.sum()) == sum(n for _, n in shapes)
    starts = batch.positions == 0
    assert starts[:, 0].all()
    assert int((starts & (batch.sequence_ids >= 0)).sum()) == len(trajectories)


def test_versions_stand_where_tokens_were_sampled():
    batch = pack([make_trajectory(prompt=2, versions=(3, 3, 4))], 8)
    assert batch.versions.tolist() == [[-1, -1, 3, 3, 4]]


def test_reference_logprobs_are_packed_when_every_trajectory_has_them():
    first, second = make_trajectory("g0/0"), make_trajectory("g0/1")
    first.reference_logprobs = [0.5] * 5
    assert pack([first, second], 16).reference_logprobs is None
    second.reference_logprobs = [0.25] * 5
    packed = pack([first, second], 16).reference_logprobs
    assert torch.equal(packed, torch.tensor([[0.5] * 5 + [0.25] * 5]))


def test_a_sequence_that_does_not_fit_is_named_with_its_key():
    with pytest.raises(ValueError, match=r"sequence 0 has 5 tokens.*trainer.training.seq_len"):
        pack([make_trajectory()], 4)


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="at least one trajectory"):
        pack([], 4)
