"""What is kept of a request while a replica samples it."""

from __future__ import annotations

import pytest

from forgelite.policy.groups import GroupProgress, MemberProgress
from forgelite.policy.partials import KnownTokens
from forgelite.types import Completion, FinishReason, GroupRequest, SamplingParams, VersionSpan


def request(**options: object) -> GroupRequest:
    return GroupRequest(request_id="g", prompt_ids=(1, 2), sampling=SamplingParams(max_tokens=8), n=2, **options)


def report(index: int, start: int, *tokens: int, version: int, finish: FinishReason | None = None) -> GroupProgress:
    member = MemberProgress(
        index=index,
        start=start,
        token_ids=tokens,
        logprobs=tuple(-0.5 for _ in tokens),
        spans=(VersionSpan(version=version, start=start, end=start + len(tokens)),),
        finish_reason=finish,
    )
    return GroupProgress(request_id="g", members=(member,))


def test_reports_join_to_partials_whose_spans_of_one_version_are_one():
    known = KnownTokens(request())
    known.add(report(0, 0, 5, 6, version=3))
    known.add(report(0, 2, 7, version=3))
    known.add(report(0, 3, 8, version=4))
    first, second = known.completions()

    assert (first.request_id, list(first.token_ids), first.finish_reason) == ("g/0", [5, 6, 7, 8], "abort")
    assert first.spans == [VersionSpan(version=3, start=0, end=3), VersionSpan(version=4, start=3, end=4)]
    assert (list(second.token_ids), second.finish_reason) == ([], "abort")
    assert known.newest_version == 4


def test_a_member_that_has_ended_is_not_gone_on_with():
    known = KnownTokens(request())
    known.add(report(1, 0, 5, version=3, finish="stop"))

    assert [partial.finish_reason for partial in known.completions()] == ["abort", "stop"]


def test_a_request_of_which_nothing_is_known_is_sent_as_it_came():
    sent = KnownTokens(request(session="s")).request_to_go_on(progress_s=1.0)

    assert (sent.partials, sent.progress_s, sent.session) == (None, 1.0, "s")
    assert KnownTokens(request(progress_s=0.0)).request_to_go_on(progress_s=1.0).progress_s == 0.0


def test_partials_that_a_request_brings_are_known_from_the_start():
    partial = Completion(
        request_id="g/0",
        prompt_ids=(1, 2),
        token_ids=[5],
        logprobs=[-0.1],
        spans=[VersionSpan(version=2, start=0, end=1)],
        finish_reason="abort",
    )
    known = KnownTokens(request(partials=(partial, partial)))
    known.add(report(0, 1, 6, version=2))

    assert [list(c.token_ids) for c in known.completions()] == [[5, 6], [5]]


def test_a_report_that_leaves_tokens_out_is_an_error():
    with pytest.raises(ValueError, match="starts at token 2 follows one that ended at 0"):
        KnownTokens(request()).add(report(0, 2, 7, version=3))
