"""Rewards that come with the library. Each takes a `RewardSample` and returns a number; copy one to start your own."""

from __future__ import annotations

import re
from decimal import Decimal

from forgelite.scoring.reward import RewardSample

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def exact_match(sample: RewardSample) -> float:
    """1 if the completion is the column `answer`, white space at both ends aside."""
    return float(sample.completion.strip() == str(sample.row["answer"]).strip())


def last_number_matches(sample: RewardSample) -> float:
    """1 if the last number in the completion equals the column `answer`, read as a number; 0 without any number."""
    numbers = _NUMBER.findall(sample.completion)
    if not numbers:
        return 0.0
    return float(_decimal(numbers[-1]) == _decimal(str(sample.row["answer"])))


def finished(sample: RewardSample) -> float:
    """1 if the completion ended by itself, 0 if it was cut off by its length."""
    return float(sample.finish_reason == "stop")


def environment_reward(sample: RewardSample) -> float:
    """What the environment gave, all turns together. Raises ValueError (a counted failure) if it gave nothing."""
    if sample.environment_reward is None:
        raise ValueError("the environment gave no reward")
    return sample.environment_reward


def _decimal(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))
