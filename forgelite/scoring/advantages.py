"""From the rewards of one group to its advantages. Pure functions of numbers; failed members are not among them.

reward ──(- kl_coefficient x divergence from the reference)──> baseline of the group ──> advantage
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from forgelite.config import AdvantageConfig
from forgelite.config.functions import load_function
from forgelite.errors import ForgeliteError
from forgelite.types import Trajectory

Advantages = Callable[[Sequence[float]], Sequence[float]]
"""From the rewards of a group to the advantages of its members, in the same order."""


def group_normalised(rewards: Sequence[float], eps: float = 1e-4) -> list[float]:
    """`(r - mean) / (std + eps)` with the sample standard deviation (n - 1), as in GRPO.

    Source: DeepSeekMath (2024), equation 4; eps and the sample deviation as in TRL.
    A group of one, or of equal rewards, gets zeros.
    """
    centred = group_centred(rewards)
    if len(rewards) < 2:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + eps) for c in centred]


def group_centred(rewards: Sequence[float]) -> list[float]:
    """`r - mean`, as in Dr.GRPO (Liu et al., 2025)."""
    mean = math.fsum(rewards) / len(rewards)
    return [r - mean for r in rewards]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """`r - mean of the others`, which is `n / (n - 1) (r - mean)`: RLOO (Kool et al., 2019; arXiv:2402.14740).

    A group of one has no others and gets zero.
    """
    n = len(rewards)
    return [n / (n - 1) * c for c in group_centred(rewards)] if n > 1 else [0.0]


def reward_itself(rewards: Sequence[float]) -> list[float]:
    """`r`: no baseline in the group. REINFORCE++ whitens over the batch instead (`loss.whiten_advantages`)."""
    return list(rewards)


def has_no_variance(rewards: Sequence[float]) -> bool:
    """Whether all rewards are equal, so that every advantage is zero and the group teaches nothing."""
    return all(r == rewards[0] for r in rewards)


def make_advantages(config: AdvantageConfig) -> Advantages:
    """The function of `config`, its options bound.

    Raises:
        ConfigError: a function of the user's cannot be imported, or does not take the arguments given.

    The function of the user's raises ForgeliteError where it does not give a finite number for each reward.
    """
    if config.name == "group_normalised":
        return partial(group_normalised, eps=config.eps)
    if config.name == "custom":
        path = config.path or ""
        function = partial(load_function(path, config.arguments, "advantage"), **config.arguments)
        return partial(_users_advantages, function, path)
    return _PLAIN[config.name]


def _users_advantages(function: Advantages, path: str, rewards: Sequence[float]) -> list[float]:
    given = function(rewards)
    try:
        values = [float(value) for value in given]
    except (TypeError, ValueError):
        values = []
    if len(values) != len(rewards) or not all(map(math.isfinite, values)):
        raise ForgeliteError(
            f"advantage.path={path} gave {given!r} for the rewards {list(rewards)}: it must give a finite number for "
            "each"
        )
    return values


def penalised_rewards(trajectories: Sequence[Trajectory], config: AdvantageConfig) -> list[float]:
    """`r - kl_coefficient sum_t k(x_t)` for each trajectory, `x` its log-ratio of behaviour to reference.

    The tokens come from the behaviour policy, so that k1 (`x`) and k3 (`exp(-x) - 1 + x`) are unbiased estimates of
    KL(behaviour || reference), and an importance ratio would be 1; k2 is `x^2 / 2`.

    Args:
        trajectories: scored, with reference log-probabilities where `kl_coefficient` is above 0.
        config: `advantage.*`.
    """
    rewards = [_reward(t) for t in trajectories]
    if config.kl_coefficient == 0:
        return rewards
    estimate = _DIVERGENCES[config.kl_estimator]
    return [
        reward - config.kl_coefficient * math.fsum(map(estimate, _log_ratios(trajectory)))
        for reward, trajectory in zip(rewards, trajectories, strict=True)
    ]


def _reward(trajectory: Trajectory) -> float:
    if trajectory.score is None:
        raise ValueError(f"trajectory {trajectory.trajectory_id} has no score, hence no advantage")
    return trajectory.score.reward


def _log_ratios(trajectory: Trajectory) -> list[float]:
    if trajectory.reference_logprobs is None:
        raise ValueError(
            f"advantage.kl_coefficient needs reference logprobs, and trajectory {trajectory.trajectory_id} has none"
        )
    columns = zip(trajectory.loss_mask, trajectory.logprobs, trajectory.reference_logprobs, strict=True)
    return [logprob - reference for trained, logprob, reference in columns if trained]


def _k3(x: float) -> float:
    held = max(-10.0, min(10.0, x))  # as in the loss: exp of more says only "very different"
    return math.expm1(-held) + held


_PLAIN: Mapping[str, Advantages] = {
    "group_centred": group_centred,
    "leave_one_out": leave_one_out,
    "reward": reward_itself,
}
_DIVERGENCES: Mapping[str, Callable[[float], float]] = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": _k3}
