"""The loop: one for every depth, synchronous training included.

    prompts ──> admit ──> roll out ──> score ──> queue ──take──> train ──> publish ──> update ──┐
                  ^           │          │         │ too old                             (policy) │
                  │           └──failed──┴─filtered┴─rejected: capacity returns                   │
                  └──────────────── the served version moves: capacity returns <──────────────────┘

| task            | consumes              | waits for                    | is unblocked by                        |
|-----------------|-----------------------|------------------------------|----------------------------------------|
| admit (one)     | the prompt stream     | room (`buffer.staleness`)    | a group that ends, a version served    |
| roll out (many) | one prompt            | policy, rewards, reference   | their replies, or their own deadlines  |
| train (one)     | a batch of groups     | enough groups, young enough  | `queue.put`, or `loop.batch_timeout_s` |
| update (one)    | one published version | the policy's acknowledgement | its reply, or its deadline             |

The tasks live in one task group: when one fails, all of them end and the caller gets the cause. Training goes on
while its weights are published and the policy takes them; it waits for that only before it publishes the next ones
(the trainer itself waits before it changes weights that are still being copied). At depth 0 there is
no room before the new version is served, so the same code is synchronous.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from forgelite.buffer.ledger import Ledger, State
from forgelite.buffer.packing import pack
from forgelite.buffer.queue import GroupQueue
from forgelite.buffer.saved import group_from_data, group_to_data
from forgelite.buffer.staleness import groups_to_start
from forgelite.config import LoopConfig
from forgelite.errors import ForgeliteError
from forgelite.observe.batch_metrics import age_metrics, reward_metrics
from forgelite.observe.gates import within
from forgelite.observe.metrics import Rate
from forgelite.rollout.dataset import PromptStream
from forgelite.scoring.group import ScoredGroup
from forgelite.scoring.reward import PROCESS
from forgelite.types import Failure, Group, Prompt, Score, StepResult, TrainingBatch, Trajectory

MANY_FAILURES = 32  # groups in a row without one scored sample that end a run, whatever the size of a batch
NOTICE_S = 30.0  # seconds without a batch after which the user is told why

RollOut = Callable[[str, Prompt, int], Awaitable[Sequence[Trajectory | Failure]]]
ScoreGroup = Callable[[str, Prompt, Sequence[Trajectory | Failure]], Awaitable[ScoredGroup]]
Evaluate = Callable[[], Awaitable[Mapping[str, Any]]]
Save = Callable[[Mapping[str, Any]], Awaitable[None]]


@dataclass(kw_only=True, slots=True, frozen=True)
class Usage:
    """Running totals of the policy. Example: `Usage(busy_s=12.5, generated_tokens=40960)`."""

    busy_s: float = 0.0  # seconds in which the engine computed
    generated_tokens: int = 0


class TrainerStation(Protocol):
    """What the loop needs of the trainer."""

    async def train_step(self, batch: TrainingBatch) -> StepResult:
        """One optimizer step."""
        ...

    async def publish(self) -> Mapping[str, Any]:
        """Make the weights of this moment available under their version; returns metrics.

        The next step may be asked for before this returns.
        """
        ...


class PolicyStation(Protocol):
    """What the loop needs of the policy."""

    async def update_weights(self, version: int) -> Mapping[str, Any]:
        """Take a published version; returns metrics once every replica serves it."""
        ...

    async def usage(self) -> Usage:
        """What the engine has done so far."""
        ...


class Observer(Protocol):
    """Who is told what happens."""

    async def on_step(self, steps: int, metrics: Mapping[str, Any], groups: Sequence[Group]) -> None:
        """`steps` steps are done; `groups` were trained by the last one (none before the first)."""
        ...

    def on_note(self, text: str) -> None:
        """Something that the user should know."""
        ...

    def on_end(self, metrics: Mapping[str, Any]) -> None:
        """The run is over, however it ended; `metrics` is the final account."""
        ...


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
        evaluate: Evaluate | None = None,
        evaluate_every: int = 0,
        save: Save | None = None,
        save_every: int = 0,
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
        evaluate: held-out evaluation of the version that is served; None: there is none. A run from version 0 begins
            with one.
        evaluate_every: steps between two evaluations; 0: only before and after.
        save: writes a checkpoint from what `state_dict` gives; called between two steps.
        save_every: steps between two checkpoints; 0: none.
        station_died: raises when a station dies while nobody talks to it.
        version: completed optimizer steps at the start.
        """
        self._config = config
        self._row_length = row_length
        self._prompts = prompts
        self._roll_out = roll_out
        self._score_group = score_group
        self._trainer = trainer
        self._policy = policy
        self._observer = observer
        self._evaluate = evaluate
        self._evaluate_every = evaluate_every
        self._save = save
        self._save_every = save_every
        self._station_died = station_died

        self.version = version  # the trainer's
        self.served_version = version  # the policy's, as acknowledged
        self.ledger = Ledger()
        self._room = asyncio.Event()
        self._queue = self._make_queue()
        self._in_flight: dict[str, tuple[Prompt, asyncio.Task[None]]] = {}  # being rolled out or scored
        self._batches_taken = version
        self._waiting = False  # for a batch
        self._next_group = 0
        self._update: asyncio.Task[None] | None = None
        self._update_metrics: Mapping[str, Any] = {}
        self._left_out: list[Score] = []  # of samples that were scored since the last step and will not be trained
        self._filtered_in_a_row = 0
        self._failed_in_a_row = 0
        self._failures: Counter[str] = Counter()  # by reason

    async def run(self) -> None:
        """Train until `config.steps` optimizer steps are done.

        Raises:
            ForgeliteError: what ended the run before that (a dead station, a batch that did not come, a loss that
                is not finite). Any other exception of a task passes through as it is.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                background = []
                if self._station_died is not None:
                    background.append(tasks.create_task(_awaited(self._station_died)))
                if self._evaluate is not None and self.version == 0:
                    await self._observer.on_step(self.version, await self._evaluate(), [])
                background += [tasks.create_task(self._admit()), tasks.create_task(self._notice_stalls())]
                await self._train()
                for task in (*background, *(task for _, task in self._in_flight.values())):
                    task.cancel()
        except BaseExceptionGroup as group:
            raise _cause(group) from None
        finally:
            self.ledger.close_open("run_ended")
            self.ledger.check()
            self._observer.on_end(self.ledger.metrics())

    def state_dict(self) -> dict[str, Any]:
        """Plain data from which `load_state_dict` goes on: nothing that is queued is lost, nothing trained twice.

        Groups in flight are not finished anywhere else, so their prompts are given back.
        """
        prompts = self._prompts.state_dict()
        prompts["given_back"] = [
            *prompts["given_back"],
            *(int(p.prompt_id) for p, _ in self._in_flight.values()),
        ]
        return {
            "version": self.version,
            "next_group": self._next_group,
            "prompts": prompts,
            "ledger": self.ledger.state_dict(),
            "queue": [group_to_data(group) for group in self._queue.groups()],
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from `state_dict`, before `run`. The trainer and the policy must be at its version."""
        self.version = self.served_version = self._batches_taken = saved["version"]
        self._next_group = saved["next_group"]
        self._prompts.load_state_dict(saved["prompts"])
        self.ledger = Ledger.from_state(saved["ledger"])
        self._queue = self._make_queue()
        self._queue.restore([group_from_data(data, self._prompts.prompt) for data in saved["queue"]])

    # ---- admit ----

    async def _admit(self) -> None:
        while True:
            self._room.clear()
            for _ in range(self._groups_to_start()):
                group_id, prompt = f"g{self._next_group}", next(self._prompts)
                self._next_group += 1
                task = self._tasks.create_task(self._make_group(group_id, prompt), name=group_id)
                self._in_flight[group_id] = (prompt, task)
            await self._room.wait()

    def _groups_to_start(self) -> int:
        config = self._config
        number = self._batches_taken * config.groups_per_step + len(self._queue) + len(self._in_flight)
        room = [
            config.steps * config.groups_per_step - number,  # nothing is sampled that no step will train
            config.max_groups_in_flight - len(self._in_flight),
        ]
        paced = groups_to_start(
            number=number,
            groups_per_step=config.groups_per_step,
            served_version=self.served_version,
            depth=config.depth,
        )
        if paced is not None:
            room.append(paced)
        if config.depth == 0 and self._in_flight:
            # A synchronous run repeats bit for bit only if the replacements of filtered groups start together, not
            # in the order in which scores happen to arrive.
            return 0
        return max(0, min(room))

    # ---- roll out and score ----

    async def _make_group(self, group_id: str, prompt: Prompt) -> None:
        ids = [f"{group_id}/{i}" for i in range(self._config.group_size)]
        self.ledger.issue(ids)
        members = await self._roll_out(group_id, prompt, len(ids))
        scored = await self._score_group(group_id, prompt, members)
        del self._in_flight[group_id]
        self._account(scored)
        if scored.group.trajectories or (scored.filtered and not self._config.replace_filtered):
            self._queue.put(scored.group)
        self._room.set()

    def _account(self, scored: ScoredGroup) -> None:
        for trajectory_id, failure in scored.failed.items():
            self.ledger.move([trajectory_id], State.FAILED, failure.reason)
        for trajectory_id, reason in scored.filtered.items():
            self.ledger.move([trajectory_id], State.FILTERED, reason)
        if not scored.group.trajectories:
            self._left_out += scored.scores
        for trajectory_id, failure in scored.failed.items():
            self._failures[failure.reason] += 1
            count = self._failures[failure.reason]
            if count.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ... of each kind: a notice, not a flood
                self._observer.on_note(
                    f"{trajectory_id} failed ({failure.reason}): {failure.message} [so far: {count}]"
                )
        if scored.scores:
            self._failed_in_a_row = 0
        elif any(f.reason != PROCESS for f in scored.failed.values()):
            self._failed_in_a_row += 1  # the death of the reward process is for its client to judge
        flat = "zero_variance" in scored.filtered.values()
        self._filtered_in_a_row = self._filtered_in_a_row + 1 if flat else 0
        if self._failed_in_a_row >= max(2 * self._config.groups_per_step, MANY_FAILURES):
            raise ForgeliteError(
                f"all members of the last {self._failed_in_a_row} groups failed, the last one: {_first_failure(scored)}"
            )
        if self._filtered_in_a_row and self._filtered_in_a_row % self._config.groups_per_step == 0:
            self._observer.on_note(
                f"the last {self._filtered_in_a_row} groups had equal rewards within each group (the last one: "
                f"{scored.scores[0].reward:g}) and teach nothing; sampling goes on"
            )

    def _make_queue(self) -> GroupQueue:
        return GroupQueue(
            ledger=self.ledger,
            capacity=self._config.max_groups_queued,
            max_policy_age=self._config.max_policy_age,
            on_stale=self._config.on_stale,
            on_rejected=self._on_rejected,
            on_skipped=self._room.set,
        )

    def _on_rejected(self, group: Group, reason: str) -> None:
        if self._config.reissue:
            self._prompts.give_back(group.prompt)
        self._room.set()

    # ---- train ----

    async def _train(self) -> None:
        clock, usage = time.monotonic(), await self._policy.usage()
        while self.version < self._config.steps:
            groups = await within(
                self._config.batch_timeout_s, self._take(), "a training batch (loop.batch_timeout_s)", self._diagnose
            )
            waited = time.monotonic() - clock
            # Packing order follows the groups' numbers, so that the same groups always make the same batch.
            trajectories = [t for g in sorted(groups, key=_number) for t in g.trajectories]
            ages = age_metrics(groups, self.version)
            result = await self._trainer.train_step(pack(trajectories, self._row_length))
            trained = time.monotonic() - clock - waited
            self.ledger.move([t.trajectory_id for t in trajectories], State.TRAINED)
            self.version = result.version
            metrics: dict[str, Any] = {"version": self.version, **result.metrics, **ages}
            metrics |= await self._synchronise()
            metrics |= reward_metrics([t.score for t in trajectories if t.score is not None] + self._left_out)
            self._left_out = []
            now, used = time.monotonic(), await self._policy.usage()
            metrics |= _time_metrics(now - clock, waited, trained, used, usage)
            metrics |= self.ledger.metrics()
            self.ledger.check()
            clock, usage = now, used
            await self._observer.on_step(self.version, metrics, groups)
            due = self._save_every > 0 and (self.version % self._save_every == 0 or self.version == self._config.steps)
            if self._save is not None and due:
                await self._save(self.state_dict())
        await self._finish_update()

    async def _notice_stalls(self) -> None:
        """Say what a batch is waiting for, long before the deadline ends the run."""
        while True:
            taken = self._batches_taken
            await asyncio.sleep(NOTICE_S)
            if self._waiting and self._batches_taken == taken:
                self._observer.on_note(f"no batch for {NOTICE_S:g} s: {self._diagnose()}")

    async def _take(self) -> list[Group]:
        self._waiting = True
        groups = await self._queue.take(self._config.groups_per_step, trainer_version=self.version)
        self._waiting = False
        self._batches_taken += 1
        self._room.set()
        return groups

    async def _synchronise(self) -> dict[str, Any]:
        """Publish and update where it is due, evaluate where it is due; returns metrics."""
        last = self.version == self._config.steps
        evaluation_due = self._evaluate is not None and (
            last or (self._evaluate_every > 0 and self.version % self._evaluate_every == 0)
        )
        metrics: dict[str, Any] = {}
        if last or self.version % self._config.sync_every == 0:
            await self._finish_update()
            self._update = self._tasks.create_task(self._publish_and_update(self.version))
            await asyncio.sleep(0)  # the publication has been asked for when the next step is
        if evaluation_due:
            await self._finish_update()
            metrics |= await self._evaluate()
        if last:
            await self._finish_update()
        if self._config.depth == 0:
            # The next batch starts after the evaluation, never beside it: the engine then computes the same batches in
            # every repetition, and a synchronous run repeats bit for bit.
            await self._finish_update()
            self._room.set()
        reported, self._update_metrics = self._update_metrics, {}
        return metrics | reported

    async def _publish_and_update(self, version: int) -> None:
        published = await self._trainer.publish()
        self._update_metrics = {**published, **await self._policy.update_weights(version)}
        self.served_version = version
        if self._config.depth != 0:
            self._room.set()

    async def _finish_update(self) -> None:
        if self._update is not None:
            await self._update
            self._update = None

    def _diagnose(self) -> str:
        config = self._config
        oldest = next(iter(self._in_flight), None)
        return (
            f"{len(self._queue)} of {config.groups_per_step} groups are queued, {len(self._in_flight)} in flight "
            f"(oldest: {oldest}), room for {self._groups_to_start()} more; trainer at version {self.version}, policy "
            f"serves {self.served_version}; "
            f"ledger: { {k.removeprefix('ledger/'): v for k, v in self.ledger.metrics().items() if v} }"
        )


def _time_metrics(step_s: float, waited: float, trained: float, used: Usage, before: Usage) -> dict[str, Any]:
    generated = used.generated_tokens - before.generated_tokens
    return {
        "time/step_s": step_s,
        "time/wait_batch_s": waited,
        "time/train_call_s": trained,
        "idle/trainer": Rate(numerator=step_s - trained, denominator=step_s),
        "idle/policy": Rate(numerator=max(0.0, step_s - (used.busy_s - before.busy_s)), denominator=step_s),
        "tokens/generated": generated,
        "tokens_per_s/generated": Rate(numerator=generated, denominator=step_s),
    }


def _number(group: Group) -> int:
    return int(group.group_id.removeprefix("g"))


def _first_failure(scored: ScoredGroup) -> str:
    trajectory_id, failure = next(iter(scored.failed.items()))
    more = f" (and {len(scored.failed) - 1} more)" if len(scored.failed) > 1 else ""
    return f"{trajectory_id} failed ({failure.reason}): {failure.message}{more}"


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
