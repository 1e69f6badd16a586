"""Metrics of what a step was trained on: rewards and ages. Pure functions of records."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from forgelite.observe.metrics import Rate
from forgelite.types import Group, Score


def reward_metrics(scores: Sequence[Score]) -> dict[str, Any]:
    """`reward/mean`, `reward/std` and the mean of each part.

    Args:
        scores: of what the step trained and of what was filtered since the step before; a mean over trained samples
            alone would hide those of filtered groups.
    """
    if not scores:
        return {}
    rewards = [s.reward for s in scores]
    metrics: dict[str, Any] = {
        "reward/mean": Rate(numerator=sum(rewards), denominator=len(rewards)),
        "reward/std": statistics.pstdev(rewards),
    }
    if len(scores[0].parts) > 1:
        for name in scores[0].parts:
            values = [s.parts[name] for s in scores]
            metrics[f"reward/{name}/mean"] = Rate(numerator=sum(values), denominator=len(values))
    return metrics


def age_metrics(groups: Sequence[Group], trainer_version: int) -> dict[str, Any]:
    """`age/mean`, `age/max` and `age/histogram` of a batch that is trained at `trainer_version`."""
    ages = [t.age(trainer_version) for g in groups for t in g.trajectories]
    return {
        "age/mean": Rate(numerator=sum(ages), denominator=len(ages)),
        "age/max": max(ages),
        "age/histogram": {str(age): n for age, n in sorted(Counter(ages).items())},
    }
