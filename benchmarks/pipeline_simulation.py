"""One simulated run: the real loop, queue, ledger, scoring and packing; simulated policy, rewards and trainer.

    lengths ──> SimulatedPolicy ──> stragglers ──> score_group ──> Loop, GroupQueue, Ledger ──> SimulatedTrainer
                     ^                                                                              │
                     └───────────────────────── update_weights <─────────── publish ────────────────┘

All of it runs on a virtual clock (`benchmarks.virtual_clock`).
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.pipeline_lengths import Lengths
from benchmarks.pipeline_policy import Engine, SimulatedPolicy
from benchmarks.pipeline_stations import Counting, Rewards, Rollouts, SimulatedTrainer, Trainer
from benchmarks.virtual_clock import run_virtual
from forgelite.config import AdvantageConfig, LoopConfig
from forgelite.loop import Loop
from forgelite.rollout.dataset import PromptStream
from forgelite.scoring.group import score_group, score_member
from forgelite.types import Prompt

PROMPTS = 1000
FILL_STEPS = 4  # before the measured ones: the pipeline fills
DRAIN_STEPS = 4  # after them: the pipeline runs empty, for nothing is sampled that no step will train
UNBOUNDED = 1_000_000_000  # an age, a deadline or a row that nothing reaches


@dataclass(kw_only=True, slots=True, frozen=True)
class Scenario:
    """One run to simulate.

    Example: `Scenario(lengths=lengths, engine=engine, trainer=Trainer(tokens_per_s=10_000), loop={"depth": 2})`.
    """

    lengths: Lengths
    engine: Engine
    trainer: Trainer
    rewards: Rewards = field(default_factory=Rewards)
    loop: Mapping[str, Any] = field(default_factory=dict)  # keys of LoopConfig, without `steps`
    seconds: float = 3600.0  # that the measured steps would take at the bound
    seed: int = 0

    def measured_steps(self) -> int:
        """Optimizer steps that are measured: those of `seconds` at the bound, at least 8."""
        config = self.loop_config(1)
        per_step = config.groups_per_step * config.group_size * self.lengths.mean()
        rate = min(self.engine.tokens_per_s, self.trainer.tokens_per_s)
        return max(8, round(self.seconds * rate / per_step))

    def loop_config(self, steps: int) -> LoopConfig:
        """The loop's section of the configuration."""
        plain = {"group_size": 8, "groups_per_step": 32, "filter_zero_variance": False, "batch_timeout_s": 1e7}
        return LoopConfig(**{**plain, "steps": steps, **self.loop})


