"""The requests of one engine: which are being sampled, which are held back, what there is to tell of them.

    admit ──► held ── release ──┐
       └────────────────────────┴─► live ──► result      (cut and resubmit: live, but out of the engine for a moment)

Belongs to the engine's thread. Every request that is admitted has exactly one result.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence

from forgelite.policy.admission import REJECTED
from forgelite.policy.engine_protocol import Engine, Sampled
from forgelite.policy.groups import GroupProgress, GroupResult, LiveGroup, Member, MemberFate, sampling_fault
from forgelite.policy.seeds import MemberSeeds, continued
from forgelite.policy.stop_texts import StopTexts
from forgelite.types import Completion, Failure, GroupRequest, SamplingParams


class Batch:
    """What an engine samples. The engine is stepped through here, and nowhere else."""

    def __init__(self, engine: Engine, *, seed: int, version: int, stop_texts: StopTexts | None) -> None:
        """An empty batch.

        Args:
            engine: without sequences.
            seed: requests without a seed derive theirs from it.
            version: of the weights that the engine holds.
            stop_texts: None: no request has any.
        """
        self.version = version  # of the next token; moved by an update only
        self.sampled_tokens = 0
        self.live: dict[str, LiveGroup] = {}  # by request id, in the order of admission
        self.held: dict[str, LiveGroup] = {}  # likewise
        self._engine = engine
        self._seeds = MemberSeeds(seed)
        self._stop_texts = stop_texts
        self._sequences: dict[str, tuple[LiveGroup, Member]] = {}  # of the live groups, by sequence id
        self._holding = False
        self._reporting: dict[str, LiveGroup] = {}  # live groups that want reports
        self._news: list[GroupResult | GroupProgress] = []

    @property
    def sequences(self) -> int:
        """How many sequences are not finished."""
        return len(self._sequences)

    def admit(self, requests: Iterable[GroupRequest]) -> None:
        """Take requests that `admission.rejection` has nothing against."""
        for request in requests:
            group = LiveGroup.of(request)
            self._prepare(group)
            if group.unfinished == 0:
                self._finish(group, group.outcome())
            elif self._holding:
                self.held[request.request_id] = group
            else:
                self._start(group)

    def refuse(self, requests: Iterable[GroupRequest], failure: Failure) -> None:
        """Give requests a failure as their result, without the engine."""
        for request in requests:
            self._news.append(GroupResult(request_id=request.request_id, outcome=failure))

    def hold(self) -> None:
        """From here on newcomers wait for `release`."""
        self._holding = True

    def release(self) -> int:
        """Start what has been held, in the order of its arrival; returns how many requests that is."""
        self._holding = False
        held, self.held = self.held, {}
        for group in held.values():
            self._start(group)
        return len(held)

    def cut(self) -> None:
        """Take every sequence out of the engine, with the tokens it has; `resubmit` puts them back."""
        self._engine.abort(list(self._sequences))

    def resubmit(self) -> None:
        """Let the sequences that were cut go on from their tokens, in the order of admission."""
        for group in list(self.live.values()):
            self._queue(group)

    def step(self) -> None:
        """One step of the engine."""
        for sampled in self._engine.step():
            self._take(sampled)
        if self._reporting:
            self._report(time.monotonic())

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests with the tokens they have. Unknown ids are ignored."""
        for request_id in request_ids:
            group = self.live.get(request_id) or self.held.get(request_id)
            if group is None:
                continue
            self._drop_sequences(group)
            for member in list(group.running()):
                group.end(member, "abort")
            self._finish(group, group.outcome())

    def abort_all(self) -> None:
        """End every request with the tokens it has."""
        self.abort([*self.live, *self.held])

    def fail_all(self, failure: Failure) -> None:
        """End every request without touching the engine, which is broken."""
        for group in [*self.live.values(), *self.held.values()]:
            self._finish(group, failure)
        self._sequences.clear()
        self._holding = False

    def take_news(self) -> list[GroupResult | GroupProgress]:
        """Results and reports since the last call, in the order in which they came up."""
        news, self._news = self._news, []
        return news

    def _prepare(self, group: LiveGroup) -> None:
        """Read the tokens of partials, and end the members that need no further one."""
        request = group.request
        for member in list(group.running()):
            if request.sampling.stop and self._stop_texts is not None:
                member.stop_watch = self._stop_texts.watch(request.prompt_ids, request.sampling.stop)
            fate = _fate_of_partial(member, request.sampling)
            if fate is not None:
                group.end(member, fate)

    def _start(self, group: LiveGroup) -> None:
        request = group.request
        newest = max((member.runs[-1][0] for member in group.running() if member.runs), default=self.version)
        if newest > self.version:
            message = (
                f"request {request.request_id}: a partial was sampled by version {newest}, newer than this engine's "
                f"{self.version}: update it first, or resume on another replica"
            )
            self._finish(group, Failure(reason=REJECTED, message=message))
            return
        for member, seed in zip(group.members, self._seeds.of(request, self.version), strict=True):
            member.seed = seed
        self.live[request.request_id] = group
        if request.progress_s is not None:
            self._reporting[request.request_id] = group
        self._sequences.update({member.sequence_id: (group, member) for member in group.running()})
        self._queue(group)

    def _queue(self, group: LiveGroup) -> None:
        """Give the engine the members that are not finished."""
        request = group.request
        # An update may keep the keys of an older version; only requests of that time shall find them.
        salt = f"version {self.version}"
        fresh = [member for member in group.running() if not member.token_ids]
        begun = [member for member in group.running() if member.token_ids]
        try:
            if fresh:
                ids, seeds = [member.sequence_id for member in fresh], [member.seed for member in fresh]
                self._engine.add(ids, request.prompt_ids, request.sampling, seeds, cache_salt=salt)
            for member in begun:
                count = len(member.token_ids)
                self._engine.add(
                    [member.sequence_id],
                    [*request.prompt_ids, *member.token_ids],
                    dataclasses.replace(request.sampling, max_tokens=request.sampling.max_tokens - count),
                    [continued(member.seed, count)],
                    cache_salt=salt,
                )
        except ValueError as error:  # sampling parameters that vLLM refuses, before anything was queued
            self._drop_sequences(group)
            failure = Failure(reason=REJECTED, message=f"request {request.request_id}: {error}")
            self._finish(group, failure)

    def _take(self, sampled: Sampled) -> None:
        known = self._sequences.get(sampled.sequence_id)
        if known is None:  # its member has ended, and the engine is yet to notice
            return
        group, member = known
        token_ids, logprobs, end = sampled.token_ids, sampled.logprobs, sampled.finish_reason
        failure = sampling_fault(logprobs, token_ids, end)
        if failure is not None:
            message = f"request {member.sequence_id}, version {self.version}: {failure.message}"
            self._end(group, member, "failed", sampled, Failure(reason=failure.reason, message=message))
            return
        if member.stop_watch is not None and (kept := member.stop_watch.feed(token_ids)) is not None:
            token_ids, logprobs, end = token_ids[:kept], logprobs[:kept], "stop"
        member.extend(token_ids, logprobs, self.version)
        self.sampled_tokens += len(token_ids)
        if end is not None:
            self._end(group, member, end, sampled)

    def _end(
        self, group: LiveGroup, member: Member, fate: MemberFate, sampled: Sampled, failure: Failure | None = None
    ) -> None:
        del self._sequences[member.sequence_id]
        if sampled.finish_reason is None:  # the engine would go on
            self._engine.abort([member.sequence_id])
        group.end(member, fate, failure)
        if group.unfinished == 0:
            self._finish(group, group.outcome())

    def _drop_sequences(self, group: LiveGroup) -> None:
        dropped = [member.sequence_id for member in group.running() if member.sequence_id in self._sequences]
        for sequence_id in dropped:
            del self._sequences[sequence_id]
        if dropped:
            self._engine.abort(dropped)

    def _finish(self, group: LiveGroup, outcome: list[Completion | Failure] | Failure) -> None:
        request_id = group.request.request_id
        self.live.pop(request_id, None)
        self.held.pop(request_id, None)
        if self._reporting.pop(request_id, None) is not None and (last := group.progress()) is not None:
            self._news.append(last)
        self._news.append(GroupResult(request_id=request_id, outcome=outcome))

    def _report(self, now: float) -> None:
        for group in self._reporting.values():
            if now >= group.report_due and (progress := group.progress()) is not None:
                self._news.append(progress)
                group.report_due = now + group.request.progress_s


def _fate_of_partial(member: Member, sampling: SamplingParams) -> MemberFate | None:
    """How a member ends that has its end in its first tokens already; None: it goes on."""
    tokens: Sequence[int] = member.token_ids
    if not tokens:
        return None
    if not sampling.ignore_eos and tokens[-1] in sampling.stop_token_ids:
        return "stop"
    if member.stop_watch is not None and member.stop_watch.feed(tokens) is not None:
        return "stop"
    return "length" if len(tokens) == sampling.max_tokens else None
