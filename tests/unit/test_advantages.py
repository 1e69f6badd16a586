"""From rewards to advantages."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgelite.config import AdvantageConfig
from forgelite.errors import ConfigError, ForgeliteError
from forgelite.scoring.advantages import (
    group_centred,
    group_normalised,
    has_no_variance,
    leave_one_out,
    make_advantages,
    penalised_rewards,
)
from forgelite.scoring.group import score_group
from forgelite.types import Prompt, Score, Trajectory
from tests.unit.trajectories import make_trajectory

REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


@settings(deadline=None)
@given(REWARDS)
def test_normalised_advantages_follow_the_formula(rewards):
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    assert group_normalised(rewards, 1e-4) == pytest.approx([(r - mean) / (std + 1e-4) for r in rewards], abs=1e-6)


@settings(deadline=None)
@given(REWARDS)
def test_centred_advantages_sum_to_zero(rewards):
    assert sum(group_centred(rewards)) == pytest.approx(0, abs=1e-9)


@settings(deadline=None)
@given(REWARDS)
def test_leaving_one_out_compares_a_reward_with_the_mean_of_the_others(rewards):
    expected = [r - statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    assert leave_one_out(rewards) == pytest.approx(expected, abs=1e-8)


def test_a_group_of_equal_rewards_has_no_variance_and_no_advantage():
    assert has_no_variance([0.3, 0.3, 0.3])
    assert not has_no_variance([0.3, 0.4])
    assert group_normalised([1.0, 1.0]) == [0.0, 0.0]
    assert group_normalised([5.0]) == leave_one_out([5.0]) == [0.0]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [-0.7070, 0.7070]),
        ({"name": "group_normalised", "eps": 1.0}, [-0.2929, 0.2929]),
        ({"name": "group_centred"}, [-0.5, 0.5]),
        ({"name": "leave_one_out"}, [-1.0, 1.0]),
        ({"name": "reward"}, [1.0, 2.0]),
        ({"name": "custom", "path": f"{__name__}:ranks", "arguments": {"scale": 3.0}}, [0.0, 3.0]),
    ],
)
def test_advantages_are_chosen_by_name(config: dict, expected: list[float]) -> None:
    assert make_advantages(AdvantageConfig(**config))([1.0, 2.0]) == pytest.approx(expected, abs=1e-4)


def ranks(rewards: Sequence[float], *, scale: float) -> list[float]:  # named by its path above
    return [scale * sorted(rewards).index(r) for r in rewards]


def test_advantages_of_the_user_s_that_cannot_be_found_are_an_error():
    with pytest.raises(ConfigError, match=r"advantage\.path: cannot import nowhere"):
        make_advantages(AdvantageConfig(name="custom", path="nowhere:f"))


def _scored(reward: float, reference: Sequence[float]) -> Trajectory:
    """Two prompt tokens, then one sampled token for each of `reference`, sampled with a log-probability of -1."""
    trajectory = make_trajectory(versions=[0] * len(reference))
    trajectory.logprobs = [0.0, 0.0] + [-1.0] * len(reference)
    trajectory.reference_logprobs = [9.0, 9.0, *reference]
    trajectory.score = Score(reward=reward)
    return trajectory


@pytest.mark.parametrize(
    ("estimator", "divergence"),
    [("k1", 0.5 - 1.0), ("k2", 0.5**2 / 2 + 1.0 / 2), ("k3", math.exp(-0.5) + 0.5 + math.exp(1.0) - 1.0 - 2.0)],
)
def test_the_divergence_is_taken_off_the_reward_summed_over_the_trained_tokens(estimator, divergence):
    config = AdvantageConfig(kl_coefficient=0.2, kl_estimator=estimator)
    assert penalised_rewards([_scored(2.0, [-1.5, 0.0])], config) == pytest.approx([2.0 - 0.2 * divergence])


async def test_a_group_gets_its_advantages_from_rewards_less_the_divergence():
    members = [_scored(0.0, [-1.0]), _scored(0.0, [-3.0])]
    for member in members:
        member.score = None

    async def score(samples):
        return [Score(reward=1.0), Score(reward=2.0)]

    async def reference(trajectories):
        return [[0.0, 0.0, -1.0], [0.0, 0.0, -3.0]]

    scored = await score_group(
        "g0",
        Prompt(prompt_id="p", text="", token_ids=(1, 2)),
        members,
        score=score,
        reference=reference,
        advantage=AdvantageConfig(name="reward", kl_coefficient=0.5),
        filter_zero_variance=True,
        drop_group_on_failure=False,
    )
    assert [t.advantage for t in scored.group.trajectories] == [1.0, 2.0 - 0.5 * 2.0]
    assert [s.reward for s in scored.scores] == [1.0, 2.0]  # what is logged is what the rewards said


def test_a_divergence_without_a_reference_is_an_error():
    trajectory = _scored(1.0, [-1.0])
    trajectory.reference_logprobs = None
    with pytest.raises(ValueError, match=r"advantage\.kl_coefficient needs reference logprobs"):
        penalised_rewards([trajectory], AdvantageConfig(kl_coefficient=0.1))


def not_numbers(rewards: Sequence[float]) -> list[float]:
    return [math.nan for _ in rewards]


def too_few(rewards: Sequence[float]) -> list[float]:
    return list(rewards[:-1])


def words(rewards: Sequence[float]) -> list[str]:
    return ["good" for _ in rewards]


@pytest.mark.parametrize("function", [not_numbers, too_few, words])
def test_a_function_of_ones_own_that_gives_no_finite_number_for_each_reward_is_named(function):
    advantages = make_advantages(AdvantageConfig(name="custom", path=f"{__name__}:{function.__name__}"))
    with pytest.raises(ForgeliteError, match=rf"advantage\.path=.*:{function.__name__} gave .* rewards \[1\.0, 2\.0\]"):
        advantages([1.0, 2.0])
