"""Depth 0 and age 0 are the synchronous trajectory: the loop against a driver that knows no loop, bit for bit."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Mapping
from typing import Any

from benchmarks.virtual_clock import run_virtual
from forgelite.buffer.packing import pack
from forgelite.types import Completion, GroupRequest, Score, StepResult, TrainingBatch, VersionSpan
from tests.unit.fakes import FakeRun, make_run

STEPS, B, N = 7, 4, 3


def draw(*names: object) -> random.Random:
    """Random numbers that depend on names alone, not on who asks first."""
    return random.Random(hashlib.blake2b(repr(names).encode(), digest_size=8).digest())


def learn(run: FakeRun) -> list[TrainingBatch]:
    """Make the fakes a learning pair: tokens depend on the weights, and the weights on everything that was trained."""
    trainer, policy, batches = run.trainer, run.policy, []
    trainer.weights = policy.weights = "version 0"

    async def generate(request_id: str, request: GroupRequest) -> Completion:
        rng = draw(policy.weights, request_id, request.prompt_ids, request.sampling.seed)
        await asyncio.sleep(rng.expovariate(1.0))
        size = rng.randint(1, 6)
        return Completion(
            request_id=request_id,
            prompt_ids=request.prompt_ids,
            token_ids=[rng.randint(50, 99) for _ in range(size)],
            logprobs=[-rng.random() for _ in range(size)],
            spans=[VersionSpan(version=policy.version, start=0, end=size)],
            finish_reason="stop",
        )

    async def train_step(batch: TrainingBatch) -> StepResult:
        await asyncio.sleep(1)
        batches.append(batch)
        seen = (batch.token_ids.tolist(), batch.logprobs.tolist(), batch.advantages.tolist(), batch.versions.tolist())
        trainer.weights = hashlib.sha256(repr((trainer.weights, seen)).encode()).hexdigest()
        trainer.version += 1
        return StepResult(version=trainer.version, metrics={})

    async def update_weights(version: int) -> Mapping[str, Any]:
        await asyncio.sleep(0.5)
        policy.version, policy.weights = version, trainer.weights
        return {}

    policy._generate, trainer.train_step, policy.update_weights = generate, train_step, update_weights
    return batches


def reward(sample, rng) -> Score:
    return Score(reward=float(draw(sample.completion).random() < 0.4))


def make() -> tuple[FakeRun, list[TrainingBatch]]:
    run = make_run(
        steps=STEPS,
        depth=0,
        max_policy_age=0,
        groups_per_step=B,
        group_size=N,
        filter_zero_variance=True,
        reward=reward,
    )
    return run, learn(run)


async def synchronous(run: FakeRun) -> None:
    """The algorithm in ten lines: full waves of groups until a batch is there, one step, new weights."""
    number = 0
    for _ in range(STEPS):
        ready = []
        while len(ready) < B:
            wave = [(f"g{number + i}", next(run.prompts)) for i in range(B - len(ready))]
            number += len(wave)
            members = await asyncio.gather(*(run.roll_out(name, prompt, N) for name, prompt in wave))
            for (name, prompt), rolled_out in zip(wave, members, strict=True):
                ready.append((await run.score_group(name, prompt, rolled_out)).group)
            ready = [group for group in ready if group.trajectories]
        await run.trainer.train_step(pack([t for group in ready for t in group.trajectories], 64))
        await run.policy.update_weights(run.trainer.version)


def test_depth_0_and_age_0_give_the_synchronous_trajectory_bit_for_bit():
    run, batches = make()
    run_virtual(run.loop.run())
    reference, expected = make()
    run_virtual(synchronous(reference))
    assert run.trainer.weights == reference.trainer.weights
    assert run.trainer.weights != "version 0"
    assert len(batches) == STEPS
    for ours, theirs in zip(batches, expected, strict=True):
        for name in ("token_ids", "positions", "sequence_ids", "loss_mask", "logprobs", "versions", "advantages"):
            assert getattr(ours, name).equal(getattr(theirs, name)), name
    assert run.loop.ledger.metrics()["ledger/filtered/zero_variance"] > 0


def test_at_depth_0_no_group_starts_beside_an_evaluation():
    """Else the engine would compute other batches in every repetition."""
    evaluated = []

    async def evaluate() -> Mapping[str, Any]:
        await asyncio.sleep(0)
        assert len(run.loop._supply.flight) == 0
        evaluated.append(run.policy.version)
        return {}

    run = make_run(steps=3, depth=0, max_policy_age=0, evaluate=evaluate, evaluate_every=1)
    run_virtual(run.loop.run())
    assert evaluated == [0, 1, 2, 3]