@dataclass(kw_only=True, slots=True, frozen=True)
class Outcome:
    """What a run was like between two steps, with the pipeline as full at the end as at the beginning.

    Rates and idle shares are those of the measured steps; ages and the ledger's counts those of the whole run.

    Example: 100 steps of 512,000 tokens in 2,900 s, where generation at its full rate needs 2,560 s and training
    2,048 s: `bound_s` is 2,560, `efficiency` 0.88 and `trainer_idle` 0.29.
    """

    steps: int  # measured
    elapsed_s: float  # simulated
    trained_tokens: int
    bound_s: float  # the least time for those tokens: max(generation at its full rate, training)
    policy_idle: float  # 1 - generated tokens / what the engine would generate at its full rate
    trainer_idle: float  # share of the time in which no step ran
    ages: Mapping[int, int]  # age -> trained samples
    closed: Mapping[str, int]  # <state>/<reason> of the ledger -> samples
    mean_length: float  # tokens of a trained sample
    most_groups_in_flight: int
    controller_s: float  # CPU time of this process for the run, the simulated stations included
    notes: Sequence[str]  # what the loop told the user

    @property
    def efficiency(self) -> float:
        """The bound by the time that it took."""
        return self.bound_s / self.elapsed_s

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens a second."""
        return self.trained_tokens / self.elapsed_s

    @property
    def trained_samples(self) -> int:
        """In the whole run."""
        return sum(self.ages.values())

    @property
    def rejected_share(self) -> float:
        """Of the samples that were trained, rejected, or cancelled as too old, those that were not trained."""
        lost = sum(self.closed.get(name, 0) for name in ("rejected/stale", "rejected/overflow", "cancelled/stale"))
        return lost / (lost + self.trained_samples)

    @property
    def cut_share(self) -> float:
        """The same for samples that were cut as surplus or stragglers."""
        cut = sum(self.closed.get(name, 0) for name in ("cancelled/surplus", "cancelled/straggler"))
        return cut / (cut + self.trained_samples)

    @property
    def mean_age(self) -> float:
        """Of trained samples, in versions."""
        return sum(age * n for age, n in self.ages.items()) / self.trained_samples


def simulate(scenario: Scenario) -> Outcome:
    """Run a scenario to its end. Equal scenarios have equal outcomes, but for `controller_s`.

    Raises:
        ValueError: the configuration makes no sense.
        ForgeliteError: the run failed, as a real one would have.
        Deadlock: nobody was left to wake the others.
    """
    started = time.process_time()
    return run_virtual(_simulate(scenario, started))


def simulate_all(scenarios: Sequence[Scenario], processes: int) -> list[Outcome]:
    """Run scenarios, `processes` of them at a time; outcomes in the order of the scenarios."""
    if processes == 1:
        return [simulate(scenario) for scenario in scenarios]
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(simulate, scenarios))


async def _simulate(scenario: Scenario, started: float) -> Outcome:
    measured = scenario.measured_steps()
    config = scenario.loop_config(FILL_STEPS + measured + DRAIN_STEPS)
    policy = SimulatedPolicy(scenario.engine)
    trainer = SimulatedTrainer(scenario.trainer)
    observer = Counting(policy, trainer)
    rollouts = Rollouts(policy=policy, lengths=scenario.lengths, rewards=scenario.rewards, seed=scenario.seed)
    loop = Loop(
        config=config,
        row_length=UNBOUNDED,
        prompts=PromptStream([{}] * PROMPTS, to_prompt=_prompt, seed=scenario.seed, shuffle=False),
        roll_out=rollouts.run,
        roll_out_member=rollouts.run_member,
        score_member=partial(score_member, score=rollouts.score),
        score_group=partial(
            score_group,
            score=rollouts.score,
            reference=None,
            advantage=AdvantageConfig(),
            filter_zero_variance=config.filter_zero_variance,
            drop_group_on_failure=False,
        ),
        trainer=trainer,
        policy=policy,
        observer=observer,
    )
    await loop.run()
    first, last = observer.marks[FILL_STEPS], observer.marks[FILL_STEPS + measured]
    elapsed, tokens = last.seconds - first.seconds, last.trained_tokens - first.trained_tokens
    generated = last.generated_tokens - first.generated_tokens
    return Outcome(
        steps=measured,
        elapsed_s=elapsed,
        trained_tokens=tokens,
        bound_s=max(
            tokens / scenario.engine.tokens_per_s,
            tokens / scenario.trainer.tokens_per_s + measured * scenario.trainer.step_overhead_s,
        ),
        policy_idle=1 - generated / (elapsed * scenario.engine.tokens_per_s),
        trainer_idle=1 - (last.trainer_busy_s - first.trainer_busy_s) / elapsed,
        ages=dict(sorted(observer.ages.items())),
        closed=_closed(observer.final),
        mean_length=trainer.tokens / sum(observer.ages.values()),
        most_groups_in_flight=rollouts.most_in_flight,
        controller_s=time.process_time() - started,
        notes=observer.notes,
    )


def _prompt(prompt_id: str, row: Mapping[str, Any]) -> Prompt:
    return Prompt(prompt_id=prompt_id, text="", token_ids=(0,), row=row)


def _closed(metrics: Mapping[str, Any]) -> dict[str, int]:
    names = {name.removeprefix("ledger/"): n for name, n in metrics.items() if n}
    return {name: n for name, n in names.items() if name.count("/") == 1}
