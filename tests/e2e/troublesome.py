"""Rewards and environments that misbehave, for the tests."""

from __future__ import annotations

import asyncio
import re
import threading
import zlib

from apps.toy.task import sorted_letters
from forgelite.rollout.environment import SingleTurn, Transition
from forgelite.scoring.reward import RewardSample
from forgelite.types import Completion


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


class Dawdling(SingleTurn):
    """A single turn, after which members 6 and 7 of every group that is trained take an hour."""

    async def step(self, completion: Completion) -> Transition:
        if re.fullmatch(r"g\d+/[67]/0", completion.request_id):
            await asyncio.sleep(3600)
        return await super().step(completion)
