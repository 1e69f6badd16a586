"""What a client of the endpoint may ask, what it is answered, and what is refused."""

from __future__ import annotations

import asyncio
import json

import pytest

from forgelite.errors import GenerationFailed, RequestRejected, StationDied
from forgelite.policy.openai.tool_calls import parse_tool_calls
from forgelite.types import Failure, SamplingParams
from tests.unit.openai_fakes import END, decode, make_endpoint


def assert_refused(answer: dict, status: int, *, param: str | None = None, code: str | None = None) -> None:
    assert answer["status"] == status, answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert (answer["error"]["param"], answer["error"]["code"]) == (param, code)


async def test_a_chat_is_rendered_sampled_and_answered():
    endpoint = make_endpoint("four")
    answer = await endpoint.chat("2 + 2?")
    (request,) = endpoint.policy.requests
    prompt = decode(endpoint.policy.tokenizer, request.prompt_ids)
    assert prompt == "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "four"}
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"] == {
        "prompt_tokens": len(request.prompt_ids),
        "completion_tokens": 5,
        "total_tokens": len(request.prompt_ids) + 5,
    }


async def test_a_completion_takes_a_text_or_token_ids():
    endpoint = make_endpoint("four", "four")
    from_text = await endpoint.complete("2 + 2 = ")
    from_ids = await endpoint.complete([5, 6, 7])
    assert from_text["choices"][0]["text"] == from_ids["choices"][0]["text"] == "four"
    assert endpoint.policy.requests[1].prompt_ids == (5, 6, 7)
    assert_refused(await endpoint.complete(["a", "b"]), 400, param="prompt")


async def test_every_sampling_parameter_reaches_the_policy():
    endpoint = make_endpoint("a")
    await endpoint.chat(
        "x",
        n=2,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=11,
        max_completion_tokens=9,
        stop=["END", "STOP"],
        stop_token_ids=[3],
        ignore_eos=True,
    )
    (request,) = endpoint.policy.requests
    assert request.n == 2
    assert request.sampling == SamplingParams(
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        stop_token_ids=(endpoint.policy.tokenizer.eos_token_id, 3),
        ignore_eos=True,
        seed=11,
        stop=("END", "STOP"),
    )


async def test_what_a_request_does_not_say_comes_from_the_configuration():
    endpoint = make_endpoint("a", defaults=SamplingParams(max_tokens=5, temperature=0.7))
    await endpoint.chat("x", temperature=None, n=None)
    assert endpoint.policy.requests[0].sampling == SamplingParams(max_tokens=5, temperature=0.7)


async def test_more_tokens_than_fit_gives_as_many_as_fit():
    endpoint = make_endpoint("a", max_model_len=60)
    await endpoint.complete([1] * 50, max_tokens=500)
    assert endpoint.policy.requests[0].sampling.max_tokens == 10


async def test_a_prompt_without_room_for_an_answer_is_refused():
    endpoint = make_endpoint(max_model_len=60)
    assert_refused(await endpoint.complete([1] * 60), 400, param="prompt", code="context_length_exceeded")
    assert_refused(await endpoint.chat("x" * 60), 400, param="messages", code="context_length_exceeded")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "json_object"}),
        ("logit_bias", {"5": 1}),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.1),
        ("repetition_penalty", 1.1),
        ("echo", True),
        ("suffix", "tail"),
        ("best_of", 2),
        ("parallel_tool_calls", False),
        ("guided_json", {}),
        ("temprature", 1),
    ],
)
async def test_a_field_that_is_not_supported_is_refused_by_name(field: str, value: object):
    endpoint = make_endpoint()
    assert_refused(await endpoint.chat("x", **{field: value}), 400, param=field, code="unsupported_parameter")


async def test_fields_that_ask_for_nothing_are_let_through():
    endpoint = make_endpoint("a")
    answer = await endpoint.chat(
        "x", user="me", presence_penalty=0, frequency_penalty=0.0, logit_bias=None, response_format={"type": "text"}
    )
    assert answer["status"] == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", True),
        ("temperature", -1),
        ("temperature", "warm"),
        ("top_p", 0),
        ("max_tokens", 0),
        ("stop", [""]),
        ("top_logprobs", 3),
        ("tool_choice", "required"),
        ("messages", []),
    ],
)
async def test_a_wrong_value_is_refused_with_its_field(field: str, value: object):
    assert_refused(await make_endpoint().chat("x", **{field: value}), 400, param=field)


