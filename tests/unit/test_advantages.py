"""From rewards to advantages."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgelite.scoring.advantages import group_centred, group_normalised, has_no_variance

REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


@given(REWARDS)
def test_normalised_advantages_follow_the_formula(rewards):
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    assert group_normalised(rewards, 1e-4) == pytest.approx([(r - mean) / (std + 1e-4) for r in rewards], abs=1e-6)


@given(REWARDS)
def test_centred_advantages_sum_to_zero(rewards):
    assert sum(group_centred(rewards)) == pytest.approx(0, abs=1e-9)


def test_a_group_of_equal_rewards_has_no_variance_and_no_advantage():
    assert has_no_variance([0.3, 0.3, 0.3])
    assert not has_no_variance([0.3, 0.4])
    assert group_normalised([1.0, 1.0]) == [0.0, 0.0]
    assert group_normalised([5.0]) == [0.0]
