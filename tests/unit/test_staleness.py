"""What the staleness policy decides, as plain numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgelite.buffer.staleness import Progress, StalenessPolicy, drop_stale
from forgelite.config import LoopConfig
from tests.unit.trajectories import make_trajectory


def make_policy(**options) -> StalenessPolicy:
    settings = {"steps": 100, "groups_per_step": 16, "max_policy_age": 8, "max_groups_in_flight": 10_000} | options
    return StalenessPolicy(config=LoopConfig(**settings))


def at(*, taken=0, finished=None, served=None, ready=0, in_flight=0) -> Progress:
    """Steady running of 16 groups a step unless it is said otherwise: the policy is up to date."""
    return Progress(
        taken=taken,
        finished=taken * 16 + ready if finished is None else finished,
        served=taken if served is None else served,
        ready=ready,
        in_flight=in_flight,
    )


def test_a_synchronous_run_starts_one_batch_for_each_version():
    policy = make_policy(depth=0)
    assert policy.admit(at()) == 16
    assert policy.admit(at(ready=16)) == 0
    assert policy.admit(at(taken=1, served=0)) == 0
    assert policy.admit(at(taken=1, served=1)) == 16


def test_replacements_of_a_synchronous_batch_start_together():
    policy = make_policy(depth=0)
    assert policy.admit(at(ready=10, in_flight=4)) == 0
    assert policy.admit(at(ready=14)) == 2


def test_depth_one_starts_the_next_batch_before_the_version_is_served():
    policy = make_policy(depth=1)
    assert policy.admit(at(taken=5, served=4)) == 16
    assert policy.admit(at(taken=5, served=4, in_flight=16)) == 0


def test_a_warm_start_keeps_one_batch_in_flight_and_opens_the_window_group_by_group():
    policy = make_policy(depth=4)
    assert policy.admit(at()) == 16
    assert policy.admit(at(in_flight=16)) == 0
    assert policy.admit(at(ready=5, in_flight=11)) == 5
    assert policy.admit(at(taken=1, served=0)) == 16
    assert policy.admit(at(taken=1, served=0, ready=16)) == 16
    assert policy.admit(at(taken=9)) == 5 * 16


def test_what_would_be_born_too_old_is_not_started():
    assert make_policy(depth=8, max_policy_age=2).admit(at(taken=50)) == 3 * 16


def test_an_unbounded_stream_is_bounded_by_what_may_be_in_flight():
    policy = make_policy(depth=None, max_groups_in_flight=40)
    assert policy.admit(at(ready=1000, in_flight=30)) == 10


def test_nothing_starts_that_no_step_will_train():
    policy = make_policy(depth=4, steps=10)
    assert policy.admit(at(taken=9, served=9)) == 16
    assert policy.admit(at(taken=9, served=9, in_flight=16)) == 0
    assert make_policy(depth=None, steps=0).admit(at()) == 0


def test_a_surplus_starts_with_its_batch_and_never_alone():
    policy = make_policy(depth=0, oversample=1.25)
    assert policy.admit(at()) == 20
    assert policy.admit(at(taken=1, served=0, ready=2)) == 0
    assert policy.admit(at(taken=1, served=1, ready=4)) == 16


@pytest.mark.parametrize(
    ("oversample", "batch", "surplus"), [(1.0, 16, 0), (1.1, 10, 1), (1.05, 20, 1), (1.25, 16, 4), (1.01, 16, 1)]
)
def test_the_surplus_is_the_share_of_a_batch_rounded_up(oversample, batch, surplus):
    policy = make_policy(depth=0, oversample=oversample, groups_per_step=batch)
    assert policy.admit(at()) == batch + surplus


def test_what_is_beyond_the_pace_is_surplus_when_a_batch_is_taken():
    cut, keep = (make_policy(depth=0, oversample=1.25, surplus=surplus) for surplus in ("cut", "keep"))
    after = at(taken=1, served=0, ready=1, in_flight=3)
    assert cut.surplus_in_flight(after) == 3
    assert keep.surplus_in_flight(after) == 0
    last = at(taken=100, served=99, in_flight=3)
    assert cut.surplus_in_flight(last) == keep.surplus_in_flight(last) == 3


@given(
    depth=st.integers(0, 8),
    age=st.integers(0, 8),
    batch=st.integers(1, 32),
    taken=st.integers(0, 50),
    lag=st.integers(0, 3),
    ready=st.integers(0, 200),
    finished=st.integers(0, 2000),
)
def test_a_group_that_starts_and_is_trained_in_turn_is_at_most_the_lead_old(
    depth, age, batch, taken, lag, ready, finished
):
    policy = make_policy(depth=depth, max_policy_age=age, groups_per_step=batch, max_groups_queued=10_000)
    served = max(0, taken - lag)
    allowed = policy.admit(at(taken=taken, finished=finished, served=served, ready=ready))
    last_turn = (taken * batch + ready + allowed - 1) // batch
    if allowed:
        assert last_turn - served <= min(depth, age)


@given(
    depth=st.integers(0, 8),
    age=st.integers(0, 8),
    batch=st.integers(1, 8),
    sync_every=st.integers(1, 9),
    taken=st.integers(0, 30),
    first=st.integers(0, 30),
)
def test_pacing_always_lets_the_next_batch_start(depth, age, batch, sync_every, taken, first):
    """Whatever the policy lags by sync_every, and wherever the run began: the trainer never waits for itself."""
    if sync_every - 1 > min(depth, age) or first > taken:
        return
    policy = make_policy(depth=depth, max_policy_age=age, groups_per_step=batch, sync_every=sync_every)
    served = max(first, taken - taken % sync_every)
    assert policy.admit(at(taken=taken, finished=(taken - first) * batch, served=served)) >= batch


def test_in_fifo_a_straggler_holds_the_line():
    policy = make_policy(selection="fifo")
    assert not policy.may_take(8, first_in_flight=7)
    assert policy.may_take(6, first_in_flight=7)
    assert policy.may_take(8, first_in_flight=None)


def test_in_a_window_so_many_groups_overtake_and_no_more():
    policy = make_policy(window=3)
    assert policy.may_take(10, first_in_flight=7)
    assert not policy.may_take(11, first_in_flight=7)
    assert make_policy().may_take(1000, first_in_flight=7)


def test_the_orders():
    ready = [(5, 2), (3, 0), (4, 1), (6, None)]
    by_rank = {
        selection: [number for number, _ in sorted(ready, key=lambda group: policy.rank(*group))]
        for selection in ("fifo", "windowed", "freshest")
        for policy in [make_policy(selection=selection)]
    }
    assert by_rank == {"fifo": [3, 4, 5, 6], "windowed": [3, 4, 5, 6], "freshest": [6, 5, 4, 3]}


def test_the_bound_that_pacing_and_order_prove():
    assert make_policy(depth=2, selection="fifo").age_bound == 2
    assert make_policy(depth=2, window=0).age_bound == 2
    assert make_policy(depth=2, window=16).age_bound == 3
    assert make_policy(depth=2, window=17).age_bound == 4
    assert make_policy(depth=2, window=8, oversample=1.5).age_bound == 3
    assert make_policy(depth=2, window=9, oversample=1.5).age_bound == 4
    assert make_policy(depth=2).age_bound is None
    assert make_policy(depth=2, selection="freshest").age_bound is None
    assert make_policy(depth=None).age_bound is None


def test_what_can_only_be_rejected_is_hopeless():
    policy = make_policy(max_policy_age=1)
    assert policy.is_hopeless(3, at(taken=5))
    assert not policy.is_hopeless(4, at(taken=5))
    assert not make_policy(max_policy_age=1, on_stale="mask_tokens").is_hopeless(3, at(taken=5))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"window": 3, "selection": "fifo"}, "loop.window=3 is for loop.selection=windowed"),
        ({"oversample": 1.5, "selection": "fifo"}, "loop.oversample=1.5 with loop.selection=fifo"),
        ({"oversample": 1.5, "window": 0}, "loop.oversample=1.5 with loop.selection=windowed and loop.window=0"),
        ({"oversample": 1.5, "depth": None}, "loop.oversample=1.5 with loop.depth=null"),
        ({"depth": None, "selection": "fifo"}, "loop.depth=null with loop.selection=fifo"),
        ({"depth": None, "window": 4}, "loop.depth=null with loop.selection=windowed and loop.window=4"),
        ({"surplus": "cut"}, "there is no surplus"),
        ({"complete_at": 9, "group_size": 8}, "loop.complete_at=9 of loop.group_size=8"),
        ({"complete_at": 1, "group_size": 8}, "loop.complete_at=1 of loop.group_size=8"),
        ({"max_groups_queued": 32, "oversample": 1.1}, "loop.max_groups_queued=32 does not hold"),
    ],
)
def test_what_makes_no_sense_together_is_refused_by_name(wrong, message):
    with pytest.raises(ValueError, match=message):
        make_policy(**{"depth": 1} | wrong)


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
