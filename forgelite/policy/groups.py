"""A group while it is being sampled: its members, the versions of their tokens, what is told of it, how it ends."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from forgelite.types import Completion, Failure, FinishReason, GroupRequest, VersionSpan

if TYPE_CHECKING:
    from forgelite.policy.stop_texts import StopWatch

MemberFate = Literal["running", "stop", "length", "abort", "failed"]
_REAL_ENDS = ("stop", "length")


@dataclass(kw_only=True, slots=True, frozen=True)
class MemberProgress:
    """What one member of a group was given since the last report.

    Example: `MemberProgress(index=2, start=5, token_ids=(9, 1), logprobs=(-0.3, -0.1),
    spans=(VersionSpan(version=4, start=5, end=7),))` brings tokens 5 and 6 of the completion.
    """

    index: int  # of the member in its group
    start: int  # index of the first of these tokens in the completion; tokens of a partial are before it
    token_ids: tuple[int, ...]  # [k], k > 0
    logprobs: tuple[float, ...]  # [k]
    spans: tuple[VersionSpan, ...]  # cover [start, start + k), counted from the start of the completion
    finish_reason: FinishReason | None = None  # the last of these tokens is the last of the completion; None: unknown


@dataclass(kw_only=True, slots=True, frozen=True)
class GroupProgress:
    """The tokens that a request was given since the last report of it.

    The reports of a request come in order and before its result, and together hold every token that was sampled for
    a member, unless the whole request fails.

    Example: `GroupProgress(request_id="g12", members=(member_0, member_3))`; members 1 and 2 have nothing new.
    """

    request_id: str
    members: tuple[MemberProgress, ...]  # those with new tokens, in the order of their index


@dataclass(kw_only=True, slots=True)
class GroupResult:
    """How one request ended: what became of each member, or one failure of them all.

    Example: `GroupResult(request_id="g12", outcome=[completion_0, failure_1])`.
    """

    request_id: str
    outcome: list[Completion | Failure] | Failure


@dataclass(kw_only=True, slots=True)
class Member:
    """One sequence of a group. Its id is that of the completion it becomes.

    Example: `Member(index=0, sequence_id="g12/0")`, which after two tokens has `token_ids=[5, 1]`.
    """

    index: int
    sequence_id: str
    token_ids: list[int] = field(default_factory=list)  # [n], those of a partial first
    logprobs: list[float] = field(default_factory=list)  # [n]
    runs: list[tuple[int, int]] = field(default_factory=list)  # (version, its first token)
    fate: MemberFate = "running"
    failure: Failure | None = None  # why, when its fate is "failed"
    given: Completion | None = None  # the partial, when it was finished before
    seed: int = 0  # set when it is first given to the engine
    stop_watch: StopWatch | None = None  # None: no stop texts
    reported: int = 0  # tokens that need no report any more

    @classmethod
    def resuming(cls, index: int, sequence_id: str, partial: Completion) -> Member:
        """A member that goes on from `partial`, or that is `partial` when that was finished."""
        finished = partial.finish_reason != "abort"
        return cls(
            index=index,
            sequence_id=sequence_id,
            token_ids=list(partial.token_ids),
            logprobs=list(partial.logprobs),
            runs=[(span.version, span.start) for span in partial.spans],
            fate=partial.finish_reason if finished else "running",
            given=partial if finished else None,
            reported=len(partial.token_ids),
        )

    def extend(self, token_ids: list[int], logprobs: list[float], version: int) -> None:
        """Append what one step sampled with the weights of `version`."""
        if token_ids and (not self.runs or self.runs[-1][0] != version):
            self.runs.append((version, len(self.token_ids)))
        self.token_ids += token_ids
        self.logprobs += logprobs

    def spans(self, start: int = 0) -> list[VersionSpan]:
        """The versions of the tokens from `start` on."""
        edges = [begin for _, begin in self.runs] + [len(self.token_ids)]
        return [
            VersionSpan(version=version, start=max(begin, start), end=end)
            for (version, _), (begin, end) in zip(self.runs, pairwise(edges), strict=True)
            if end > start
        ]

    def outcome(self, prompt_ids: tuple[int, ...]) -> Completion | Failure:
        """What has become of it, once it has ended."""
        if self.failure is not None:
            return self.failure
        if self.given is not None:
            return dataclasses.replace(self.given, request_id=self.sequence_id)
        return Completion(
            request_id=self.sequence_id,
            prompt_ids=prompt_ids,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            spans=self.spans(),
            finish_reason=self.fate,
        )

    def progress(self) -> MemberProgress | None:
        """The tokens since the last call; None when there are none."""
        start = self.reported
        if start == len(self.token_ids):
            return None
        self.reported = len(self.token_ids)
        return MemberProgress(
            index=self.index,
            start=start,
            token_ids=tuple(self.token_ids[start:]),
            logprobs=tuple(self.logprobs[start:]),
            spans=tuple(self.spans(start)),
            finish_reason=self.fate if self.fate in _REAL_ENDS else None,
        )


@dataclass(kw_only=True, slots=True)
class LiveGroup:
    """A request that has been accepted and has no result yet.

    Example: `LiveGroup.of(request)` has one running member for each completion asked for.
    """

    request: GroupRequest
    members: list[Member]
    unfinished: int  # members whose fate is "running"
    report_due: float = 0.0  # on the monotonic clock, for a request that wants reports

    @classmethod
    def of(cls, request: GroupRequest) -> LiveGroup:
        """The group of a request, before its first new token."""
        ids = [f"{request.request_id}/{index}" for index in range(request.n)]
        if request.partials is None:
            members = [Member(index=index, sequence_id=name) for index, name in enumerate(ids)]
        else:
            named = zip(ids, request.partials, strict=True)
            members = [Member.resuming(index, name, partial) for index, (name, partial) in enumerate(named)]
        group = cls(request=request, members=members, unfinished=0)
        group.unfinished = sum(1 for _ in group.running())
        return group

    def running(self) -> Iterator[Member]:
        """The members that are not finished."""
        return (member for member in self.members if member.fate == "running")

    def end(self, member: Member, fate: MemberFate, failure: Failure | None = None) -> None:
        """Give a running member its end; a fate of "failed" has a failure."""
        member.fate, member.failure = fate, failure
        self.unfinished -= 1

    def outcome(self) -> list[Completion | Failure]:
        """What has become of the members, in the order of their index, once all have ended."""
        return [member.outcome(self.request.prompt_ids) for member in self.members]

    def progress(self) -> GroupProgress | None:
        """What was sampled since the last call; None when that is nothing."""
        new = tuple(progress for member in self.members if (progress := member.progress()) is not None)
        return GroupProgress(request_id=self.request.request_id, members=new) if new else None


def first_versions(groups: Iterable[LiveGroup]) -> dict[str, int]:
    """For each session (or, where there is none, request) that has tokens: the version of its oldest one."""
    versions: dict[str, int] = {}
    for group in groups:
        name = group.request.session or group.request.request_id
        for member in group.members:
            if member.runs:
                versions[name] = min(member.runs[0][0], versions.get(name, member.runs[0][0]))
    return versions


def sampling_fault(logprobs: list[float], token_ids: list[int], finish_reason: str | None) -> Failure | None:
    """Why what a step gave a sequence cannot be used, or None when it can.

    Weights that have diverged give logits that are not numbers, from which vLLM still picks some token.
    """
    if len(logprobs) != len(token_ids):
        return Failure(reason="engine_error", message=f"{len(token_ids)} tokens came with {len(logprobs)} logprobs")
    if not all(map(math.isfinite, logprobs)):
        bad = next(value for value in logprobs if not math.isfinite(value))
        return Failure(reason="not_finite", message=f"the logprob of a sampled token is {bad}")
    if finish_reason is not None and finish_reason not in _REAL_ENDS:
        return Failure(reason="engine_error", message=f"vLLM ended the sequence with {finish_reason!r}")
    return None
