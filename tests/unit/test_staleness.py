"""Pacing and the bound on age."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forgelite.buffer.staleness import drop_stale, groups_to_start
from tests.unit.trajectories import make_trajectory


def test_a_synchronous_run_starts_one_batch_for_each_version():
    assert groups_to_start(number=0, groups_per_step=16, served_version=0, depth=0) == 16
    assert groups_to_start(number=16, groups_per_step=16, served_version=0, depth=0) == 0
    assert groups_to_start(number=16, groups_per_step=16, served_version=1, depth=0) == 16


def test_depth_one_starts_the_next_batch_before_the_version_is_served():
    assert groups_to_start(number=16, groups_per_step=16, served_version=0, depth=1) == 16
    assert groups_to_start(number=32, groups_per_step=16, served_version=0, depth=1) == 0


def test_no_depth_is_no_bound():
    assert groups_to_start(number=10**9, groups_per_step=16, served_version=0, depth=None) is None


@given(depth=st.integers(0, 8), served=st.integers(0, 50), batch=st.integers(1, 32), number=st.integers(0, 2000))
def test_a_group_that_starts_and_is_trained_in_turn_is_at_most_depth_versions_old(depth, served, batch, number):
    allowed = groups_to_start(number=number, groups_per_step=batch, served_version=served, depth=depth)
    if allowed:
        last = number + allowed - 1
        assert last // batch - served <= depth
        assert (last + 1) // batch - served > depth


def test_age_is_that_of_the_oldest_trained_token():
    trajectory = make_trajectory(versions=(3, 3, 5))
    assert trajectory.age(6) == 3
    trajectory.loss_mask[2:4] = [False, False]
    assert trajectory.age(6) == 1


def test_a_stale_sample_is_dropped_alone():
    old, young = make_trajectory("g0/0", versions=(1, 2)), make_trajectory("g0/1", versions=(2, 2))
    kept, rejected = drop_stale([old, young], trainer_version=3, max_policy_age=1, on_stale="drop_sample")
    assert (kept, rejected) == ([young], [old])


def test_a_stale_sample_takes_its_group_along_if_asked():
    old, young = make_trajectory("g0/0", versions=(1, 2)), make_trajectory("g0/1", versions=(2, 2))
    kept, rejected = drop_stale([old, young], trainer_version=3, max_policy_age=1, on_stale="drop_group")
    assert (kept, rejected) == ([], [old, young])


def test_old_tokens_are_masked_and_the_young_ones_trained():
    mixed = make_trajectory("g0/0", prompt=2, versions=(1, 3))
    kept, rejected = drop_stale([mixed], trainer_version=3, max_policy_age=1, on_stale="mask_tokens")
    assert kept == [mixed]
    assert rejected == []
    assert mixed.loss_mask == [False, False, False, True]
    assert mixed.age(3) == 0


def test_a_sample_with_only_old_tokens_is_rejected_by_masking_too():
    old = make_trajectory("g0/0", versions=(1, 1))
    kept, rejected = drop_stale([old], trainer_version=3, max_policy_age=1, on_stale="mask_tokens")
    assert (kept, rejected) == ([], [old])
