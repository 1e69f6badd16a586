"""Rewards: plain callables of the user, sync or async, each with a deadline and a weight.

This module, like the user's reward, runs in the reward process; nothing here imports torch.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forgelite.config import import_object
from forgelite.errors import ConfigError
from forgelite.scoring.deadline_thread import DeadlineThread
from forgelite.types import Failure, Score


@dataclass(kw_only=True, slots=True, frozen=True)
class RewardSample:
    """What a reward is given.

    Example, a whole reward: `def exact(sample): return sample.completion == sample.row["answer"]`.
    """

    sample_id: str
    prompt: str
    completion: str  # what the policy wrote, all turns, special tokens left out
    finish_reason: str  # "stop" or "length"
    row: Mapping[str, Any] = field(default_factory=dict)  # every column of the dataset
    environment_reward: float | None = None  # None: the environment gave none


PROCESS = "process"  # the reason of a failure that is the reward process's and not the sample's

RewardFunction = Callable[[RewardSample], float | Awaitable[float]]


@dataclass(kw_only=True, slots=True, frozen=True)
class WeightedReward:
    """One reward with its share in the sum. Example: `WeightedReward(name="exact", function=exact)`."""

    name: str
    function: RewardFunction
    weight: float = 1.0
    timeout_s: float = 10.0


def load_reward(path: str, *, name: str | None, weight: float, timeout_s: float) -> WeightedReward:
    """Import `package.module:function`. Raises ConfigError that names the reward."""
    loaded = import_object(path, "reward.functions")
    if not callable(loaded):
        raise ConfigError(f"reward.functions: {path} is a {type(loaded).__name__}, not a function")
    return WeightedReward(name=name or path.rpartition(":")[2], function=loaded, weight=weight, timeout_s=timeout_s)


class Scorer:
    """Applies the rewards to samples. A sample's failure touches no other sample."""

    def __init__(self, rewards: Sequence[WeightedReward], *, max_concurrency: int, max_threads: int) -> None:
        """Args:
        rewards: the terms of the sum.
        max_concurrency: calls of async rewards that run at the same time.
        max_threads: threads that call sync rewards.
        """
        self._rewards = rewards
        self._slots = asyncio.Semaphore(max_concurrency)
        self._threads = asyncio.Semaphore(max_threads)
        self._max_threads = max_threads
        self._left_behind: list[DeadlineThread] = []

    @property
    def hung_threads(self) -> int:
        """Threads of sync rewards that missed their deadline and still run."""
        self._left_behind = [t for t in self._left_behind if t.still_running]
        return len(self._left_behind)

    async def score(self, samples: Sequence[RewardSample]) -> list[Score | Failure]:
        """Score each sample; entry i belongs to `samples[i]`."""
        columns = await asyncio.gather(*(self._apply(reward, samples) for reward in self._rewards))
        return [self._sum(values) for values in zip(*columns, strict=True)]

    def _sum(self, values: Sequence[float | Failure]) -> Score | Failure:
        for value in values:
            if isinstance(value, Failure):
                return value
        parts = {reward.name: value for reward, value in zip(self._rewards, values, strict=True)}
        return Score(reward=math.fsum(r.weight * parts[r.name] for r in self._rewards), parts=parts)

    async def _apply(self, reward: WeightedReward, samples: Sequence[RewardSample]) -> list[float | Failure]:
        if inspect.iscoroutinefunction(reward.function):
            raw = await asyncio.gather(*(self._await_one(reward, s) for s in samples))
        else:
            share = max(1, math.ceil(len(samples) / self._max_threads))
            shares = [samples[i : i + share] for i in range(0, len(samples), share)]
            raw = [v for part in await asyncio.gather(*(self._call_share(reward, s) for s in shares)) for v in part]
        return [_checked(reward, sample, value) for sample, value in zip(samples, raw, strict=True)]

    async def _await_one(self, reward: WeightedReward, sample: RewardSample) -> Any:
        async with self._slots:
            call = asyncio.ensure_future(reward.function(sample))
            done, _ = await asyncio.wait({call}, timeout=reward.timeout_s)
            if not done:
                call.cancel()
                return _timeout(reward)
            if call.cancelled():
                return Failure(reason="raised", message="CancelledError: the reward cancelled itself")
            try:
                return call.result()
            except Exception as error:
                return Failure(reason="raised", message=f"{type(error).__name__}: {error}")

    async def _call_share(self, reward: WeightedReward, samples: Sequence[RewardSample]) -> list[Any]:
        results: list[Any] = []
        async with self._threads:
            while len(results) < len(samples):
                thread = DeadlineThread(reward.function, samples[len(results) :])
                results += await thread.wait(reward.timeout_s)
                if len(results) < len(samples):
                    self._left_behind.append(thread)
                    results.append(_timeout(reward))
        return results


def _timeout(reward: WeightedReward) -> Failure:
    return Failure(reason="timeout", message=f"no answer within {reward.timeout_s:g} s")


def _checked(reward: WeightedReward, sample: RewardSample, value: Any) -> float | Failure:
    """A finite number, or a failure that says which reward failed on which sample."""
    where = f"reward {reward.name} on {sample.sample_id}"
    if isinstance(value, Failure):
        return Failure(reason=value.reason, message=f"{where}: {value.message}")
    try:
        number = float(value)
    except (TypeError, ValueError):
        return Failure(reason="not_a_number", message=f"{where}: returned {value!r}")
    if not math.isfinite(number):
        return Failure(reason="not_finite", message=f"{where}: returned {number}")
    return number