async def test_several_candidate_tokens_are_refused_because_only_the_sampled_one_is_recorded():
    endpoint = make_endpoint()
    refused = await endpoint.complete("x", logprobs=3)
    assert_refused(refused, 400, param="logprobs")
    assert "set logprobs to 0" in refused["error"]["message"]


async def test_images_and_messages_without_a_role_are_refused():
    endpoint = make_endpoint()
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    assert_refused(await endpoint.chat(image), 400, param="messages")
    assert_refused(await endpoint.chat({"content": "x"}), 400, param="messages")


async def test_parts_of_text_are_one_text():
    endpoint = make_endpoint("a")
    await endpoint.chat({"role": "user", "content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]})
    assert "user\nabc<|im_end|>" in decode(endpoint.policy.tokenizer, endpoint.policy.requests[0].prompt_ids)


async def test_a_tokenizer_without_chat_template_can_only_complete():
    endpoint = make_endpoint("a", template=None)
    assert_refused(await endpoint.chat("x"), 400, code="no_chat_template")
    assert (await endpoint.complete("x"))["status"] == 200


async def test_another_model_is_not_found():
    assert_refused(await make_endpoint().complete("x", model="other"), 404, param="model", code="model_not_found")


async def test_logprobs_are_those_of_the_sampled_tokens():
    endpoint = make_endpoint("ab", "ab")
    chat = await endpoint.chat("x", logprobs=True)
    content = chat["choices"][0]["logprobs"]["content"]
    assert [(c["token"], c["logprob"]) for c in content] == [("a", -0.01), ("b", -0.02), (END, -0.03)]
    completion = await endpoint.complete("x", logprobs=0)
    logprobs = completion["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", END]
    assert logprobs["token_logprobs"] == [-0.01, -0.02, -0.03]
    assert logprobs["text_offset"] == [0, 1, 2]


async def test_token_ids_and_version_spans_come_with_every_choice():
    endpoint = make_endpoint("ab")
    answer = await endpoint.chat("x", return_token_ids=True, n=2)
    (request,) = endpoint.policy.requests
    assert answer["prompt_token_ids"] == list(request.prompt_ids)
    for choice in answer["choices"]:
        assert decode(endpoint.policy.tokenizer, choice["token_ids"]) == "ab" + END
        assert choice["weight_versions"] == [{"version": 3, "start": 0, "end": 1}, {"version": 4, "start": 1, "end": 3}]


async def test_a_stop_text_ends_the_text_and_stays_among_the_tokens():
    endpoint = make_endpoint("one END", "one END")
    answer = await endpoint.complete("x", stop="END", return_token_ids=True)
    assert answer["choices"][0]["text"] == "one "
    assert decode(endpoint.policy.tokenizer, answer["choices"][0]["token_ids"]) == "one END"


async def test_errors_of_the_policy_have_statuses_of_their_own():
    for error, status, code in [
        (RequestRejected("no"), 400, None),
        (GenerationFailed("no"), 500, "generation_failed"),
        (StationDied("gone"), 503, "policy_unavailable"),
    ]:
        endpoint = make_endpoint(error=error)
        assert_refused(await endpoint.complete("x"), status, code=code)
        assert_refused(await endpoint.complete("x", stream=True), status, code=code)
    endpoint = make_endpoint(outcome=Failure(reason="not_finite", message="nan"))
    assert_refused(await endpoint.complete("x"), 500, code="generation_failed")


async def test_a_request_past_its_deadline_is_aborted_and_answered_with_504():
    endpoint = make_endpoint("ab", "ab", waits=asyncio.Event(), timeout_s=0.05)
    assert_refused(await endpoint.complete("x"), 504, code="deadline_exceeded")
    events = await endpoint.complete("x", stream=True)  # the status was sent with the first token
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    assert endpoint.policy.aborted == [r.request_id for r in endpoint.policy.requests]
    assert endpoint.policy.timeouts[0] > 0.05  # the policy's own deadline does not come first


async def test_a_key_is_asked_of_everybody_but_health_checks():
    endpoint = make_endpoint("a", api_key="secret")
    assert_refused(await endpoint.complete("x"), 401, code="invalid_api_key")
    endpoint.client.headers["Authorization"] = "Bearer wrong"
    assert_refused(await endpoint.complete("x"), 401, code="invalid_api_key")
    assert (await endpoint.client.get("/v1/models")).status_code == 401
    assert (await endpoint.client.get("/health")).status_code == 200
    endpoint.client.headers["Authorization"] = "Bearer secret"
    assert (await endpoint.complete("x"))["status"] == 200


async def test_health_and_models_tell_what_is_served():
    endpoint = make_endpoint()
    assert (await endpoint.client.get("/health")).json() == {"status": "ok", "version": 3}
    (model,) = (await endpoint.client.get("/v1/models")).json()["data"]
    assert (model["id"], model["max_model_len"]) == ("policy", 4096)
    endpoint.policy.error = StationDied("gone")
    assert (await endpoint.client.get("/health")).status_code == 503


async def test_a_body_that_is_too_long_or_no_json_is_refused():
    endpoint = make_endpoint(max_body_bytes=100)
    for content, status in [(b"x" * 101, 413), (b"{", 400), (b"[1]", 400), (b"\xff", 400)]:
        answer = await endpoint.client.post("/v1/completions", content=content)
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert (await endpoint.client.get("/v1/nothing")).json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "message",
    [
        {"content": "\ud800"},
        {"role": "\udfff"},
        {"tool_calls": 5},
        {"tool_calls": [{"function": {"name": "\ud800"}}]},
    ],
)
async def test_what_no_tokenizer_and_no_template_can_take_is_an_error_of_the_request(message: dict):
    endpoint = make_endpoint("one")
    body = {"model": "policy", "messages": [{"role": "user", "content": "a", **message}]}
    answer = await endpoint.client.post("/v1/chat/completions", content=json.dumps(body))
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert not endpoint.policy.requests


async def test_a_character_written_as_two_halves_is_one():
    endpoint = make_endpoint("one")
    body = json.dumps({"model": "policy", "prompt": "🙂"})
    assert "\\ud83d\\ude42" in body
    assert (await endpoint.client.post("/v1/completions", content=body)).status_code == 200
    assert endpoint.policy.tokenizer.decode(endpoint.policy.requests[0].prompt_ids) == "🙂"


async def test_arguments_of_an_earlier_call_that_are_nested_too_deep_go_to_the_template_as_text():
    endpoint = make_endpoint("one", max_model_len=200_000)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
    assert (await endpoint.chat("a", {"role": "assistant", "tool_calls": [call]}))["status"] == 200


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "add", "arguments": {"a": NaN}}',
        '{"name": 5, "arguments": {}}',
        "[" * 100_000,
    ],
)
def test_a_call_that_could_not_be_sent_or_read_again_stays_text(call: str):
    text = f"<tool_call>{call}</tool_call>"
    assert parse_tool_calls(text) == (text, [])


async def test_options_of_the_template_are_passed_on_but_not_those_of_the_tokenizer():
    endpoint = make_endpoint("a", template="{{ messages[0].content }}{{ mood }}")
    assert (await endpoint.chat("x", chat_template_kwargs={"mood": "!"}))["status"] == 200
    assert decode(endpoint.policy.tokenizer, endpoint.policy.requests[0].prompt_ids) == "x!"
    for option in ("chat_template", "truncation", "tokenize"):
        assert_refused(await endpoint.chat("x", chat_template_kwargs={option: 1}), 400, param="chat_template_kwargs")


async def test_a_template_that_refuses_a_conversation_is_an_error_of_the_request():
    endpoint = make_endpoint(template="{{ raise_exception('no such role') }}")
    refused = await endpoint.chat("x")
    assert_refused(refused, 400, param="messages")
    assert "no such role" in refused["error"]["message"]
