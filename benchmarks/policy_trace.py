"""What an update does to sequences that are being sampled, as a trace: every token with its time and its version.

The engine is real and runs under its `EngineLoop` in a process like a policy's own; another process publishes the
versions, which are served in place, as in a run. Some rollouts of `TURNS` turns are kept going at any time.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.policy_model import ENGINE, PROMPT_TOKENS, engine_process, prompt_of
from benchmarks.weight_sync_arena import ManifestsInMemory
from forgelite.types import Completion, Failure, GroupRequest, SamplingParams
from forgelite.weights import Manifest, WeightStore

Mode = Literal["in_flight", "drain", "abort", "barrier"]
LANES = 8  # unless a plan says otherwise
TURNS = 2
TURN_TOKENS = (40, 160)  # of a turn, from and to
_WAIT_S = 60.0


@dataclass(kw_only=True, slots=True, frozen=True)
class Plan:
    """What to trace.

    Example: `Plan(mode="in_flight", keep_kv=False, updates=3, tokens_between=2000)`.
    """

    mode: Mode
    keep_kv: bool = False
    updates: int
    tokens_between: int  # sampled by all lanes together from one update to the next
    lanes: int = LANES  # rollouts at any time


@dataclass(kw_only=True, slots=True)
class Turn:
    """One request of a rollout, with what became of it. Times are seconds since the trace began.

    Example: `Turn(lane=3, asked=0.2, times=[0.21, 0.23], versions=[0, 1])`.
    """

    lane: int
    asked: float
    times: list[float] = field(default_factory=list)  # [n], when the step of each token ended
    versions: list[int] = field(default_factory=list)  # [n]
    finished: bool = False


@dataclass(kw_only=True, slots=True, frozen=True)
class Swap:
    """One update: when it was asked for, and when its weights came into use.

    Example: `Swap(version=1, asked=0.4, swapped=0.41, recomputed=9, recomputed_tokens=1100, held=0)`.
    """

    version: int
    asked: float
    swapped: float
    recomputed: int  # sequences
    recomputed_tokens: int  # their prompts and tokens so far, which are prefilled again
    held: int  # requests


@dataclass(kw_only=True, slots=True, frozen=True)
class Trace:
    """A run of one mode.

    Example: `trace(folder, [Plan(mode="drain", updates=2, tokens_between=2000)])[0].longest_gap()`.
    """

    plan: Plan
    turns: list[Turn]
    swaps: list[Swap]
    steps: list[float]  # seconds of each step in which a token was sampled

    @property
    def step_s(self) -> float:
        """The median step."""
        return statistics.median(self.steps)

    def pauses(self) -> list[float]:
        """For each update the longest gap between two tokens of a running sequence, in median steps.

        Of the gaps in which the update was asked for or the weights were swapped: what a drain waits for is no pause.
        """
        return [self._longest_gap(swap) / self.step_s for swap in self.swaps]

    def waits(self) -> list[float]:
        """For each update the longest time that a request waited for its first token, in median steps."""
        return [self._longest_wait(swap) / self.step_s for swap in self.swaps]

    def _longest_wait(self, swap: Swap) -> float:
        waited = [t.times[0] - t.asked for t in self.turns if t.times and t.asked <= swap.swapped < t.times[0]]
        return max(waited, default=0.0)

    def _longest_gap(self, swap: Swap) -> float:
        gaps = [
            after - before
            for turn in self.turns
            for before, after in pairwise(turn.times)
            if before <= swap.asked < after or before <= swap.swapped < after
        ]
        return max(gaps, default=0.0)


def trace(folder: Path, plans: Sequence[Plan]) -> list[Trace]:
    """Run the plans one after the other on one engine."""
    traces: list[Trace] = []
    with engine_process(_serve, folder, list(plans)) as pipe, _publisher(folder) as publish:
        while len(traces) < len(plans):
            message = pipe.recv()
            if isinstance(message, Trace):
                traces.append(message)
            else:
                pipe.send(publish(message))
    return traces


@contextmanager
def _publisher(folder: Path) -> Iterator[Callable[[int], Manifest]]:
    """Publishes the weights in `folder` from this process, as whatever version is asked for."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    store = WeightStore(directory=ManifestsInMemory(), run_id=f"bench-trace-{os.getpid()}", retain=1, served_in_place=1)
    with asyncio.Runner() as runner:
        try:
            yield lambda version: runner.run(store.publish(version, tensors))
        finally:
            store.close()


def _ask_for(pipe: Connection, version: int) -> Manifest:
    pipe.send(version)
    return pipe.recv()


