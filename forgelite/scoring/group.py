"""One group is scored: rewards, what fails, what teaches nothing, advantages, reference log-probabilities."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from forgelite.config import AdvantageConfig
from forgelite.scoring.advantages import has_no_variance, make_advantages, penalised_rewards
from forgelite.scoring.reward import RewardSample
from forgelite.types import Failure, Group, Prompt, Score, Trajectory

ScoreSamples = Callable[[Sequence[RewardSample]], Awaitable[Sequence[Score | Failure]]]
ReferenceLogprobs = Callable[[Sequence[Trajectory]], Awaitable[Sequence[list[float]]]]


@dataclass(kw_only=True, slots=True)
class ScoredGroup:
    """What became of the members of a group. Every member is in exactly one of the four places.

    Example, one of four members failed and the others have equal rewards: `group.trajectories == []`,
    `failed == {"g3/1": Failure(...)}`, `filtered == {"g3/0": "zero_variance", ...}`.
    """

    group: Group  # the trajectories that go on to the loss
    scores: list[Score] = field(default_factory=list)  # of every member that was scored, filtered or not
    failed: dict[str, Failure] = field(default_factory=dict)  # trajectory id -> why
    filtered: dict[str, str] = field(default_factory=dict)  # trajectory id -> reason
    cut: list[str] = field(default_factory=list)  # trajectory ids of members that were cancelled as too slow


def reward_sample(prompt: Prompt, trajectory: Trajectory) -> RewardSample:
    """What a reward sees of a trajectory."""
    return RewardSample(
        sample_id=trajectory.trajectory_id,
        prompt=prompt.text,
        completion=trajectory.completion_text,
        finish_reason=trajectory.finish_reason,
        row=prompt.row,
        environment_reward=trajectory.environment_reward,
    )


async def score_member(prompt: Prompt, trajectory: Trajectory, *, score: ScoreSamples) -> Trajectory | Failure:
    """Score one member alone: the trajectory with its score, or why it has none."""
    (result,) = await score([reward_sample(prompt, trajectory)])
    if isinstance(result, Failure):
        return result
    trajectory.score = result
    return trajectory


async def score_group(
    group_id: str,
    prompt: Prompt,
    members: Sequence[Trajectory | Failure | None],
    *,
    score: ScoreSamples,
    reference: ReferenceLogprobs | None,
    advantage: AdvantageConfig,
    filter_zero_variance: bool,
    drop_group_on_failure: bool,
) -> ScoredGroup:
    """Score the members of one group.

    Args:
        group_id, prompt: of the group; member i has the id `<group_id>/<i>`.
        members: what the rollout gave; None: the member was cut before it had finished. One that has a score already
            (`score_member`) is not scored again.
        score: the rewards. A failed sample is left out of the baseline; it never counts as a reward of 0.
        reference: log-probabilities of the frozen starting model, asked for only where a group goes on.
        advantage: how rewards become advantages.
        filter_zero_variance: leave out a group whose rewards are all equal.
        drop_group_on_failure: leave out a group with a failed member.
    """
    scored = ScoredGroup(group=Group(group_id=group_id, prompt=prompt, trajectories=[]))
    rolled_out = [m for m in members if isinstance(m, Trajectory)]
    scored.failed = {f"{group_id}/{i}": m for i, m in enumerate(members) if isinstance(m, Failure)}
    scored.cut = [f"{group_id}/{i}" for i, m in enumerate(members) if m is None]
    kept = scored.group.trajectories
    if unscored := [t for t in rolled_out if t.score is None]:
        results = await score([reward_sample(prompt, t) for t in unscored])
        for trajectory, result in zip(unscored, results, strict=True):
            if isinstance(result, Failure):
                scored.failed[trajectory.trajectory_id] = result
            else:
                trajectory.score = result
    kept += [t for t in rolled_out if t.score is not None]
    scored.scores = [t.score for t in kept]
    if not kept:
        return scored
    if scored.failed and drop_group_on_failure:
        reason = "group_failed"
    elif filter_zero_variance and has_no_variance([t.score.reward for t in kept]):
        reason = "zero_variance" if len(kept) > 1 else "no_baseline"  # the others have failed
    else:
        if reference is not None:
            for trajectory, logprobs in zip(kept, await reference(kept), strict=True):
                trajectory.reference_logprobs = logprobs
        values = make_advantages(advantage)(penalised_rewards(kept, advantage))
        for trajectory, value in zip(kept, values, strict=True):
            trajectory.advantage = value
        return scored
    scored.filtered = dict.fromkeys((t.trajectory_id for t in kept), reason)
    scored.group.trajectories = []
    return scored
