"""Train from the record of a run: the same batches in the same order, with no policy, no rewards, no reference.

    record ──read──> batch ──age──> trainer          step k trains what step k of the recorded run trained
                              └ too old: rejected

Behaviour log-probabilities, version spans, advantages and the reference's log-probabilities are the recorded ones. So
the recorded configuration gives the recorded weights once more, bit for bit on one process; another loss, learning
rate or bound on age shows what it would have made of the same samples. The age of a sample is the trainer's version
minus the versions of its spans, as in any run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from forgelite.buffer.ledger import Ledger, State
from forgelite.buffer.packing import pack
from forgelite.buffer.staleness import StalenessPolicy
from forgelite.config import GRPOConfig, LoopConfig
from forgelite.errors import ConfigError, ForgeliteError
from forgelite.loop import Observer
from forgelite.loop.stations import Save
from forgelite.observe.batch_metrics import age_metrics
from forgelite.observe.recording import Record, read_batch
from forgelite.types import Group, StepResult, TrainingBatch


class TrainsBatches(Protocol):
    """What a replay needs of the trainer."""

    async def train_step(self, batch: TrainingBatch) -> StepResult:
        """One optimizer step."""
        ...


async def train_from_record(
    record: Record,
    *,
    config: LoopConfig,
    row_length: int,
    trainer: TrainsBatches,
    observer: Observer,
    save: Save | None = None,
    save_every: int = 0,
    resumed: Mapping[str, Any] | None = None,
) -> None:
    """Train until `config.steps` optimizer steps are done.

    Args:
        record: checked against the configuration by `check_replay`.
        config: how many steps, and how old a sample may be.
        row_length: tokens in a packed row (trainer.training.seq_len).
        trainer: at version 0, or at the version of `resumed`.
        observer: is told of every step.
        save: writes a checkpoint from plain data; called between two steps.
        save_every: steps between two checkpoints; 0: none.
        resumed: what `save` was given, to go on from there.

    Raises:
        ForgeliteError: every sample of a batch is older than `loop.max_policy_age`, or the trainer failed.
    """
    version = 0 if resumed is None else resumed["version"]
    ledger = Ledger() if resumed is None else Ledger.from_state(resumed["ledger"])
    clock = asyncio.get_running_loop().time
    try:
        while version < config.steps:
            began = clock()
            recorded = await asyncio.to_thread(read_batch, record, version + 1)
            groups = _fresh(recorded.groups, version, config, ledger)
            trajectories = [t for group in groups for t in group.trajectories]
            ages = age_metrics(groups, version)
            asked = clock()
            result = await trainer.train_step(pack(trajectories, row_length))
            trained = clock()
            ledger.move([t.trajectory_id for t in trajectories], State.TRAINED)
            ledger.check()
            version = result.version
            metrics = {
                "version": version,
                **result.metrics,
                **ages,
                **recorded.rewards,
                "time/step_s": trained - began,
                "time/wait_batch_s": asked - began,
                "time/train_call_s": trained - asked,
                **ledger.metrics(),
            }
            await observer.on_step(version, metrics, groups)
            if save is not None and save_every > 0 and (version % save_every == 0 or version == config.steps):
                await save({"version": version, "ledger": ledger.state_dict()})
    finally:
        ledger.close_open("run_ended")
        ledger.check()
        observer.on_end(ledger.metrics())


def _fresh(groups: Sequence[Group], version: int, config: LoopConfig, ledger: Ledger) -> list[Group]:
    """The groups without what is too old for the trainer at `version`; the ledger knows of all of it."""
    everything = [t for group in groups for t in group.trajectories]
    oldest = max(t.age(version) for t in everything)
    ledger.issue(t.trajectory_id for t in everything)
    ledger.move((t.trajectory_id for t in everything), State.QUEUED)
    policy = StalenessPolicy(config=config)
    for group in groups:
        group.trajectories, rejected = policy.judge(group.trajectories, version)
        ledger.move((t.trajectory_id for t in rejected), State.REJECTED, "stale")
    if not any(group.trajectories for group in groups):
        raise ForgeliteError(
            f"step {version + 1} of the record: all {len(everything)} samples are older than "
            f"loop.max_policy_age={config.max_policy_age} (the oldest: {oldest}), and a record has no others to train "
            "in their place: raise loop.max_policy_age, or lower loop.steps"
        )
    return list(groups)


def check_replay(record: Record, config: GRPOConfig) -> None:
    """Raise ConfigError, naming the key, unless the record holds what the configuration asks for."""
    steps, seq_len = config.loop.steps, config.trainer.training.seq_len
    if record.steps < steps:
        raise ConfigError(
            f"loop.steps={steps}, but the record in {record.folder} holds {record.steps} steps: "
            f"set loop.steps={record.steps} or less"
        )
    if record.longest > seq_len:
        raise ConfigError(
            f"trainer.training.seq_len={seq_len}, but the record in {record.folder} holds a sequence of "
            f"{record.longest} tokens: set it to at least that"
        )
    if config.loss.kl_coefficient > 0 and not record.has_reference:
        raise ConfigError(
            f"loss.kl_coefficient={config.loss.kl_coefficient:g} needs the reference's log-probabilities, and the "
            f"record in {record.folder} has none: it was made with reference.enabled=false"
        )