class _TracedEngine:
    """An engine that notes when each token came and with which weights; passes everything else on."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.limits = engine.limits
        self.began = time.perf_counter()
        self.turns: dict[str, Turn] = {}
        self.steps: list[float] = []
        self.version = 0
        self.swapped = 0.0
        self.tokens = 0
        self.recomputed_tokens = 0  # by the last swap, if it drops the KV cache

    def now(self) -> float:
        return time.perf_counter() - self.began

    def restart(self) -> None:
        """Forget the trace so far."""
        self.began, self.turns, self.steps, self.tokens = time.perf_counter(), {}, [], 0

    def step(self) -> Sequence[Any]:
        begin = self.now()
        sampled = self._engine.step()
        end = self.now()
        if sampled:
            self.steps.append(end - begin)
        for output in sampled:
            turn = self.turns[output.sequence_id.rsplit("/", 1)[0]]
            turn.times += [end] * len(output.token_ids)
            turn.versions += [self.version] * len(output.token_ids)
            turn.finished = output.finish_reason is not None
            self.tokens += len(output.token_ids)
        return sampled

    def prepare_weights(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        put_in_use = self._engine.prepare_weights(tensors)

        def swap() -> None:
            put_in_use()
            self.version += 1
            self.swapped = self.now()
            begun = [turn for turn in self.turns.values() if turn.times and not turn.finished]
            self.recomputed_tokens = sum(PROMPT_TOKENS + len(turn.times) for turn in begun)

        return swap

    def add(self, sequence_ids: Any, prompt_ids: Any, *others: Any, **named: Any) -> None:
        self._engine.add(sequence_ids, prompt_ids, *others, **named)

    def abort(self, sequence_ids: Any) -> None:
        self._engine.abort(sequence_ids)

    def queue_lengths(self) -> tuple[int, int]:
        return self._engine.queue_lengths()

    def drop_kv(self) -> None:
        self._engine.drop_kv()

    def close(self) -> None:
        self._engine.close()


class _Rollouts:
    """Keeps the lanes busy: the next turn when one ends, the next rollout when the last turn has ended."""

    def __init__(self, loop: Any, engine: _TracedEngine, lanes: int) -> None:
        self._lanes = lanes
        self._loop = loop
        self._engine = engine
        self._random = random.Random(0)
        self._lane_of: dict[str, tuple[int, int]] = {}  # request id -> lane, turn
        self._between: list[int] = []  # lanes without a rollout
        self._count = 0
        self.holding = False  # no rollout starts

    def start(self) -> None:
        for lane in range(self._lanes):
            self._ask(lane, 0)

    def collect(self) -> None:
        """Take what is finished and ask for what follows."""
        for result in self._loop.collect(_WAIT_S):
            if isinstance(result.outcome, Failure) or not all(isinstance(c, Completion) for c in result.outcome):
                raise RuntimeError(f"request {result.request_id}: {result.outcome}")
            lane, turn = self._lane_of.pop(result.request_id)
            if turn + 1 < TURNS:
                self._ask(lane, turn + 1)
            elif self.holding:
                self._between.append(lane)
            else:
                self._ask(lane, 0)

    def release(self) -> None:
        self.holding = False
        waiting, self._between = self._between, []
        for lane in waiting:
            self._ask(lane, 0)

    @property
    def running(self) -> int:
        return len(self._lane_of)

    def _ask(self, lane: int, turn: int) -> None:
        self._count += 1
        name = f"{self._engine.version}-{self._count}"
        self._lane_of[name] = (lane, turn)
        self._engine.turns[name] = Turn(lane=lane, asked=self._engine.now())
        sampling = SamplingParams(max_tokens=self._random.randint(*TURN_TOKENS), ignore_eos=True)
        (refused,) = self._loop.submit(
            [GroupRequest(request_id=name, prompt_ids=prompt_of(self._count), sampling=sampling)]
        )
        if refused is not None:
            raise RuntimeError(refused.message)


def _serve(pipe: Connection, folder: Path, plans: list[Plan]) -> None:
    asyncio.run(_trace_all(pipe, folder, plans))


async def _trace_all(pipe: Connection, folder: Path, plans: list[Plan]) -> None:
    from forgelite.policy.engine import build_engine
    from forgelite.policy.engine_loop import EngineLoop

    engine = _TracedEngine(build_engine(folder, engine=ENGINE, seed=0, swap="zero_copy"))
    loop = EngineLoop(engine, seed=0)
    policy = WeightStore(directory=ManifestsInMemory(), run_id="reads")
    served = AsyncExitStack()
    try:
        for plan in plans:
            engine.restart()
            rollouts, swaps = _Rollouts(loop, engine, plan.lanes), []
            rollouts.start()
            for _ in range(plan.updates):
                await asyncio.to_thread(_sample, rollouts, engine, plan.tokens_between)
                manifest = await asyncio.to_thread(_ask_for, pipe, engine.version + 1)
                leases = AsyncExitStack()
                views = await leases.enter_async_context(policy.lease(manifest))
                swaps.append(await _update(plan, loop, engine, rollouts, views))
                await served.aclose()
                served = leases
            await asyncio.to_thread(_sample, rollouts, engine, plan.tokens_between)
            rollouts.holding = True
            while rollouts.running:
                await asyncio.to_thread(rollouts.collect)
            pipe.send(Trace(plan=plan, turns=list(engine.turns.values()), swaps=swaps, steps=engine.steps))
    finally:
        loop.close()
        await served.aclose()
        policy.close()


def _sample(rollouts: _Rollouts, engine: _TracedEngine, tokens: int) -> None:
    target = engine.tokens + tokens
    while engine.tokens < target:
        rollouts.collect()


async def _update(plan: Plan, loop: Any, engine: _TracedEngine, rollouts: _Rollouts, views: Any) -> Swap:
    asked = engine.now()
    if plan.mode == "barrier":  # the training loop's part of it
        rollouts.holding = True
        while rollouts.running:
            await asyncio.to_thread(rollouts.collect)
    mode = "drain" if plan.mode == "barrier" else plan.mode
    update = asyncio.ensure_future(
        asyncio.to_thread(loop.update, engine.version + 1, lambda: views, mode=mode, keep_kv=plan.keep_kv)
    )
    while rollouts.running and not update.done():
        await asyncio.to_thread(rollouts.collect)
    report = await update
    if plan.mode == "barrier":
        rollouts.release()
    return Swap(
        version=report.version,
        asked=asked,
        swapped=engine.swapped,
        recomputed=report.recomputed,
        recomputed_tokens=engine.recomputed_tokens if report.recomputed else 0,
        held=report.held,
    )
