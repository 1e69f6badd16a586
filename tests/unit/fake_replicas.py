"""Replicas without an engine: a step every 50 ms gives each running member its next number as token.

The token at index i is i, so a completion is right exactly if it counts up. Replicas can be told to die, to hang, to
break and to refuse versions.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from forgelite.errors import StationDied, WeightError
from forgelite.policy.engine_protocol import ENGINE_DEAD, EngineStats, UpdateReport
from forgelite.policy.groups import GroupProgress, GroupResult, MemberProgress
from forgelite.policy.partials import join_spans
from forgelite.types import Completion, Failure, FinishReason, GroupRequest, VersionSpan

STEP_S = 0.05
START_S = 2.0


@dataclass(kw_only=True, slots=True)
class _Member:
    spans: list[VersionSpan]
    length: int
    finish_reason: FinishReason | None = None
    reported: int = 0


@dataclass(kw_only=True, slots=True)
class _Running:
    request: GroupRequest
    members: list[_Member]
    report_due: float = 0.0


@dataclass(kw_only=True, slots=True)
class Replicas:
    """Starts fake replicas; `start` is what a service is given."""

    processes: list[FakeProcess] = field(default_factory=list)  # all that ever were, in their order
    fail_starts: int = 0  # so many of the next starts fail
    hang_starts: int = 0  # so many of the next ones hang when they are to take a version
    broken_versions: set[int] = field(default_factory=set)  # that nobody can take
    update_s: float = 0.01  # that an update takes the next ones to start

    async def start(self, name: str) -> FakeProcess:
        await asyncio.sleep(START_S)
        if self.fail_starts > 0:
            self.fail_starts -= 1
            raise StationDied(f"station {name} died: out of memory")
        process = FakeProcess(name, self)
        process.update_s = self.update_s
        process.hangs_in_update, self.hang_starts = self.hang_starts > 0, max(0, self.hang_starts - 1)
        self.processes.append(process)
        return process

    def of(self, name: str) -> FakeProcess:
        """The newest process of that name."""
        return next(p for p in reversed(self.processes) if p.name == name)

    @property
    def alive(self) -> list[FakeProcess]:
        return [p for p in self.processes if p.dead is None]


class FakeProcess:
    """One process: the calls to it, and what a test does to it."""

    def __init__(self, name: str, owner: Replicas) -> None:
        self.name, self.owner, self.calls = name, owner, self
        self.version_now = 0
        self.held = {0}  # versions
        self.submitted: list[GroupRequest] = []
        self.aborted: list[str] = []
        self.refuse_next_update = False
        self.hangs_in_update = False
        self.update_s = 0.01  # that an update takes
        self.frozen = False  # the engine makes no step, the process answers
        self.dead: str | None = None
        self._hangs = False
        self._broken: str | None = None
        self._running: dict[str, _Running] = {}
        self._outbox: list[GroupResult | GroupProgress] = []
        self._changed, self._ended = asyncio.Event(), asyncio.Event()
        self._tokens = self._steps = 0
        self._last_step = asyncio.get_running_loop().time()
        self._thread = asyncio.create_task(self._run())

    # ---- what a test does to it ----

    def die(self) -> None:
        self.dead = self.dead or f"station {self.name} died: Killed(sig=9)"
        self._changed.set()
        self._ended.set()
        self._thread.cancel()

    def hang(self) -> None:
        self._hangs = True

    def break_engine(self) -> None:
        self._broken = f"the policy engine of {self.name} is broken"
        failure = Failure(reason=ENGINE_DEAD, message=self._broken)
        self._outbox += [GroupResult(request_id=name, outcome=failure) for name in self._running]
        self._running.clear()
        self._changed.set()

    async def ended(self) -> str:
        await self._ended.wait()
        return self.dead

    async def kill(self) -> None:
        self.die()

    # ---- the calls ----

    async def submit(self, requests: list[GroupRequest]) -> list[Failure | None]:
        await self._answering()
        if self._broken:
            return [Failure(reason=ENGINE_DEAD, message=self._broken) for _ in requests]
        for request in requests:
            self.submitted.append(request)
            self._running[request.request_id] = _Running(request=request, members=_members(request))
        return [None] * len(requests)

    async def collect(self, timeout_s: float) -> list[GroupResult | GroupProgress]:
        end = asyncio.get_running_loop().time() + timeout_s
        while True:
            await self._answering()
            if self._outbox:
                events, self._outbox = self._outbox, []
                return events
            if self._broken:
                raise StationDied(self._broken)
            self._changed.clear()
            left = end - asyncio.get_running_loop().time()
            try:
                await asyncio.wait_for(self._changed.wait(), max(0.0, left))
            except TimeoutError:
                return []

    async def abort(self, request_ids: list[str]) -> None:
        await self._answering()
        self.aborted += request_ids
        for name in request_ids:
            if (running := self._running.pop(name, None)) is not None:
                self._finish(running)

    async def update_weights(
        self, version: int, manifest: Any, mode: str, keep_kv: bool, drain_timeout_s: float
    ) -> UpdateReport:
        self._hangs = self._hangs or self.hangs_in_update
        await self._answering()
        await asyncio.sleep(self.update_s)
        await self._answering()
        if self._broken:
            raise StationDied(self._broken)
        if self.refuse_next_update or version in self.owner.broken_versions:
            self.refuse_next_update = False
            raise WeightError(f"{self.name} cannot take version {version}")
        self.version_now = version
        self.held.add(version)
        return UpdateReport(version=version, queued_s=0.01, paused_s=0.002, recomputed=len(self._running))

    async def version(self) -> int:
        await self._answering()
        return self.version_now

    async def stats(self) -> EngineStats:
        await self._answering()
        now = asyncio.get_running_loop().time()
        return EngineStats(
            version=self.version_now,
            alive_s=now,
            busy_s=self._steps * STEP_S,
            steps=self._steps,
            generated_tokens=self._tokens,
            running=len(self._running),
            waiting=0,
            last_step_age_s=now - self._last_step if self._running else 0.0,
        )

    async def _answering(self) -> None:
        await asyncio.sleep(0)
        if self._hangs:
            await self._ended.wait()
        if self.dead is not None:
            raise StationDied(self.dead)

    # ---- the engine ----

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            if not self._hangs and not self.frozen and self._broken is None:
                self._step()

    def _step(self) -> None:
        now = asyncio.get_running_loop().time()
        self._last_step = now
        self._steps += bool(self._running)
        for name, running in list(self._running.items()):
            for member in running.members:
                if member.finish_reason is None:
                    span = VersionSpan(version=self.version_now, start=member.length, end=member.length + 1)
                    member.spans = join_spans(member.spans, [span])
                    member.length += 1
                    self._tokens += 1
                    if member.length >= running.request.sampling.max_tokens:
                        member.finish_reason = "length"
            progress_s = running.request.progress_s
            finished = all(m.finish_reason is not None for m in running.members)
            if progress_s is not None and (now >= running.report_due or (finished and progress_s == 0)):
                running.report_due = now + progress_s
                self._report(running)
            if finished:
                del self._running[name]
                self._finish(running)

    def _report(self, running: _Running) -> None:
        news = tuple(
            MemberProgress(
                index=index,
                start=member.reported,
                token_ids=tuple(range(member.reported, member.length)),
                logprobs=tuple(-1.0 for _ in range(member.reported, member.length)),
                spans=tuple(
                    VersionSpan(version=s.version, start=max(s.start, member.reported), end=s.end)
                    for s in member.spans
                    if s.end > member.reported
                ),
                finish_reason=member.finish_reason,
            )
            for index, member in enumerate(running.members)
            if member.length > member.reported
        )
        for member in running.members:
            member.reported = member.length
        if news:
            self._outbox.append(GroupProgress(request_id=running.request.request_id, members=news))
            self._changed.set()

    def _finish(self, running: _Running) -> None:
        request = running.request
        outcome: list[Completion | Failure] = [
            Completion(
                request_id=f"{request.request_id}/{index}",
                prompt_ids=request.prompt_ids,
                token_ids=list(range(member.length)),
                logprobs=[-1.0] * member.length,
                spans=member.spans,
                finish_reason=member.finish_reason or "abort",
            )
            for index, member in enumerate(running.members)
        ]
        self._outbox.append(GroupResult(request_id=request.request_id, outcome=outcome))
        self._changed.set()


def _members(request: GroupRequest) -> list[_Member]:
    if request.partials is None:
        return [_Member(spans=[], length=0) for _ in range(request.n)]
    assert len(request.partials) == request.n
    return [
        _Member(
            spans=list(partial.spans),
            length=len(partial.token_ids),
            finish_reason=None if partial.finish_reason == "abort" else partial.finish_reason,
            reported=len(partial.token_ids),
        )
        for partial in request.partials
    ]
