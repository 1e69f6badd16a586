"""The endpoint without an engine: a tokenizer of bytes with a chat template, and a policy that says what it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httpx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from forgelite.policy.groups import GroupProgress, GroupResult, MemberProgress
from forgelite.policy.openai.app import create_app
from forgelite.policy.openai.jobs import Backend
from forgelite.policy.openai.recording import SessionRecorder
from forgelite.types import Completion, Failure, GroupRequest, SamplingParams, VersionSpan

END = "<|im_end|>"

# ChatML with tools, in the manner of Qwen: answers of the tools are grouped under one user turn.
TEMPLATE = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Leaves what stands before </think> out of every answer but the last, as reasoning models do.
FORGETFUL_TEMPLATE = """
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == "assistant" and not loop.last %}{{ message.content.split("</think>")[-1] }}
{%- else %}{{ message.content }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@cache
def byte_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a byte, and three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", END, "<pad>")]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token="<pad>")
    fast.chat_template = template
    return fast


@dataclass
class ScriptedPolicy:
    """Answers its k-th request with the k-th text, closed by the end token unless `max_tokens` is reached before."""

    tokenizer: PreTrainedTokenizerFast
    answers: list[str] = field(default_factory=list)
    answer_of: Callable[[GroupRequest], str] | None = None  # in the place of `answers`
    requests: list[GroupRequest] = field(default_factory=list)
    timeouts: list[float | None] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    error: Exception | None = None
    outcome: Failure | None = None
    waits: asyncio.Event | None = None  # no request is finished before it is set
    finish: str | None = None  # in the place of the real finish reason
    per_report: int = 1  # tokens
    asked: asyncio.Event = field(default_factory=asyncio.Event)  # set by the first request
    was_aborted: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate_group(self, request: GroupRequest, *, timeout_s: float | None = None) -> list[Any]:
        self.timeouts.append(timeout_s)
        completions = self._complete(request)
        try:
            if self.waits is not None:
                await self.waits.wait()
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self._abort(request)
            raise
        return completions

    async def stream(
        self, request: GroupRequest, *, timeout_s: float | None = None
    ) -> AsyncIterator[GroupProgress | GroupResult]:
        completions = self._complete(request)
        ended = False
        try:
            longest = max(len(c.token_ids) for c in completions if isinstance(c, Completion))
            for start in range(0, longest - self.per_report, self.per_report):  # the last tokens come with the result
                members = tuple(
                    MemberProgress(
                        index=i,
                        start=start,
                        token_ids=tuple(c.token_ids[start : start + self.per_report]),
                        logprobs=tuple(c.logprobs[start : start + self.per_report]),
                        spans=(),
                    )
                    for i, c in enumerate(completions)
                    if start < len(c.token_ids)
                )
                yield GroupProgress(request_id=request.request_id, members=members)
                await asyncio.sleep(0)
            if self.waits is not None:
                await self.waits.wait()
            ended = True
            yield GroupResult(request_id=request.request_id, outcome=completions)
        finally:
            if not ended:
                self._abort(request)

    async def version(self) -> int:
        if self.error is not None:
            raise self.error
        return 3

    def _abort(self, request: GroupRequest) -> None:
        self.aborted.append(request.request_id)
        self.was_aborted.set()

    def _complete(self, request: GroupRequest) -> list[Completion | Failure]:
        self.requests.append(request)
        self.asked.set()
        if self.error is not None:
            raise self.error
        if self.outcome is not None:
            return [self.outcome] * request.n
        text = self.answer_of(request) if self.answer_of else self.answers[len(self.requests) - 1]
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        stopped_by_text = any(s in text for s in request.sampling.stop)
        if not stopped_by_text:
            tokens.append(self.tokenizer.eos_token_id)
        finish = "stop" if len(tokens) <= request.sampling.max_tokens else "length"
        tokens = tokens[: request.sampling.max_tokens]
        return [
            Completion(
                request_id=f"{request.request_id}/{i}",
                prompt_ids=request.prompt_ids,
                token_ids=tokens,
                logprobs=[-0.01 * (t + 1) for t in range(len(tokens))],
                spans=_spans(len(tokens)),
                finish_reason=self.finish or finish,
            )
            for i in range(request.n)
        ]


def _spans(length: int) -> list[VersionSpan]:
    """Version 3, and from the second token on version 4."""
    bounds = [(3, 0, min(1, length)), (4, 1, length)]
    return [VersionSpan(version=v, start=s, end=e) for v, s, e in bounds if e > s]


@dataclass
class FakeEndpoint:
    """An endpoint that is asked in the same process."""

    policy: ScriptedPolicy
    backend: Backend
    client: httpx.AsyncClient

    @property
    def recorder(self) -> SessionRecorder:
        return self.backend.recorder

    async def chat(self, *messages: dict[str, Any] | str, session: str | None = None, **fields: Any) -> Any:
        """The parsed answer to messages; a text is a message of the user."""
        body = {"model": "policy", "messages": [_message(m) for m in messages], **fields}
        return await self._post("/v1/chat/completions", body, session)

    async def complete(self, prompt: Any, *, session: str | None = None, **fields: Any) -> Any:
        return await self._post("/v1/completions", {"model": "policy", "prompt": prompt, **fields}, session)

    async def _post(self, path: str, body: dict[str, Any], session: str | None) -> Any:
        headers = {"X-Session-Id": session} if session else {}
        answer = await self.client.post(path, json=body, headers=headers)
        if answer.headers["content-type"].startswith("text/event-stream"):
            return read_events(answer.text)
        return answer.json() | {"status": answer.status_code}


def make_endpoint(
    *answers: str,
    template: str | None = TEMPLATE,
    defaults: SamplingParams | None = None,
    max_model_len: int = 4096,
    timeout_s: float = 30.0,
    max_unopened: int = 4,
    api_key: str | None = None,
    max_body_bytes: int = 2**20,
    **policy: Any,
) -> FakeEndpoint:
    """An endpoint over a policy that gives `answers`."""
    tokenizer = byte_tokenizer(template)
    scripted = ScriptedPolicy(tokenizer=tokenizer, answers=list(answers), **policy)
    backend = Backend(
        policy=scripted,
        tokenizer=tokenizer,
        planner=ThreadPoolExecutor(max_workers=1),
        recorder=SessionRecorder(max_unopened=max_unopened),
        defaults=defaults or SamplingParams(max_tokens=256, stop_token_ids=(tokenizer.eos_token_id,)),
        model_name="policy",
        max_model_len=max_model_len,
        timeout_s=timeout_s,
    )
    app = create_app(backend, api_key=api_key, max_body_bytes=max_body_bytes)
    transport = httpx.ASGITransport(app=app)
    return FakeEndpoint(scripted, backend, httpx.AsyncClient(transport=transport, base_url="http://endpoint"))


def read_events(text: str) -> list[dict[str, Any]]:
    """The JSON objects of a server-sent stream, which must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def _message(message: dict[str, Any] | str) -> dict[str, Any]:
    return {"role": "user", "content": message} if isinstance(message, str) else message


def decode(tokenizer: PreTrainedTokenizerFast, token_ids: Sequence[int]) -> str:
    """The text with special tokens."""
    return tokenizer.decode(token_ids, skip_special_tokens=False)
