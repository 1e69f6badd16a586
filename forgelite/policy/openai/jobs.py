"""What is served, and how a request of a client becomes a request for the policy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

from forgelite.policy.groups import GroupProgress, GroupResult
from forgelite.policy.openai.api_errors import ApiError
from forgelite.policy.openai.chat import Conversation, check_messages
from forgelite.policy.openai.recording import PlannedPrompt, Session, SessionRecorder, Turn, plan_chat, plan_completion
from forgelite.policy.openai.requests import ChatBody, CompletionBody, sampling_params
from forgelite.policy.openai.text import ChatTokenizer
from forgelite.types import Completion, Failure, GroupRequest, SamplingParams


class Policy(Protocol):
    """What the endpoint needs of the policy: `forgelite.policy.service.PolicyService`, or a fake."""

    async def generate_group(
        self, request: GroupRequest, *, timeout_s: float | None = None
    ) -> list[Completion | Failure]:
        """Complete one prompt n times. Cancelling the call aborts the request."""
        ...

    def stream(
        self, request: GroupRequest, *, timeout_s: float | None = None
    ) -> AsyncIterator[GroupProgress | GroupResult]:
        """The same with reports, the result as the last item. Closing the iterator aborts the request."""
        ...

    async def version(self) -> int:
        """The version that is served."""
        ...


@dataclass(kw_only=True, slots=True, frozen=True)
class Backend:
    """What an endpoint serves.

    Example: `Backend(policy=service, tokenizer=tokenizer, planner=executor, recorder=SessionRecorder(),
    defaults=SamplingParams(max_tokens=256), model_name="policy", max_model_len=4096)`.
    """

    policy: Policy
    tokenizer: ChatTokenizer
    planner: Executor  # of one thread: templates and tokenizers take long for long texts, and are not for two threads
    recorder: SessionRecorder
    defaults: SamplingParams  # for what a request does not say
    model_name: str
    max_model_len: int  # tokens of a prompt and its answer together
    timeout_s: float = 300.0  # deadline of one request


@dataclass(kw_only=True, slots=True, frozen=True)
class Job:
    """A checked request. Example: `job = await plan_job(backend, body, session_id="g12/3")`."""

    request: GroupRequest
    parent: Turn | None
    session: Session | None
    conversation: Conversation | None  # None: of the completions route
    reads_tool_calls: bool
    timeout_s: float
    deadline: float  # on the monotonic clock, after timeout_s


async def plan_job(
    backend: Backend, body: ChatBody | CompletionBody, *, session_id: str | None, new_request_id: Callable[[], str]
) -> Job:
    """Make a request for the policy of what a client sent.

    Args:
        backend: what is served.
        body: checked by `parse_body`.
        session_id: of the header; None: nothing is recorded.
        new_request_id: makes the id of a request without a session.

    Raises:
        ApiError: the model or the session is unknown, the session was aborted, a message is not supported, or the
            prompt is too long.
    """
    if body.model != backend.model_name:
        raise ApiError(
            404,
            f"there is no model {body.model!r}: this endpoint serves {backend.model_name!r}",
            code="model_not_found",
            param="model",
        )
    session = backend.recorder.for_request(session_id) if session_id else None
    if session is not None and session.aborted:
        # 410 is a status that clients do not try again after.
        raise ApiError(410, f"session {session_id} was aborted: its answers are not wanted any more", code="aborted")
    conversation = _conversation(body)
    planned = await asyncio.get_running_loop().run_in_executor(
        backend.planner, _plan, backend.tokenizer, session, conversation, body
    )
    limit = backend.max_model_len
    if session is not None and session.max_length is not None:
        limit = min(limit, session.max_length)
    size = len(planned.prompt_ids)
    if size >= limit:
        raise ApiError(
            400,
            f"the prompt has {size} tokens and leaves no room for an answer: prompt and answer together may have "
            f"{limit} tokens",
            code="context_length_exceeded",
            param="prompt" if conversation is None else "messages",
        )
    name = session.next_request_id() if session is not None else new_request_id()
    fixed = session.request_sampling(name) if session is not None else None
    return Job(
        request=GroupRequest(
            request_id=name,
            prompt_ids=planned.prompt_ids,
            sampling=sampling_params(
                body, defaults=fixed or backend.defaults, fixed=fixed is not None, room=limit - size
            ),
            n=body.n,
            session=session_id or None,
            progress_s=0.0 if body.stream else None,
        ),
        parent=planned.parent,
        session=session,
        conversation=conversation,
        reads_tool_calls=isinstance(body, ChatBody) and bool(body.tools) and body.tool_choice == "auto",
        timeout_s=backend.timeout_s,
        deadline=time.monotonic() + backend.timeout_s,
    )


def _conversation(body: ChatBody | CompletionBody) -> Conversation | None:
    if isinstance(body, CompletionBody):
        return None
    return Conversation(
        messages=check_messages(body.messages),
        tools=body.tools or None,
        template_options=body.chat_template_kwargs or None,
    )


def _plan(
    tokenizer: ChatTokenizer,
    session: Session | None,
    conversation: Conversation | None,
    body: ChatBody | CompletionBody,
) -> PlannedPrompt:
    if conversation is not None:
        return plan_chat(session, conversation, tokenizer)
    assert isinstance(body, CompletionBody)
    prompt = body.single_prompt()
    ids = tokenizer.encode(prompt, add_special_tokens=False) if isinstance(prompt, str) else prompt
    return plan_completion(session, ids)
