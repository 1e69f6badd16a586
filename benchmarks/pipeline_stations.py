"""What stands beside the engine in a simulated run: rollouts and rewards, the trainer, and who watches the loop."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.pipeline_lengths import Lengths
from benchmarks.pipeline_policy import Answer, SimulatedPolicy
from forgelite.scoring.reward import RewardSample
from forgelite.types import Failure, Group, Prompt, Score, StepResult, TrainingBatch, Trajectory


@dataclass(kw_only=True, slots=True, frozen=True)
class Trainer:
    """How fast the trainer is. Example: `Trainer(tokens_per_s=25_000)`."""

    tokens_per_s: float  # forward and backward over the tokens of a batch
    step_overhead_s: float = 0.0  # of each step, whatever its size
    publish_s: float = 0.5  # until the weights can be fetched; the next step goes on meanwhile


@dataclass(kw_only=True, slots=True, frozen=True)
class Rewards:
    """How scoring and environments behave. Example: `Rewards(mean_s=5.0, failed_share=0.01)`."""

    mean_s: float = 1.0  # of one group, lognormal
    sigma: float = 0.5
    failed_share: float = 0.0  # of samples: the scorer gives up on them
    filtered_share: float = 0.0  # of groups: all rewards are equal
    straggling_share: float = 0.0  # of samples: the environment answers late
    straggling_s: float = 0.0  # that late


class Rollouts:
    """Groups of answers with drawn lengths, and their scores."""

    def __init__(self, *, policy: SimulatedPolicy, lengths: Lengths, rewards: Rewards, seed: int) -> None:
        self.most_in_flight = 0
        self._in_flight = 0
        self._policy = policy
        self._rewards = rewards
        # Lengths have a generator of their own: groups start in the order of their numbers, so group k has the same
        # lengths whatever the depth and the selection order are.
        self._draw = lengths.sampler(random.Random(f"{seed}/lengths"))
        self._rng = random.Random(f"{seed}/rewards")

    async def run(self, group_id: str, prompt: Prompt, size: int) -> list[Trajectory | Failure]:
        """Roll out a whole group."""
        answers = self._policy.start(group_id, [self._draw() for _ in range(size)])
        late = [self._straggling_s() for _ in answers]
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            for answer in answers:
                await answer.done
            ready = max(answer.ended_s + seconds for answer, seconds in zip(answers, late, strict=True))
            if (seconds := ready - asyncio.get_running_loop().time()) > 0:
                await asyncio.sleep(seconds)
        finally:
            self._in_flight -= 1
            self._policy.take_out(answers)
        return [self._trajectory(f"{group_id}/{i}", answer) for i, answer in enumerate(answers)]

    async def run_member(self, group_id: str, prompt: Prompt, index: int) -> Trajectory | Failure:
        """Roll out one member alone."""
        (answer,) = self._policy.start(group_id, [self._draw()])
        late = self._straggling_s()
        try:
            await answer.done
            if late > 0:
                await asyncio.sleep(late)
        finally:
            self._policy.take_out([answer])
        return self._trajectory(f"{group_id}/{index}", answer)

    def _straggling_s(self) -> float:
        rewards = self._rewards
        straggles = rewards.straggling_share > 0 and self._rng.random() < rewards.straggling_share
        return rewards.straggling_s if straggles else 0.0

    def _trajectory(self, trajectory_id: str, answer: Answer) -> Trajectory:
        tokens, spans = self._policy.entries(answer, offset=1)
        return Trajectory(
            trajectory_id=trajectory_id,
            group_id=answer.group_id,
            token_ids=[0, *tokens],  # a prompt of no tokens, for the first entry of a sequence is never trained
            loss_mask=[False] + [True] * len(tokens),
            logprobs=[0.0] * (1 + len(tokens)),
            spans=spans,
            finish_reason="stop",
        )

    async def score(self, samples: Sequence[RewardSample]) -> list[Score | Failure]:
        """Rewards of one group, after a while."""
        rewards, rng = self._rewards, self._rng
        if rewards.mean_s > 0:
            await asyncio.sleep(rewards.mean_s * rng.lognormvariate(-(rewards.sigma**2) / 2, rewards.sigma))
        equal = rng.random() < rewards.filtered_share
        return [
            Failure(reason="simulated", message="the simulated scorer gave up")
            if rng.random() < rewards.failed_share
            else Score(reward=0.0 if equal else rng.random())
            for _ in samples
        ]


class SimulatedTrainer:
    """Takes as long as the tokens of a batch need."""

    def __init__(self, speed: Trainer) -> None:
        self.version = 0
        self.tokens = 0
        self.busy_s = 0.0
        self._speed = speed

    async def train_step(self, batch: TrainingBatch) -> StepResult:
        """One optimizer step. Entries of `token_ids` say how many tokens they stand for."""
        tokens = int(batch.token_ids.sum())
        seconds = tokens / self._speed.tokens_per_s + self._speed.step_overhead_s
        await asyncio.sleep(seconds)
        self.tokens += tokens
        self.busy_s += seconds
        self.version += 1
        return StepResult(version=self.version, metrics={})

    async def publish(self) -> Mapping[str, Any]:
        """Make the weights available."""
        await asyncio.sleep(self._speed.publish_s)
        return {}


@dataclass(kw_only=True, slots=True, frozen=True)
class Mark:
    """Running totals at the end of a step."""

    seconds: float = 0.0  # simulated
    trained_tokens: int = 0
    trainer_busy_s: float = 0.0
    generated_tokens: float = 0.0  # those of rejected, cancelled and unfinished samples too


class Counting:
    """The observer: running totals at every step, ages, notes."""

    def __init__(self, policy: SimulatedPolicy, trainer: SimulatedTrainer) -> None:
        self.marks = [Mark()]  # entry i: at the end of step i
        self.ages: Counter[int] = Counter()
        self.notes: list[str] = []
        self.final: Mapping[str, Any] = {}
        self._policy = policy
        self._trainer = trainer

    async def on_step(self, steps: int, metrics: Mapping[str, Any], groups: Sequence[Group]) -> None:
        """Count the batch of this step."""
        self.ages.update({int(age): n for age, n in metrics["age/histogram"].items()})
        self.marks.append(
            Mark(
                seconds=asyncio.get_running_loop().time(),
                trained_tokens=self._trainer.tokens,
                trainer_busy_s=self._trainer.busy_s,
                generated_tokens=(await self._policy.usage()).generated_tokens,
            )
        )

    def on_note(self, text: str) -> None:
        """Keep it."""
        self.notes.append(text)

    def on_end(self, metrics: Mapping[str, Any]) -> None:
        """Keep the final account."""
        self.final = metrics
