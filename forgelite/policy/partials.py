"""What is known of a request while a replica samples it, so that another replica can go on from there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from forgelite.policy.groups import GroupProgress, MemberProgress
from forgelite.types import Completion, FinishReason, GroupRequest, VersionSpan


@dataclass(kw_only=True, slots=True)
class _KnownMember:
    token_ids: list[int] = field(default_factory=list)  # [n]
    logprobs: list[float] = field(default_factory=list)  # [n]
    spans: list[VersionSpan] = field(default_factory=list)  # cover [0, n)
    finish_reason: FinishReason = "abort"  # the word for a completion that can go on


class KnownTokens:
    """The tokens of one request that have been reported so far.

    Example: after `known.add(progress)`, `known.request_to_go_on(progress_s=1.0)` asks for the tokens after them.
    """

    def __init__(self, request: GroupRequest) -> None:
        self._request = request
        self._members = [
            _KnownMember(
                token_ids=list(partial.token_ids),
                logprobs=list(partial.logprobs),
                spans=list(partial.spans),
                finish_reason=partial.finish_reason,
            )
            for partial in request.partials or ()
        ] or [_KnownMember() for _ in range(request.n)]

    @property
    def nothing(self) -> bool:
        """Whether not one token is known."""
        return not any(member.token_ids for member in self._members)

    @property
    def newest_version(self) -> int:
        """The newest version among the known tokens; -1 when there are none. An older one must not go on from them."""
        return max((member.spans[-1].version for member in self._members if member.spans), default=-1)

    def add(self, progress: GroupProgress) -> None:
        """Append what was reported. The reports of a request come in order and without gaps."""
        for new in progress.members:
            _append(self._members[new.index], new)

    def completions(self) -> tuple[Completion, ...]:
        """The members as they are known; those that are not finished have the finish reason "abort"."""
        return tuple(
            Completion(
                request_id=f"{self._request.request_id}/{index}",
                prompt_ids=self._request.prompt_ids,
                token_ids=list(member.token_ids),
                logprobs=list(member.logprobs),
                spans=list(member.spans),
                finish_reason=member.finish_reason,
            )
            for index, member in enumerate(self._members)
        )

    def request_to_go_on(self, *, progress_s: float) -> GroupRequest:
        """The request, going on from what is known.

        Args:
            progress_s: how often to report, where the request itself does not say.
        """
        request = self._request
        return dataclasses.replace(
            request,
            partials=request.partials if self.nothing else self.completions(),
            progress_s=progress_s if request.progress_s is None else request.progress_s,
        )


def _append(member: _KnownMember, new: MemberProgress) -> None:
    if new.start != len(member.token_ids):
        raise ValueError(f"a report that starts at token {new.start} follows one that ended at {len(member.token_ids)}")
    member.token_ids += new.token_ids
    member.logprobs += new.logprobs
    member.spans = join_spans(member.spans, new.spans)
    if new.finish_reason is not None:
        member.finish_reason = new.finish_reason


def join_spans(before: Sequence[VersionSpan], after: Sequence[VersionSpan]) -> list[VersionSpan]:
    """The spans of two parts of a completion, where the second begins at the end of the first."""
    joined = list(before)
    for span in after:
        if joined and joined[-1].version == span.version:
            joined[-1] = dataclasses.replace(joined[-1], end=span.end)
        else:
            joined.append(span)
    return joined
