"""A group while it is being sampled: its members, the versions of their tokens, and how it ends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from forgelite.types import Completion, Failure, FinishReason, GroupRequest, VersionSpan

MemberFate = Literal["running", "stop", "length", "abort"]
_REAL_ENDS = ("stop", "length")


@dataclass(kw_only=True, slots=True)
class GroupResult:
    """How one request ended: all its completions, or one failure.

    Example: `GroupResult(request_id="g12", outcome=[completion_0, completion_1])`.
    """

    request_id: str
    outcome: list[Completion] | Failure


@dataclass(kw_only=True, slots=True)
class Member:
    """One sequence of a group. Its id is that of the completion it becomes.

    Example: `Member(sequence_id="g12/0")`, which after two tokens has `token_ids=[5, 1]`.
    """

    sequence_id: str
    token_ids: list[int] = field(default_factory=list)  # [n]
    logprobs: list[float] = field(default_factory=list)  # [n]
    runs: list[tuple[int, int]] = field(default_factory=list)  # (version, its first token)
    fate: MemberFate = "running"

    def extend(self, token_ids: list[int], logprobs: list[float], version: int) -> None:
        """Append what one step sampled with the weights of `version`."""
        if not self.runs or self.runs[-1][0] != version:
            self.runs.append((version, len(self.token_ids)))
        self.token_ids += token_ids
        self.logprobs += logprobs

    def spans(self) -> list[VersionSpan]:
        """The versions of the tokens so far."""
        ends = [start for _, start in self.runs[1:]] + [len(self.token_ids)]
        return [
            VersionSpan(version=version, start=start, end=end)
            for (version, start), end in zip(self.runs, ends, strict=True)
        ]


@dataclass(kw_only=True, slots=True)
class LiveGroup:
    """A request that the engine has accepted.

    Example: `LiveGroup.of(request)` has one running member for each completion asked for.
    """

    request: GroupRequest
    members: list[Member]
    unfinished: int  # members whose fate is "running"

    @classmethod
    def of(cls, request: GroupRequest) -> LiveGroup:
        """The group of a request, before its first token."""
        members = [Member(sequence_id=f"{request.request_id}/{index}") for index in range(request.n)]
        return cls(request=request, members=members, unfinished=request.n)

    def running(self) -> Iterator[Member]:
        """The members that are still being sampled."""
        return (member for member in self.members if member.fate == "running")

    def end(self, member: Member, fate: FinishReason) -> None:
        """Give a running member its end."""
        member.fate = fate
        self.unfinished -= 1

    def completions(self) -> list[Completion]:
        """The finished members in the order of their index."""
        return [
            Completion(
                request_id=member.sequence_id,
                prompt_ids=self.request.prompt_ids,
                token_ids=member.token_ids,
                logprobs=member.logprobs,
                spans=member.spans(),
                finish_reason=member.fate,
            )
            for member in self.members
        ]


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
        return Failure(reason="not_finite", message=f"the logprob of a sampled token is {logprobs[-1]}")
    if finish_reason is not None and finish_reason not in _REAL_ENDS:
        return Failure(reason="engine_error", message=f"vLLM ended the sequence with {finish_reason!r}")
    return None
