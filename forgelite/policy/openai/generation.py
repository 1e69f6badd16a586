"""A planned request on its way through the policy: sampled whole or piece by piece, and recorded.

Both routes and both ways of answering share this module, so that a streamed answer is the whole one in pieces.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from forgelite.errors import DeadlineExceeded, GenerationFailed, RequestRejected, StationDied
from forgelite.observe.gates import within
from forgelite.policy.admission import REJECTED
from forgelite.policy.engine_protocol import ENGINE_DEAD
from forgelite.policy.groups import GroupProgress, GroupResult
from forgelite.policy.openai.answers import Answer, answer_of_text, read_answer, text_stream
from forgelite.policy.openai.chat import Conversation, check_messages
from forgelite.policy.openai.jobs import Backend, Job
from forgelite.policy.openai.recording import Turn
from forgelite.policy.openai.text import TextStream
from forgelite.types import Completion, Failure

_BEHIND_S = 10.0  # the policy's own deadline comes after the endpoint's, which is the one that is reported


@dataclass(kw_only=True, slots=True, frozen=True)
class Piece:
    """What is new of one member of a streamed answer.

    Example: `Piece(index=0, text=" the", token_ids=[262], logprobs=[-0.4])`; the last one of a member has `answer` and
    `completion`.
    """

    index: int
    text: str
    token_ids: Sequence[int]  # [k]
    logprobs: Sequence[float]  # [k]
    answer: Answer | None = None
    completion: Completion | None = None


async def generate(backend: Backend, job: Job) -> list[tuple[Completion, Answer]]:
    """The whole answer, one entry for each of the n members.

    Cancelling the call aborts the request.

    Raises:
        RequestRejected, GenerationFailed, StationDied, DeadlineExceeded: there is no answer. One member that failed
            fails the request, because a client cannot tell which of n answers is missing.
    """
    call = backend.policy.generate_group(job.request, timeout_s=backend.timeout_s + _BEHIND_S)
    try:
        outcome = await within(job.deadline - time.monotonic(), call, _gate(job))
    except StationDied as error:
        _note_death(job, error)
        raise
    answered = [(c, read_answer(backend.tokenizer, job, c)) for c in _completions(job, outcome)]
    for completion, answer in answered:
        _record(backend, job, completion, answer)
    return answered


async def stream(backend: Backend, job: Job) -> AsyncGenerator[Piece, None]:
    """The answer in pieces, as they are sampled; the last piece of each member says how it ended.

    Closing the iterator aborts the request. Raises what `generate` raises, also after some pieces.
    """
    texts = [text_stream(backend.tokenizer, job) for _ in range(job.request.n)]
    sent = [0] * job.request.n  # tokens of each member
    result: GroupResult | None = None
    try:
        async with aclosing(backend.policy.stream(job.request, timeout_s=backend.timeout_s + _BEHIND_S)) as reports:
            while not isinstance(result, GroupResult):
                report = await _next_report(job, reports)
                if isinstance(report, GroupResult):
                    result = report
                    continue
                for member in report.members:
                    # A report that does not follow the last one brings nothing that the result does not bring too.
                    known = sent[member.index] - member.start
                    if 0 <= known < len(member.token_ids):
                        new = member.token_ids[known:]
                        sent[member.index] += len(new)
                        yield Piece(
                            index=member.index,
                            text=texts[member.index].push(new),
                            token_ids=new,
                            logprobs=member.logprobs[known:],
                        )
    except StationDied as error:
        _note_death(job, error)
        raise
    last = [
        _last_piece(job, texts[index], completion, index=index, sent=sent[index])
        for index, completion in enumerate(_completions(job, result.outcome))
    ]
    for piece in last:  # all before the first is given out: the client may go away in between
        _record(backend, job, piece.completion, piece.answer)
    for piece in last:
        yield piece


def _last_piece(job: Job, text: TextStream, completion: Completion, *, index: int, sent: int) -> Piece:
    new = completion.token_ids[sent:]
    shown = text.push(new)
    whole, rest = text.finish()
    answer = answer_of_text(job, whole, completion)
    if answer.tool_calls:  # the rest is the calls themselves
        rest = answer.text[len(whole) - len(rest) :]
    return Piece(
        index=index,
        text=shown + rest,
        token_ids=new,
        logprobs=completion.logprobs[sent:],
        answer=answer,
        completion=completion,
    )


def _completions(job: Job, outcome: Sequence[Completion | Failure] | Failure) -> list[Completion]:
    completions = []
    for member in [outcome] if isinstance(outcome, Failure) else outcome:
        if isinstance(member, Completion):
            completions.append(member)
        elif member.reason == REJECTED:
            raise RequestRejected(member.message)
        elif member.reason == ENGINE_DEAD:
            error = StationDied(member.message)
            _note_death(job, error)
            raise error
        else:
            raise GenerationFailed(f"request {job.request.request_id}: {member.reason}: {member.message}")
    return completions


async def _next_report(job: Job, reports: AsyncIterator[GroupProgress | GroupResult]) -> GroupProgress | GroupResult:
    # Not `within`: the iterator must be advanced in this task, so that it has ended when it is closed.
    try:
        async with asyncio.timeout(job.deadline - time.monotonic()) as block:
            return await anext(reports)
    except StopAsyncIteration:
        raise GenerationFailed(f"request {job.request.request_id}: the policy gave no result") from None
    except TimeoutError:
        if not block.expired():
            raise
        raise DeadlineExceeded(f"waited {job.timeout_s:g} s for {_gate(job)}") from None


def _note_death(job: Job, error: StationDied) -> None:
    if job.session is not None:
        job.session.died = error


def _record(backend: Backend, job: Job, completion: Completion, answer: Answer) -> None:
    if job.session is None:
        return
    job.session.aborted |= completion.finish_reason == "abort"
    conversation = job.conversation
    if conversation is not None:
        said = check_messages([answer.message(completion.request_id)])
        conversation = Conversation(
            messages=[*conversation.messages, *said],
            tools=conversation.tools,
            template_options=conversation.template_options,
        )
    job.session.turns.append(
        Turn(
            completion=completion,
            text=backend.tokenizer.decode(completion.token_ids, skip_special_tokens=True),
            conversation=conversation,
            parent=job.parent,
        )
    )


def _gate(job: Job) -> str:
    return f"request {job.request.request_id} (policy.request_timeout_s)"
