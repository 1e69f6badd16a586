"""One training run in which every batch has exactly the age that is asked for, with the real engines in one process.

    batch b is sampled by version max(0, b - age) and trained by version b:

    version    0            1            2                    (age 2)
    samples    b0 b1 b2     b3           b4
    trains     b0           b1           b2

Every version but the first samples one batch, and the queue between sampling and training holds `age` of them. So all
ages see the same prompts in the same order and as many samples. The first batches are younger, for nothing is older
than version 0.

vLLM, torchtitan and the rewards are those of a run, without actors around them: weights are handed over in memory. The
engine outlives a run, the trainer is built anew, so a run costs its steps and no start-up.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from apps.toy.task import sorted_letters
from forgelite.buffer.packing import pack
from forgelite.config import GRPOConfig
from forgelite.config.loss import LossConfig
from forgelite.evaluation import evaluate
from forgelite.policy.client import PolicyClient
from forgelite.policy.engine_loop import EngineLoop
from forgelite.policy.engine_protocol import EngineStats, UpdateMode, UpdateReport
from forgelite.policy.groups import GroupProgress, GroupResult
from forgelite.preparation import prepare
from forgelite.rollout.episode import Rollout
from forgelite.scoring.group import ScoredGroup, score_group
from forgelite.scoring.reward import RewardSample
from forgelite.trainer.trainer import Trainer
from forgelite.types import Failure, GroupRequest, Score, Trajectory


@dataclass(kw_only=True, slots=True, frozen=True)
class Curve:
    """What one run learned. Example: `Curve(steps=[0, 10, 20], accuracy=[0.3, 0.6, 0.8], seconds=6.1, ess=0.93)`."""

    steps: list[int]
    accuracy: list[float]  # held out, greedy, after so many steps
    seconds: float
    ess: float  # effective sample size of the ratio to the policy that sampled, mean over the steps


class PolicyInProcess:
    """The calls of a `PolicyClient` to an engine loop in this process."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop

    async def submit(self, requests: Sequence[GroupRequest]) -> Sequence[Failure | None]:
        return self._loop.submit(requests)

    async def collect(self, timeout_s: float) -> list[GroupResult | GroupProgress]:
        return await asyncio.to_thread(self._loop.collect, timeout_s)

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._loop.abort(request_ids)

    async def update_weights(
        self, version: int, manifest: Any, mode: UpdateMode, keep_kv: bool, drain_timeout_s: float
    ) -> UpdateReport:
        """Here the manifest is the tensors themselves."""
        return await asyncio.to_thread(
            self._loop.update,
            version,
            lambda: manifest,
            mode=mode,
            keep_kv=keep_kv,
            drain_timeout_s=drain_timeout_s,
        )

    async def version(self) -> int:
        return self._loop.version

    async def stats(self) -> EngineStats:
        return self._loop.stats()


def start_policy(config: GRPOConfig) -> EngineLoop:
    """The vLLM engine of `config`, in this process, which must have the environment of a policy."""
    from forgelite.policy.engine import build_engine

    engine = build_engine(config.model.path, engine=config.policy.engine, seed=config.run.seed)
    return EngineLoop(engine, seed=config.run.seed)


async def train_at_age(
    engine: EngineLoop, config: GRPOConfig, loss: LossConfig, *, age: int, evaluate_every: int
) -> Curve:
    """Train `config.loop.steps` steps from the warm start.

    Args:
        engine: serves any weights; it is given those of the warm start.
        config: of the run, for everything but the loss and the age: `run.seed` sets prompts and samples.
        loss: what is minimised.
        age: of every batch from batch `age` on; batch b before it has age b.
        evaluate_every: steps between two held-out evaluations.

    Raises:
        TrainingDiverged: the loss or the gradient is not finite.
        AssertionError: a trained token does not have the age that it should have.
    """
    started = time.monotonic()
    run = _Run(engine, config, loss)
    await run.serve(0)
    waiting: deque[list[Trajectory]] = deque()
    points, ess, sampled = [(0, await run.accuracy())], [], 0
    steps = config.loop.steps
    for version in range(steps):
        while sampled < min(version + age + 1, steps):
            waiting.append(await run.sample(sampled))
            sampled += 1
        batch = waiting.popleft()
        ages = {t.age(version) for t in batch}
        assert ages <= {min(age, version)}, f"version {version} trains samples of age {ages}, not {age}"
        if batch:  # else no group had two different rewards, and there is nothing to learn
            metrics = await run.train(batch)
            ess.append(metrics["ratio/ess"])
        await run.serve(version + 1)
        if (version + 1) % evaluate_every == 0 or version + 1 == steps:
            points.append((version + 1, await run.accuracy()))
    await run.close()
    return Curve(
        steps=[step for step, _ in points],
        accuracy=[value for _, value in points],
        seconds=time.monotonic() - started,
        ess=sum(ess) / len(ess),
    )


class _Run:
    """The stations of one run."""

    def __init__(self, engine: EngineLoop, config: GRPOConfig, loss: LossConfig) -> None:
        self._config = config
        self._inputs = prepare(config)
        self._client = PolicyClient(PolicyInProcess(engine))
        self._rollout = Rollout(
            generator=self._client,
            tokenizer=self._inputs.tokenizer,
            sampling=self._inputs.sampling,
            seed=config.run.seed,
            max_tokens=config.trainer.training.seq_len,
        )
        self._trainer = Trainer.build(config.model, config.trainer, loss, steps=config.loop.steps, seed=config.run.seed)

    async def serve(self, version: int) -> None:
        """Let the policy compute with the trainer's weights, under the number `version`."""
        await self._client.update_weights(version, dict(self._trainer.export_hf()))

    async def sample(self, batch: int) -> list[Trajectory]:
        """The trajectories of batch `batch` that teach something, sampled by the policy as it is now."""
        size = self._config.loop.groups_per_step
        groups = await asyncio.gather(*(self._group(f"g{batch * size + i}") for i in range(size)))
        return [t for scored in groups for t in scored.group.trajectories]

    async def _group(self, group_id: str) -> ScoredGroup:
        prompt = next(self._inputs.prompts)
        members = await self._rollout.run(group_id, prompt, self._config.loop.group_size)
        return await score_group(
            group_id,
            prompt,
            members,
            score=_score,
            reference=None,
            advantage=self._config.advantage,
            filter_zero_variance=True,
            drop_group_on_failure=True,
        )

    async def train(self, batch: Sequence[Trajectory]) -> dict[str, float]:
        """One optimizer step; returns its metrics."""
        packed = pack(batch, self._config.trainer.training.seq_len)
        return dict((await asyncio.to_thread(self._trainer.train_step, packed)).metrics)

    async def accuracy(self) -> float:
        """Held out, greedy."""
        greedy = replace(self._rollout, sampling=replace(self._rollout.sampling, temperature=0.0))
        timeout_s = self._config.eval.timeout_s
        metrics = await evaluate(self._inputs.held_out, rollout=greedy, score=_score, timeout_s=timeout_s)
        return metrics["eval/reward"].value

    async def close(self) -> None:
        """Let go of the engine."""
        await self._client.close()


async def _score(samples: Sequence[RewardSample]) -> list[Score]:
    return [Score(reward=sorted_letters(sample)) for sample in samples]
