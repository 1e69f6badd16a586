"""Stations without engines: a policy that samples its own version as token, a trainer that only counts.

Time is the number of turns of the event loop, so nothing here sleeps and every run with one seed is the same.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from forgelite.buffer.staleness import OnStale
from forgelite.config import AdvantageConfig, LoopConfig
from forgelite.loop import Loop, Usage
from forgelite.loop.stations import RollOut, ScoreGroup
from forgelite.rollout.dataset import PromptStream
from forgelite.rollout.episode import Rollout
from forgelite.scoring.group import score_group, score_member
from forgelite.scoring.reward import RewardSample
from forgelite.types import (
    Completion,
    Failure,
    Group,
    GroupRequest,
    Prompt,
    SamplingParams,
    Score,
    StepResult,
    TrainingBatch,
    VersionSpan,
)

OFFSET = 100  # a token is OFFSET + the version that sampled it


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class CharTokenizer:
    eos_token_id = 1

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(c) % 50 for c in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return " ".join(map(str, token_ids))


@dataclass
class VersionPolicy:
    """Samples one token a turn; the token says which version sampled it. Updates arrive between two tokens."""

    rng: random.Random
    max_turns: int = 8
    version: int = 0
    held: list[int] = field(default_factory=lambda: [0])  # versions that were ever served
    generated: int = 0
    first_versions: dict[str, int] = field(default_factory=dict)  # of the sessions that are being sampled
    cancelled: list[str] = field(default_factory=list)  # group ids

    async def generate_group(self, request: GroupRequest) -> list[Completion | Failure]:
        members = [self._generate(f"{request.request_id}/{i}", request) for i in range(request.n)]
        self.first_versions.setdefault(request.session, self.version)
        try:
            return await asyncio.gather(*members)
        finally:
            self.first_versions.pop(request.session, None)

    async def cancel(self, group_id: str) -> None:
        self.cancelled.append(group_id)

    async def _generate(self, request_id: str, request: GroupRequest) -> Completion:
        length = self.rng.randint(1, request.sampling.max_tokens)
        tokens: list[int] = []
        spans: list[VersionSpan] = []
        while len(tokens) < length:
            at, version = len(tokens), self.version
            tokens.append(OFFSET + version)
            self.generated += 1
            if spans and spans[-1].version == version:
                spans[-1] = VersionSpan(version=version, start=spans[-1].start, end=at + 1)
            else:
                spans.append(VersionSpan(version=version, start=at, end=at + 1))
            await turns(self.rng.randint(1, self.max_turns))
        return Completion(
            request_id=request_id,
            prompt_ids=request.prompt_ids,
            token_ids=tokens,
            logprobs=[-1.0] * len(tokens),
            spans=spans,
            finish_reason="stop",
        )

    async def update_weights(self, version: int) -> Mapping[str, Any]:
        await turns(self.rng.randint(0, self.max_turns))
        self.version = version
        self.held.append(version)
        return {}

    async def usage(self) -> Usage:
        return Usage(generated_tokens=self.generated, first_versions=dict(self.first_versions))


@dataclass
class CountingTrainer:
    """Counts steps and keeps what it was given, with the version it had at that moment."""

    rng: random.Random
    version: int = 0
    batches: list[tuple[int, TrainingBatch]] = field(default_factory=list)

    async def train_step(self, batch: TrainingBatch) -> StepResult:
        self.batches.append((self.version, batch))
        await turns(self.rng.randint(1, 30))
        self.version += 1
        return StepResult(version=self.version, metrics={})

    async def publish(self) -> Mapping[str, Any]:
        await turns(1)
        return {}


@dataclass
class Recorder:
    """Remembers what the loop told."""

    lines: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    groups: list[tuple[int, list[Group]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    final: Mapping[str, Any] = field(default_factory=dict)

    async def on_step(self, steps: int, metrics: Mapping[str, Any], groups: Sequence[Group]) -> None:
        self.lines.append((steps, metrics))
        self.groups.append((steps, list(groups)))

    def on_note(self, text: str) -> None:
        self.notes.append(text)

    def on_end(self, metrics: Mapping[str, Any]) -> None:
        self.final = metrics


@dataclass
class FakeRun:
    """A whole run on fakes."""

    loop: Loop
    policy: VersionPolicy
    trainer: CountingTrainer
    recorder: Recorder
    prompts: PromptStream
    roll_out: RollOut
    score_group: ScoreGroup


def make_run(
    *,
    seed: int = 0,
    steps: int = 6,
    depth: int | None = 1,
    max_policy_age: int = 1,
    on_stale: OnStale = "drop_sample",
    sync_every: int = 1,
    reissue: bool = True,
    groups_per_step: int = 3,
    group_size: int = 2,
    filter_zero_variance: bool = False,
    drop_group_on_failure: bool = False,
    max_tokens: int = 6,
    reward=None,
    score=None,
    **options: Any,
) -> FakeRun:
    """Args as in the config; `reward(sample, rng)` returns a Score or a Failure, random scores by default;
    `score(samples)` stands for the whole reward station.
    """
    rng = random.Random(seed)
    policy, trainer, recorder = VersionPolicy(rng), CountingTrainer(rng), Recorder()
    tokenizer = CharTokenizer()
    prompts = PromptStream(
        [{"prompt": f"p{i}"} for i in range(50)],
        to_prompt=lambda name, row: Prompt(
            prompt_id=name,
            text=row["prompt"],
            token_ids=tuple(tokenizer.encode(row["prompt"], add_special_tokens=False)),
        ),
        seed=seed,
        shuffle=True,
    )

    async def score_samples(samples: Sequence[RewardSample]) -> list[Score | Failure]:
        await turns(rng.randint(0, 20))
        if reward is None:
            return [Score(reward=rng.random()) for _ in samples]
        return [reward(sample, rng) for sample in samples]

    async def score_one_group(group_id, prompt, members):
        return await score_group(
            group_id,
            prompt,
            members,
            score=score or score_samples,
            reference=None,
            advantage=AdvantageConfig(),
            filter_zero_variance=filter_zero_variance,
            drop_group_on_failure=drop_group_on_failure,
        )

    rollout = Rollout(
        generator=policy,
        tokenizer=tokenizer,
        sampling=SamplingParams(max_tokens=max_tokens),
        seed=seed,
        max_tokens=64,
    )
    loop = Loop(
        config=LoopConfig(
            **{
                "steps": steps,
                "depth": depth,
                "max_policy_age": max_policy_age,
                "on_stale": on_stale,
                "sync_every": sync_every,
                "reissue": reissue,
                "groups_per_step": groups_per_step,
                "group_size": group_size,
                "filter_zero_variance": filter_zero_variance,
                "batch_timeout_s": 60.0,
            }
            | options.pop("loop", {})
        ),
        row_length=64,
        prompts=prompts,
        roll_out=rollout.run,
        score_group=score_one_group,
        trainer=trainer,
        policy=policy,
        observer=recorder,
        **{"roll_out_member": rollout.run_member, "score_member": partial(score_member, score=score or score_samples)}
        | options,
    )
    return FakeRun(
        loop=loop,
        policy=policy,
        trainer=trainer,
        recorder=recorder,
        prompts=prompts,
        roll_out=rollout.run,
        score_group=score_one_group,
    )
