"""A simulated inference engine: continuous batching with a fixed number of decode slots, updates in flight.

    request ──> waiting ──a slot is free──> running ──its last token──> done, the slot is free
                                              │  every step: one token for each running sequence
                                              └─ an update stops all of them for a pause, then they go on

A step of n running sequences takes `a + b n` seconds, so all of them proceed at the same pace: they share one count of
steps, and a sequence that entered at step p with L tokens to write is done at step p + L. One timer, for the sequence
that is done next, therefore simulates the engine exactly (up to fractions of a step), at a cost that depends on the
number of sequences and not of tokens.

Of an answer only the number of tokens and the versions that wrote them exist. Records hold one entry for `BLOCK`
tokens, which says how many it stands for; its version is that of its first token, so ages are never too small.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forgelite.loop import Usage
from forgelite.types import VersionSpan

BLOCK = 64  # tokens of one entry
TOLERANCE = 1e-3  # of a step: ends closer than this are the same


@dataclass(kw_only=True, slots=True, frozen=True)
class Engine:
    """How fast the policy is, as a user measures it.

    Example, eight replicas of 64 slots: `Engine(slots=512, tokens_per_s=40_000, sequence_tokens_per_s=120)`.
    """

    slots: int  # sequences that run at once (vLLM's max_num_seqs, all replicas together)
    tokens_per_s: float  # of all sequences together while every slot is taken
    sequence_tokens_per_s: float  # of a sequence that runs alone
    pause_s: float = 0.1  # in which nothing is generated while new weights go in
    recompute_tokens_per_s: float | None = None  # prefill rate at which an update recomputes KV; None: KV is kept

    def __post_init__(self) -> None:
        if self.step_s(self.slots) < self.step_s(1):
            raise ValueError(
                f"{self.slots} slots that share {self.tokens_per_s:g} tokens/s run faster than one sequence alone "
                f"({self.sequence_tokens_per_s:g} tokens/s): raise sequence_tokens_per_s or slots"
            )

    def step_s(self, running: int) -> float:
        """Seconds of one step of `running` sequences: a line through the two measured points."""
        alone, full = 1 / self.sequence_tokens_per_s, self.slots / self.tokens_per_s
        return alone + (full - alone) * (running - 1) / max(1, self.slots - 1)


@dataclass(kw_only=True, slots=True, eq=False)
class Answer:
    """One sequence in the engine, until it has its last token (then `done` is set) or is taken out (cancelled)."""

    group_id: str
    length: int  # tokens it will have
    done: asyncio.Future[None]
    in_engine: bool = True  # not `done.done()`: cancelling a task cancels the future that it awaits
    begun: float | None = None  # the engine's count of steps when it got a slot; None: it waits
    ended_s: float = 0.0  # simulated time of its last token


class SimulatedPolicy:
    """The policy of a simulated run: what the loop asks of the station, and `start` for the rollouts."""

    def __init__(self, engine: Engine) -> None:
        self.version = 0
        self.generated_tokens = 0.0
        self.busy_s = 0.0
        self._engine = engine
        self._steps = 0.0  # in which every running sequence took part, since the beginning
        self._counted_at = 0.0  # the time at which `_steps` was right
        self._paused = False
        self._waiting: deque[Answer] = deque()
        self._ends: list[tuple[float, int, Answer]] = []  # heap: (step of the last token, order of entry, answer)
        self._running = 0  # of `_ends`, those not cancelled
        self._entered = 0
        self._timer: asyncio.TimerHandle | None = None
        self._groups: dict[str, list[Answer]] = {}  # answers of each group that wait or run
        self._first_version: dict[str, int] = {}  # of those groups: of their first token
        self._updated_at: list[float] = [0.0]  # count of steps at which each of `_versions` went in
        self._versions: list[int] = [0]

    def start(self, group_id: str, lengths: Sequence[int]) -> list[Answer]:
        """Enter one sequence for each length, in this order."""
        loop = asyncio.get_running_loop()
        answers = [Answer(group_id=group_id, length=length, done=loop.create_future()) for length in lengths]
        self._waiting += answers
        self._groups.setdefault(group_id, []).extend(answers)
        self._go_on()
        return answers

    def take_out(self, answers: Iterable[Answer]) -> None:
        """Take sequences out, wherever they are; those that are done stay done."""
        unfinished = [answer for answer in answers if answer.in_engine]
        if not unfinished:
            return
        self._count()
        for answer in unfinished:
            answer.done.cancel()
            self._running -= answer.begun is not None
            self._leave(answer)
        self._go_on()

    async def cancel(self, group_id: str) -> None:
        """Take out whatever is left of a group."""
        self.take_out(list(self._groups.get(group_id, ())))

    async def update_weights(self, version: int) -> Mapping[str, Any]:
        """Stop between two steps, take the weights, go on."""
        self._count()
        self._paused = True
        self._go_on()
        pause = self._engine.pause_s
        if self._engine.recompute_tokens_per_s is not None:
            pause += self._context_tokens() / self._engine.recompute_tokens_per_s
        await asyncio.sleep(pause)
        self._count()
        self._paused = False
        self.version = version
        self._updated_at.append(self._steps)
        self._versions.append(version)
        self._go_on()
        return {"sync/pause_s": pause}

    async def usage(self) -> Usage:
        """What the engine has done so far, and what it samples."""
        self._count()
        return Usage(
            busy_s=self.busy_s,
            generated_tokens=round(self.generated_tokens),
            first_versions=dict(self._first_version),
        )

    def entries(self, answer: Answer, offset: int = 0) -> tuple[list[int], list[VersionSpan]]:
        """The answer as records hold it: tokens of each entry, and the versions of the entries, from `offset` on."""
        assert answer.begun is not None, "the answer was never begun"
        count = -(-answer.length // BLOCK)
        tokens = [BLOCK] * (count - 1) + [answer.length - BLOCK * (count - 1)]
        spans: list[VersionSpan] = []
        at, start = bisect_right(self._updated_at, answer.begun) - 1, 0
        while start < count:
            end = count
            if at + 1 < len(self._updated_at):  # the first entry whose first token was written after that update
                end = min(count, math.ceil((self._updated_at[at + 1] - answer.begun) / BLOCK))
            if end > start:
                spans.append(VersionSpan(version=self._versions[at], start=offset + start, end=offset + end))
                start = end
            at += 1
        return tokens, spans

    def _context_tokens(self) -> float:
        return sum(self._steps - a.begun for _, _, a in self._ends if a.in_engine and a.begun is not None)

    def _count(self) -> None:
        """Bring `_steps` up to this moment."""
        now = asyncio.get_running_loop().time()
        if self._running and not self._paused:
            steps = (now - self._counted_at) / self._engine.step_s(self._running)
            self._steps += steps
            self.generated_tokens += steps * self._running
            self.busy_s += now - self._counted_at
        self._counted_at = now

    def _go_on(self) -> None:
        """Fill free slots, and set the timer for the next end."""
        self._count()
        while self._waiting and self._running < self._engine.slots:
            answer = self._waiting.popleft()
            if not answer.in_engine:
                continue
            answer.begun = self._steps
            # During a pause the first token is that of the version that is going in, which is not known yet; the older
            # one is the safe answer.
            self._first_version.setdefault(answer.group_id, self.version)
            self._entered += 1
            self._running += 1
            heapq.heappush(self._ends, (answer.begun + answer.length, self._entered, answer))
        while self._ends and not self._ends[0][2].in_engine:
            heapq.heappop(self._ends)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ends and not self._paused:
            steps = max(0.0, self._ends[0][0] - self._steps)
            delay = steps * self._engine.step_s(self._running)
            self._timer = asyncio.get_running_loop().call_later(delay, self._end_some)

    def _end_some(self) -> None:
        self._timer = None
        self._count()
        now = asyncio.get_running_loop().time()
        while self._ends and self._ends[0][0] <= self._steps + TOLERANCE:
            answer = heapq.heappop(self._ends)[2]
            if answer.in_engine:
                self._running -= 1
                answer.ended_s = now
                self._leave(answer)
                if not answer.done.done():
                    answer.done.set_result(None)
        self._go_on()

    def _leave(self, answer: Answer) -> None:
        answer.in_engine = False
        others = self._groups[answer.group_id]
        others.remove(answer)
        if not others:
            del self._groups[answer.group_id]
            self._first_version.pop(answer.group_id, None)
