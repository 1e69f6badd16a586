"""The actor around the rewards: a process of its own, so that a slow reward stalls neither engine nor trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from monarch.actor import Actor, concurrent_endpoint

from forgelite.scoring.reward import RewardSample, Scorer, load_reward
from forgelite.types import Failure, Score


@dataclass(kw_only=True, slots=True, frozen=True)
class RewardSpec:
    """Where a reward is found: what `load_reward` takes."""

    path: str
    name: str | None
    weight: float
    timeout_s: float


@dataclass(kw_only=True, slots=True, frozen=True)
class ScoringReply:
    """The scores of one call, and how many threads hang in rewards."""

    results: Sequence[Score | Failure]  # one for each sample
    hung_threads: int


class RewardActor(Actor):
    """Scores samples. All endpoints are concurrent: one call may wait while others are answered."""

    def __init__(self) -> None:
        self._scorer: Scorer | None = None

    @concurrent_endpoint
    async def setup(self, rewards: Sequence[RewardSpec], max_concurrency: int, max_threads: int) -> None:
        """Import the rewards. Raises ConfigError if one cannot be imported."""
        loaded = [load_reward(r.path, name=r.name, weight=r.weight, timeout_s=r.timeout_s) for r in rewards]
        self._scorer = Scorer(loaded, max_concurrency=max_concurrency, max_threads=max_threads)

    @concurrent_endpoint
    async def score(self, samples: Sequence[RewardSample]) -> ScoringReply:
        """Score each sample."""
        results = await self._scorer.score(samples)
        return ScoringReply(results=results, hung_threads=self._scorer.hung_threads)
