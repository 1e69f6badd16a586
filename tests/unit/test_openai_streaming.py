"""A streamed answer is the whole one in pieces."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgelite.policy.openai.text import TextStream, cut_at_stop
from tests.unit.openai_fakes import byte_tokenizer, make_endpoint

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def joined(events: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The pieces of one choice of a streamed chat, put together."""
    out: dict[str, Any] = {"content": "", "tool_calls": [], "token_ids": [], "logprobs": []}
    for choice in (c for e in events for c in e["choices"] if c["index"] == index):
        out["content"] += choice["delta"].get("content") or ""
        out["tool_calls"] += choice["delta"].get("tool_calls", [])
        out["token_ids"] += choice.get("token_ids", [])
        out["logprobs"] += (choice["logprobs"] or {}).get("content", [])
        if choice["finish_reason"] is not None:
            out |= {k: choice[k] for k in ("finish_reason", "weight_versions")}
    return out


@pytest.mark.parametrize("per_report", [1, 3])
@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("plain text, ü and 😀", {}),
        ("one EN two END", {"stop": ["END"]}),
        ("cut off by its length", {"max_tokens": 7}),
        (f"Let me see.\n{CALL}", {"tools": TOOLS}),
        (f"{CALL}\n{CALL}", {"tools": TOOLS}),
        ("no <tool_call> that is one", {"tools": TOOLS}),
        (CALL, {}),
        ("", {}),
    ],
)
async def test_the_pieces_join_to_the_whole_answer(text: str, fields: dict, per_report: int):
    endpoint = make_endpoint(text, text, per_report=per_report)
    asked = {"logprobs": True, "return_token_ids": True, "n": 2, **fields}
    whole = await endpoint.chat("x", **asked)
    events = await endpoint.chat("x", **asked, stream=True)
    for choice in whole["choices"]:
        pieces = joined(events, choice["index"])
        assert pieces["content"] == (choice["message"]["content"] or "")
        calls = [call["function"] for call in pieces["tool_calls"]]
        assert calls == [call["function"] for call in choice["message"].get("tool_calls", [])]
        assert pieces["token_ids"] == choice["token_ids"]
        assert pieces["logprobs"] == choice["logprobs"]["content"]
        assert pieces["finish_reason"] == choice["finish_reason"]
        assert pieces["weight_versions"] == choice["weight_versions"]


async def test_the_first_chunk_has_the_role_and_the_last_one_the_usage():
    events = await make_endpoint("ab").chat("x", stream=True, stream_options={"include_usage": True})
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 3
    assert all(e["object"] == "chat.completion.chunk" for e in events)


async def test_a_streamed_completion_has_offsets_that_go_on():
    endpoint = make_endpoint("abc", "abc")
    events = await endpoint.complete("x", stream=True, logprobs=0)
    choices = [c for e in events for c in e["choices"] if c["logprobs"]]
    assert "".join(c["text"] for c in choices) == "abc"
    assert [at for c in choices for at in c["logprobs"]["text_offset"]] == [0, 1, 2, 3]
    assert events[0]["object"] == "text_completion"


async def test_half_a_character_and_half_a_stop_text_are_held_back():
    tokenizer = byte_tokenizer()
    stream = TextStream(tokenizer, stop=("END",))
    pieces = [stream.push([i]) for i in tokenizer.encode("üEN.END", add_special_tokens=False)]
    assert pieces == ["", "ü", "", "", "EN.", "", "", ""]
    assert stream.finish() == ("üEN.", "")


@given(text=st.text(alphabet="abü😀 <tol_cal>", max_size=24), cuts=st.lists(st.integers(0, 60), max_size=6))
def test_text_comes_out_of_a_stream_as_it_comes_out_whole(text: str, cuts: list[int]):
    tokenizer, stop, until = byte_tokenizer(), ("ab", "b<"), ("<tool_call>",)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    stream = TextStream(tokenizer, stop=stop, until=until)
    bounds = [0, *sorted(min(c, len(token_ids)) for c in cuts), len(token_ids)]
    shown = [stream.push(token_ids[a:b]) for a, b in pairwise(bounds)]
    whole, rest = stream.finish()
    assert "".join(shown) + rest == whole == cut_at_stop(text, stop)


async def call_and_go_away(endpoint, body: dict, *, after: int) -> None:
    """Ask as a server would for a client that disconnects after `after` parts of the answer."""

    gone = asyncio.Event()
    told = iter([{"type": "http.request", "body": json.dumps(body).encode()}])

    async def receive():
        message = next(told, None)
        if message is None:
            await gone.wait()
            return {"type": "http.disconnect"}
        return message

    sent = []

    async def send(message):
        sent.append(message)
        if len(sent) > after:
            gone.set()

    if after < 0:
        asyncio.get_running_loop().call_later(0.05, gone.set)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": "POST",
        "path": "/v1/completions",
        "headers": [],
        "query_string": b"",
        "client": None,
        "server": None,
    }
    await endpoint.client._transport.app(scope, receive, send)


@pytest.mark.parametrize(("stream", "after"), [(False, -1), (True, 3)])
async def test_a_client_that_goes_away_aborts_its_request(stream: bool, after: int):
    endpoint = make_endpoint("a long answer", waits=asyncio.Event())
    body = {"model": "policy", "prompt": "x", "stream": stream}
    await asyncio.wait_for(call_and_go_away(endpoint, body, after=after), 20)
    assert endpoint.policy.aborted == [endpoint.policy.requests[0].request_id]
