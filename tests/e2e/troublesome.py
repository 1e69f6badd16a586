"""Rewards that misbehave, for the tests."""

from __future__ import annotations

import threading
import zlib

from apps.toy.task import sorted_letters
from forgelite.scoring.reward import RewardSample


def sometimes_broken(sample: RewardSample) -> float:
    """Raises, hangs or returns NaN for about one sample in twenty each; which ones depends on the sample's id."""
    fate = zlib.crc32(sample.sample_id.encode()) % 60
    if sample.sample_id.startswith("g") and fate < 3:
        raise ValueError("cannot parse")
    if sample.sample_id.startswith("g") and fate == 3:
        threading.Event().wait()
    if sample.sample_id.startswith("g") and 4 <= fate < 7:
        return float("nan")
    return sorted_letters(sample)


def always_one(sample: RewardSample) -> float:
    """The same reward for every answer."""
    return 1.0
