"""The loop: one for every depth, synchronous training included.

    prompts ──> admit ──> roll out ──> score ──> queue ──take──> train ──> publish ──> update ──┐
                  ^           │          │         │ too old                             (policy) │
                  │           └──failed──┴─filtered┴─rejected: capacity returns                   │
                  ├───────────┴─cancelled: too old already, or nobody needs it                    │
                  └──────────────── the served version moves: capacity returns <──────────────────┘

| task            | consumes              | waits for                    | is unblocked by                        |
|-----------------|-----------------------|------------------------------|----------------------------------------|
| admit (one)     | the prompt stream     | room (`buffer.staleness`)    | a group that ends, a version served    |
| make (many)     | one prompt            | policy, rewards, reference   | their replies, or their own deadlines  |
| train (one)     | a batch of groups     | enough groups, young enough  | `queue.put`, or `loop.batch_timeout_s` |
| update (one)    | one published version | the policy's acknowledgement | its reply, or its deadline             |

The tasks live in one task group: when one fails, all of them end and the caller gets the cause. Training goes on
while its weights are published and the policy takes them; it waits for that only before it publishes the next ones
(the trainer itself waits before it changes weights that are still being copied). At depth 0 there is
no room before the new version is served, so the same code is synchronous.

What may start, what makes a batch, what is too old and what is cancelled is decided by `StalenessPolicy` alone; the way
from prompts to batches is `GroupSupply`, the way of a version to the policy `WeightUpdates`. Here they are joined.

With a barrier (`policy.update.mode: barrier`) no rollout sees two versions:

    trainer   step v ──┐ publish v+1 ─────────┐          step v+1 (if a batch is ready) ...
    rollouts  running ─┼── run to their end ──┤ none │ start again, on v+1
    admit     open ────┘ closed: an update is due    └ open
    policy                                    └ v+1 ┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from typing import Any

from forgelite.buffer.ledger import Ledger, State
from forgelite.buffer.packing import pack
from forgelite.buffer.queue import group_number
from forgelite.config import LoopConfig
from forgelite.errors import ForgeliteError
from forgelite.loop.stations import (
    Evaluate,
    Observer,
    PolicyStation,
    RollOut,
    RollOutMember,
    Save,
    ScoreGroup,
    ScoreMember,
    TrainerStation,
)
from forgelite.loop.step_metrics import time_metrics
from forgelite.loop.supply import GroupSupply
from forgelite.loop.updates import WeightUpdates
from forgelite.observe.batch_metrics import age_metrics, reward_metrics
from forgelite.observe.gates import OpenGates, within
from forgelite.rollout.dataset import PromptStream
from forgelite.types import Group, StepResult, TrainingBatch

NOTICE_S = 30.0  # seconds at one gate after which the user is told which one, and why
A_BATCH = "a training batch (loop.batch_timeout_s)"


class Loop:
    """Connects the stations of one run. It is used once: `await loop.run()`."""

    def __init__(
        self,
        *,
        config: LoopConfig,
        row_length: int,
        prompts: PromptStream,
        roll_out: RollOut,
        score_group: ScoreGroup,
        trainer: TrainerStation,
        policy: PolicyStation,
        observer: Observer,
        roll_out_member: RollOutMember | None = None,
        score_member: ScoreMember | None = None,
        evaluate: Evaluate | None = None,
        evaluate_every: int = 0,
        save: Save | None = None,
        save_every: int = 0,
        barrier: bool = False,
        station_died: Awaitable[Any] | None = None,
        version: int = 0,
    ) -> None:
        """Args:
        config: pacing and staleness.
        row_length: tokens in a packed row (trainer.training.seq_len).
        prompts: where prompts come from.
        roll_out: makes the trajectories of one group.
        score_group: gives them rewards, advantages and reference log-probabilities.
        trainer, policy: the stations. The policy serves `version` already.
        observer: is told of every step.
        roll_out_member, score_member: make one member alone; needed for `loop.complete_at` and `loop.group_deadline_s`.
        evaluate: held-out evaluation of the version that is served; None: there is none. A run from version 0 begins
            with one.
        evaluate_every: steps between two evaluations; 0: only before and after.
        save: writes a checkpoint from what `state_dict` gives; called between two steps.
        save_every: steps between two checkpoints; 0: none.
        barrier: new weights wait for the rollouts that run, and no group starts meanwhile.
        station_died: raises when a station dies while nobody talks to it.
        version: completed optimizer steps at the start.

        Raises:
            ValueError: the configuration cuts stragglers, and `roll_out_member` or `score_member` is missing.
        """
        self._config = config
        self._row_length = row_length
        self._trainer = trainer
        self._policy = policy
        self._observer = observer
        self._evaluate = evaluate
        self._evaluate_every = evaluate_every
        self._save = save
        self._save_every = save_every
        self._barrier = barrier
        self._station_died = station_died
        self._gates = OpenGates()
        self._make_supply = partial(
            GroupSupply,
            config=config,
            prompts=prompts,
            roll_out=roll_out,
            score_group=score_group,
            roll_out_member=roll_out_member,
            score_member=score_member,
            cancel=self._cancel_at_policy,
            on_note=observer.on_note,
        )
        self._begin_at(version, saved=None)

    def _begin_at(self, version: int, saved: Mapping[str, Any] | None) -> None:
        self.version = version  # the trainer's
        self._supply = self._make_supply(version=version, saved=saved)
        self._updates = WeightUpdates(
            trainer=self._trainer,
            policy=self._policy,
            gates=self._gates,
            on_served=self._on_served,
            barrier=self._rollouts_ended if self._barrier else None,
        )

    @property
    def ledger(self) -> Ledger:
        """The account of every trajectory of this run."""
        return self._supply.ledger

    async def run(self) -> None:
        """Train until `config.steps` optimizer steps are done.

        Raises:
            ForgeliteError: what ended the run before that (a dead station, a batch that did not come, a loss that
                is not finite). Any other exception of a task passes through as it is.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(self._notice_stalls())]
                if self._station_died is not None:
                    background.append(tasks.create_task(_awaited(self._station_died)))
                if self._evaluate is not None and self.version == 0:
                    await self._observer.on_step(self.version, await self._evaluated(), [])
                background.append(tasks.create_task(self._supply.admit(tasks)))
                await self._train(tasks)
                for task in background:
                    task.cancel()
                self._supply.flight.end()
        except BaseExceptionGroup as group:
            raise _cause(group) from None
        finally:
            self._supply.close()
            self._observer.on_end(self.ledger.metrics())

    def state_dict(self) -> dict[str, Any]:
        """Plain data from which `load_state_dict` goes on; see `GroupSupply.state_dict`."""
        return {"version": self.version, **self._supply.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from `state_dict`, before `run`. The trainer and the policy must be at its version."""
        self._begin_at(saved["version"], saved=saved)

    # ---- train ----

    async def _train(self, tasks: asyncio.TaskGroup) -> None:
        clock, usage = _now(), await self._policy.usage()
        while self.version < self._config.steps:
            # Packing order follows the groups' numbers, so that the same groups always make the same batch.
            groups = sorted(await self._next_batch(), key=_number)
            waited = _now() - clock
            trajectories = [t for group in groups for t in group.trajectories]
            ages = age_metrics(groups, self.version)
            result = await self._step(pack(trajectories, self._row_length))
            trained = _now() - clock - waited
            self.ledger.move([t.trajectory_id for t in trajectories], State.TRAINED)
            self.version = result.version
            metrics: dict[str, Any] = {"version": self.version, **result.metrics, **ages}
            metrics |= await self._synchronise(tasks)
            scores = [t.score for t in trajectories if t.score is not None]
            metrics |= reward_metrics(scores + self._supply.take_left_out())
            now, used = _now(), await self._policy.usage()
            self._supply.cancel_hopeless(used.first_versions)
            metrics |= time_metrics(step_s=now - clock, waited_s=waited, trained_s=trained, used=used, before=usage)
            metrics |= self.ledger.metrics()
            self.ledger.check()
            clock, usage = now, used
            await self._observer.on_step(self.version, metrics, groups)
            await self._save_if_due()
        await self._updates.finish()

    async def _next_batch(self) -> list[Group]:
        with self._gates.at(A_BATCH, self._diagnose):
            taking = self._supply.take(self.version)
            return await within(self._config.batch_timeout_s, taking, A_BATCH, self._diagnose)

    async def _step(self, batch: TrainingBatch) -> StepResult:
        gate = f"training step {self.version + 1} (mesh.call_timeout_s)"
        with self._gates.at(gate, lambda: "held by the trainer"):
            return await self._trainer.train_step(batch)

    async def _save_if_due(self) -> None:
        last = self.version == self._config.steps
        if self._save is None or self._save_every == 0 or not (last or self.version % self._save_every == 0):
            return
        with self._gates.at(f"the checkpoint of step {self.version}", lambda: "held by the trainer"):
            await self._save(self.state_dict())

    # ---- publish, update, evaluate ----

    async def _synchronise(self, tasks: asyncio.TaskGroup) -> dict[str, Any]:
        """Publish and update where it is due, evaluate where it is due; returns metrics."""
        last = self.version == self._config.steps
        evaluation_due = self._evaluate is not None and (
            last or (self._evaluate_every > 0 and self.version % self._evaluate_every == 0)
        )
        metrics: dict[str, Any] = {}
        if last or self.version % self._config.sync_every == 0:
            await self._updates.finish()
            if self._barrier:
                self._supply.hold()
            await self._updates.begin(self.version, tasks)
        if evaluation_due:
            await self._updates.finish()
            metrics |= await self._evaluated()
        if last:
            await self._updates.finish()
        if self._config.depth == 0:
            # The next batch starts after the evaluation, never beside it: the engine then computes the same batches in
            # every repetition, and a synchronous run repeats bit for bit.
            await self._updates.finish()
            self._supply.open()
        return metrics | self._updates.take_metrics()

    def _on_served(self, version: int) -> None:
        self._supply.serve(version)
        if self._config.depth != 0:
            self._supply.open()

    async def _rollouts_ended(self, version: int) -> None:
        gate = f"running rollouts to end before version {version} (policy.update.mode=barrier, loop.batch_timeout_s)"
        diagnose = self._supply.flight.describe
        with self._gates.at(gate, diagnose):
            await within(self._config.batch_timeout_s, self._supply.rollouts_ended(), gate, diagnose)

    async def _cancel_at_policy(self, group_ids: Sequence[str]) -> None:
        gate = f"the policy to cancel {len(group_ids)} groups (mesh.answer_timeout_s)"
        await asyncio.sleep(0)  # the cancelled tasks end their own requests; the policy is asked about the rest
        with self._gates.at(gate, lambda: "held by the policy"):
            await asyncio.gather(*(self._policy.cancel(group_id) for group_id in group_ids))

    async def _evaluated(self) -> Mapping[str, Any]:
        with self._gates.at("an evaluation (eval.timeout_s)", lambda: "held by the policy or the rewards"):
            return await self._evaluate()

    # ---- diagnosis ----

    async def _notice_stalls(self) -> None:
        """Say what is waited for, long before a deadline ends the run."""
        while True:
            await asyncio.sleep(NOTICE_S)
            for stall in self._gates.stalled(NOTICE_S):
                self._observer.on_note(stall)

    def _diagnose(self) -> str:
        return f"{self._supply.describe()}; trainer at version {self.version}"


def _now() -> float:
    return asyncio.get_running_loop().time()


def _number(group: Group) -> int:
    return group_number(group.group_id)


async def _awaited(awaitable: Awaitable[Any]) -> None:
    await asyncio.shield(awaitable)  # the end of the loop is not the end of what it listens to


def _cause(group: BaseExceptionGroup) -> BaseException:
    """The exception that tells most: our own before others, which are mostly its consequences."""
    flat: list[BaseException] = []
    pending: list[BaseException] = [group]
    while pending:
        error = pending.pop(0)
        pending += error.exceptions if isinstance(error, BaseExceptionGroup) else []
        flat += [] if isinstance(error, BaseExceptionGroup) else [error]
    return next((e for e in flat if isinstance(e, ForgeliteError)), flat[0])
