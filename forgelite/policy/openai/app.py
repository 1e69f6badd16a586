"""The routes: /v1/chat/completions, /v1/completions, /v1/models, /v1/sessions, /health.

A request is read (bounded), checked, planned and answered. A client that goes away aborts its request in the engine.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing, suppress
from dataclasses import asdict
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from forgelite.errors import ForgeliteError
from forgelite.observe.gates import within
from forgelite.policy.openai.api_errors import ApiError, as_api_error
from forgelite.policy.openai.formats import AnswerFormat
from forgelite.policy.openai.generation import Piece, generate, stream
from forgelite.policy.openai.jobs import Backend, plan_job
from forgelite.policy.openai.requests import ChatBody, CompletionBody, parse_body

T = TypeVar("T")

SESSION_HEADER = "X-Session-Id"
MAX_BODY_BYTES = 16 * 2**20
_MAYBE_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # half of a character beyond 16 bits, as JSON may write them
_HEALTH_S = 5.0
_CLIENT_GONE = 499  # nginx's status for a client that did not wait; nobody reads it


def create_app(backend: Backend, *, api_key: str | None = None, max_body_bytes: int = MAX_BODY_BYTES) -> FastAPI:
    """The application.

    Args:
        backend: what it serves.
        api_key: that every request but /health must have as a bearer token; None: whoever can connect may ask.
        max_body_bytes: a longer body is refused.
    """
    app = FastAPI(title="forgelite", openapi_url=None)
    router = APIRouter(prefix="/v1", dependencies=[Depends(_key_check(api_key))])
    numbers = itertools.count()

    async def answer(request: Request, kind: type[ChatBody] | type[CompletionBody]) -> Response:
        body = parse_body(kind, await _read_json(request, max_body_bytes))
        job = await plan_job(
            backend,
            body,
            session_id=request.headers.get(SESSION_HEADER),
            new_request_id=lambda: f"openai{next(numbers)}",
        )
        chat = isinstance(body, ChatBody)
        answer_format = AnswerFormat(
            chat=chat,
            job=job,
            tokenizer=backend.tokenizer,
            model=backend.model_name,
            logprobs=body.logprobs if chat else body.logprobs is not None,
            token_ids=body.return_token_ids,
        )
        if not body.stream:
            answered = await _unless_gone(request, generate(backend, job))
            return JSONResponse(answer_format.whole(answered))
        pieces = stream(backend, job)
        # A request that is refused, or fails before its first token, has a status of its own.
        first = await _unless_gone(request, anext(pieces))
        usage = body.stream_options is not None and body.stream_options.include_usage
        events = _events(answer_format, first, pieces, usage=usage)
        return _EventStream(events, pieces)

    @router.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer(request, ChatBody)

    @router.post("/completions")
    async def completions(request: Request) -> Response:
        return await answer(request, CompletionBody)

    @router.get("/models")
    async def models() -> dict[str, Any]:
        model = {"id": backend.model_name, "object": "model", "created": 0, "owned_by": "forgelite"}
        return {"object": "list", "data": [model | {"max_model_len": backend.max_model_len}]}

    @router.get("/sessions/{session_id:path}")
    async def read_session(session_id: str) -> dict[str, Any]:
        recorded = backend.recorder.trajectories(session_id, group_id=session_id)
        return {"session_id": session_id, "trajectories": [asdict(t) for t in recorded]}

    @router.delete("/sessions/{session_id:path}")
    async def close_session(session_id: str) -> dict[str, Any]:
        backend.recorder.find(session_id)
        backend.recorder.close(session_id)
        return {"session_id": session_id, "deleted": True}

    @app.get("/health")
    async def health() -> dict[str, Any]:
        try:
            version = await within(_HEALTH_S, backend.policy.version(), "the policy's version")
        except ForgeliteError as error:
            raise ApiError(503, str(error), code="policy_unavailable") from None
        return {"status": "ok", "version": version}

    app.include_router(router)
    app.add_exception_handler(ForgeliteError, _as_response)
    app.add_exception_handler(HTTPException, _as_response)
    app.add_exception_handler(_ClientGone, _as_response)
    return app


def _key_check(api_key: str | None) -> Any:
    expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def check(request: Request) -> None:
        given = request.headers.get("Authorization", "").encode()
        # compare_digest takes as long for a wrong key as for a right one
        if expected is not None and not hmac.compare_digest(given, expected):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")

    return check


async def _read_json(request: Request, limit: int) -> Any:
    size, parts = 0, []
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise ApiError(413, f"the body is longer than {limit} bytes (endpoint.max_body_bytes)")
            parts.append(part)
    except ClientDisconnect:
        raise _ClientGone from None
    try:
        text = b"".join(parts).decode()
        body = json.loads(text)
        if _MAYBE_HALF.search(text):
            json.dumps(body, ensure_ascii=False).encode()  # raises: no tokenizer takes half a character
        return body
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None


class _ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Await `work`; when the client goes away it is cancelled, and with it the request in the engine."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _EventStream(StreamingResponse):
    """Server-sent events that end the request in the engine however the response ends, also before its first event."""

    def __init__(self, events: AsyncIterator[str], pieces: AsyncGenerator[Piece, None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._pieces):
            await super().__call__(scope, receive, send)


async def _events(
    answer_format: AnswerFormat, first: Piece, pieces: AsyncIterator[Piece], *, usage: bool
) -> AsyncIterator[str]:
    begun: set[int] = set()
    offsets: dict[int, int] = {}
    completions = []
    try:
        piece: Piece | None = first
        while piece is not None:
            if piece.index not in begun:
                begun.add(piece.index)
                yield _event(answer_format.first(piece.index))
            if piece.text or piece.answer is not None or answer_format.shows_tokens:
                offset = offsets.get(piece.index, 0)
                yield _event(answer_format.piece(piece, offset))
                if answer_format.logprobs:
                    offsets[piece.index] = offset + sum(map(len, answer_format.token_texts(piece.token_ids)))
            if piece.completion is not None:
                completions.append(piece.completion)
            piece = await anext(pieces, None)
        if usage:
            yield _event(answer_format.final_usage(completions))
    except ForgeliteError as error:  # the status has been sent already
        yield _event(as_api_error(error).body())
    yield "data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


async def _as_response(request: Request, error: Exception) -> Response:
    if isinstance(error, _ClientGone):
        return Response(status_code=_CLIENT_GONE)
    if isinstance(error, HTTPException):  # an unknown route or method
        error = ApiError(error.status_code, str(error.detail))
    assert isinstance(error, ForgeliteError)
    told = as_api_error(error)
    return JSONResponse(told.body(), status_code=told.status)
