"""Sessions: what the next prompt holds, and what is trained of it."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgelite.errors import ForgeliteError
from forgelite.policy.openai.generation import stream
from forgelite.policy.openai.jobs import plan_job
from forgelite.policy.openai.recording import SessionRecorder, Turn, plan_completion
from forgelite.policy.openai.requests import ChatBody, parse_body
from forgelite.types import Completion, SamplingParams, VersionSpan
from tests.unit.openai_fakes import END, FORGETFUL_TEMPLATE, FakeEndpoint, decode, make_endpoint

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name":"add",  "arguments": {"a": 1}}</tool_call>'  # not as the template would write it


def said(answer: dict[str, Any]) -> dict[str, Any]:
    """The message of an answer, with the empty fields that clients add."""
    return {**answer["choices"][0]["message"], "refusal": None, "annotations": []}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def trained_text(endpoint: FakeEndpoint, trajectory: Any) -> str:
    ids = [i for i, trained in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if trained]
    return decode(endpoint.policy.tokenizer, ids)


async def test_the_next_prompt_is_the_last_one_and_what_was_sampled_and_what_is_new():
    endpoint = make_endpoint("one", "two")
    first = await endpoint.chat("a", session="s")
    await endpoint.chat("a", said(first), "b", session="s")
    before, after = endpoint.policy.requests
    sampled = endpoint.recorder.find("s").turns[0].completion.token_ids
    size = len(before.prompt_ids) + len(sampled)
    assert after.prompt_ids[:size] == (*before.prompt_ids, *sampled)
    new = decode(endpoint.policy.tokenizer, after.prompt_ids[size:])
    assert new == "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"


async def test_a_session_is_one_trajectory_that_is_trained_where_it_was_sampled():
    endpoint = make_endpoint("one", "two")
    first = await endpoint.chat("a", session="s")
    await endpoint.chat("a", said(first), "b", session="s")
    (trajectory,) = endpoint.recorder.trajectories("s", group_id="g")
    assert (trajectory.trajectory_id, trajectory.group_id) == ("s", "g")
    assert trained_text(endpoint, trajectory) == f"one{END}two{END}"
    assert trajectory.completion_text == "onetwo"
    assert [p for p, m in zip(trajectory.logprobs, trajectory.loss_mask, strict=True) if m] == [
        *(-0.01, -0.02, -0.03, -0.04) * 2
    ]
    assert {p for p, m in zip(trajectory.logprobs, trajectory.loss_mask, strict=True) if not m} == {0.0}
    start = trajectory.loss_mask.index(True)
    assert trajectory.spans[:2] == [
        VersionSpan(version=3, start=start, end=start + 1),
        VersionSpan(version=4, start=start + 1, end=start + 4),
    ]
    assert trajectory.spans[-1].end == len(trajectory.token_ids)
    assert trajectory.oldest_trained_version() == 3


async def test_what_was_sampled_is_kept_verbatim_where_the_template_would_write_it_otherwise():
    endpoint = make_endpoint(CALL, "done")
    first = await endpoint.chat("a", session="s", tools=TOOLS)
    assert first["choices"][0]["finish_reason"] == "tool_calls"
    (call,) = first["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
    await endpoint.chat("a", said(first), result, session="s", tools=TOOLS)
    prompt = decode(endpoint.policy.tokenizer, endpoint.policy.requests[1].prompt_ids)
    assert CALL in prompt
    assert prompt.endswith(f"{END}\n<|im_start|>user\n<tool_response>2</tool_response>{END}\n<|im_start|>assistant\n")
    (trajectory,) = endpoint.recorder.trajectories("s", group_id="g")
    assert trained_text(endpoint, trajectory) == f"{CALL}{END}done{END}"


async def test_arguments_may_come_back_written_in_another_way():
    endpoint = make_endpoint(CALL, "done")
    first = said(await endpoint.chat("a", session="s", tools=TOOLS))
    first["tool_calls"][0]["function"]["arguments"] = '{ "a":1 }'
    await endpoint.chat("a", first, {"role": "tool", "content": "2"}, session="s", tools=TOOLS)
    assert len(endpoint.recorder.trajectories("s", group_id="g")) == 1


async def test_an_answer_without_tools_is_passed_through_as_text():
    endpoint = make_endpoint(CALL, '<tool_call>{"name": </tool_call>')
    assert (await endpoint.chat("a"))["choices"][0]["message"]["content"] == CALL
    broken = await endpoint.chat("a", tools=TOOLS)
    assert broken["choices"][0]["message"] == {"role": "assistant", "content": '<tool_call>{"name": </tool_call>'}
    assert broken["choices"][0]["finish_reason"] == "stop"


async def test_an_answer_cut_off_by_its_length_is_closed_without_training_the_end():
    endpoint = make_endpoint("a long answer", "two")
    first = await endpoint.chat("a", session="s", max_tokens=4)
    assert first["choices"][0]["finish_reason"] == "length"
    await endpoint.chat("a", said(first), "b", session="s")
    prompt = decode(endpoint.policy.tokenizer, endpoint.policy.requests[1].prompt_ids)
    assert f"a lo{END}\n<|im_start|>user\nb" in prompt
    (trajectory,) = endpoint.recorder.trajectories("s", group_id="g")
    assert trained_text(endpoint, trajectory) == f"a lotwo{END}"


async def test_a_changed_message_begins_a_branch_and_no_token_is_trained_twice():
    endpoint = make_endpoint("one", "two", "three", "four")
    one = said(await endpoint.chat("a", session="s"))
    two = said(await endpoint.chat("a", one, "b", session="s"))
    await endpoint.chat("a", one, "b", two, "c", session="s")
    await endpoint.chat("a", one, "B", session="s")  # goes back to the first answer
    first, second = endpoint.recorder.trajectories("s", group_id="g")
    assert trained_text(endpoint, first) == f"one{END}two{END}three{END}"
    assert trained_text(endpoint, second) == f"four{END}"
    assert second.trajectory_id == "s/branch1"
    shared = len(endpoint.policy.requests[0].prompt_ids) + 4
    assert first.token_ids[:shared] == second.token_ids[:shared]
    assert first.logprobs[:shared] == second.logprobs[:shared]


async def test_a_changed_answer_is_a_message_of_the_client_and_is_not_trained():
    endpoint = make_endpoint("one", "two")
    await endpoint.chat("a", session="s")
    await endpoint.chat("a", {"role": "assistant", "content": "ONE"}, "b", session="s")
    _, second = endpoint.recorder.trajectories("s", group_id="g")
    assert trained_text(endpoint, second) == f"two{END}"


async def test_other_tools_begin_a_branch():
    endpoint = make_endpoint("one", "two")
    one = said(await endpoint.chat("a", session="s", tools=TOOLS))
    await endpoint.chat("a", one, "b", session="s")
    assert len(endpoint.recorder.trajectories("s", group_id="g")) == 2


async def test_other_options_of_the_template_begin_a_branch():
    endpoint = make_endpoint("one", "two")
    one = said(await endpoint.chat("a", session="s"))
    await endpoint.chat("a", one, "b", session="s", chat_template_kwargs={"thinking": False})
    assert len(endpoint.recorder.trajectories("s", group_id="g")) == 2


async def test_a_template_that_rewrites_earlier_answers_begins_a_branch():
    endpoint = make_endpoint("hm</think>one", "ha</think>two", template=FORGETFUL_TEMPLATE)
    one = said(await endpoint.chat("a", session="s"))
    await endpoint.chat("a", one, "b", session="s")
    prompt = decode(endpoint.policy.tokenizer, endpoint.policy.requests[1].prompt_ids)
    assert "hm</think>" not in prompt
    assert "one" in prompt
    first, second = endpoint.recorder.trajectories("s", group_id="g")
    assert trained_text(endpoint, first) == f"hm</think>one{END}"
    assert trained_text(endpoint, second) == f"ha</think>two{END}"


async def test_several_answers_to_one_prompt_are_branches():
    endpoint = make_endpoint("one", "two")
    await endpoint.chat("a", session="s", n=2)
    first, second = endpoint.recorder.trajectories("s", group_id="g")
    assert trained_text(endpoint, first) == trained_text(endpoint, second) == f"one{END}"


async def test_a_streamed_answer_is_recorded_like_a_whole_one():
    whole, streamed = make_endpoint(CALL, "two"), make_endpoint(CALL, "two")
    one = said(await whole.chat("a", session="s", tools=TOOLS))
    await streamed.chat("a", session="s", tools=TOOLS, stream=True)
    for endpoint in (whole, streamed):
        await endpoint.chat("a", one, {"role": "tool", "content": "2"}, session="s", tools=TOOLS)
    assert whole.recorder.trajectories("s", group_id="g") == streamed.recorder.trajectories("s", group_id="g")


async def test_completions_go_on_from_the_tokens_they_begin_with():
    endpoint = make_endpoint("one", "two", "three")
    first = await endpoint.complete([5, 6], session="s", return_token_ids=True)
    sampled = first["choices"][0]["token_ids"]
    await endpoint.complete([5, 6, *sampled, 7], session="s")
    await endpoint.complete([5, 9], session="s")
    first, second = endpoint.recorder.trajectories("s", group_id="g")
    assert trained_text(endpoint, first) == f"one{END}two{END}"
    assert trained_text(endpoint, second) == f"three{END}"


async def test_a_prompt_goes_on_from_the_longest_turn_that_it_begins_with():
    endpoint = make_endpoint("one", "two", "one", "three")
    end = endpoint.policy.tokenizer.eos_token_id
    one, two = ([*endpoint.policy.tokenizer.encode(text), end] for text in ("one", "two"))
    for prompt in ([5], [5, *one, 7], [5], [5, *one, 7, *two, 8]):
        await endpoint.complete(prompt, session="s")
    again, longest = endpoint.recorder.trajectories("s", group_id="g")
    assert trained_text(endpoint, again) == f"one{END}"
    assert trained_text(endpoint, longest) == f"one{END}two{END}three{END}"


async def test_all_answers_of_a_stream_are_recorded_also_when_the_client_goes_after_the_first():
    endpoint = make_endpoint("one")
    body = {"model": "policy", "messages": [{"role": "user", "content": "a"}], "n": 3, "stream": True}
    job = await plan_job(endpoint.backend, parse_body(ChatBody, body), session_id="s", new_request_id=lambda: "unused")
    async with aclosing(stream(endpoint.backend, job)) as pieces:
        async for piece in pieces:
            if piece.completion is not None:
                break
    assert len(endpoint.recorder.trajectories("s", group_id="g")) == 3


async def test_requests_are_named_after_their_session_and_routed_by_it():
    endpoint = make_endpoint("one", "two", "three")
    await endpoint.chat("a", session="g1/0")
    await endpoint.chat("b", session="g1/0")
    await endpoint.chat("c")
    assert [(r.request_id, r.session) for r in endpoint.policy.requests] == [
        ("g1/0/0", "g1/0"),
        ("g1/0/1", "g1/0"),
        ("openai0", None),
    ]


async def test_the_sampling_of_a_rollout_holds_whatever_the_request_says():
    endpoint = make_endpoint("one", "two")
    endpoint.recorder.open("s", sampling=SamplingParams(max_tokens=9, temperature=0.8, seed=4), max_length=100)
    refused = await endpoint.chat("a", session="s", temperature=0.2)
    assert (refused["status"], refused["error"]["param"]) == (400, "temperature")
    assert (await endpoint.chat("a", session="s", seed=1))["error"]["param"] == "seed"
    await endpoint.chat("a", session="s", temperature=0.8, max_tokens=50, stop="x")
    await endpoint.complete([1] * 95, session="s")
    first, second = (r.sampling for r in endpoint.policy.requests)
    assert (first.temperature, first.max_tokens, first.stop) == (0.8, 9, ("x",))
    assert second.max_tokens == 5  # what max_length leaves
    assert first.seed not in (None, 4, second.seed)
    too_long = await endpoint.complete([1] * 100, session="s")
    assert too_long["error"]["code"] == "context_length_exceeded"


async def test_an_evaluation_is_greedy_for_a_harness_that_names_the_temperature_it_trains_at():
    endpoint = make_endpoint("one")
    endpoint.recorder.open("s", sampling=SamplingParams(max_tokens=9, temperature=0.0))
    assert (await endpoint.chat("a", session="s", temperature=1.0))["status"] == 200
    assert endpoint.policy.requests[0].sampling.temperature == 0.0
    assert (await endpoint.chat("a", session="s", top_p=0.5))["error"]["param"] == "top_p"


async def test_equal_rollouts_are_sampled_with_equal_seeds():
    seeds = []
    for _ in range(2):
        endpoint = make_endpoint("one", "two")
        endpoint.recorder.open("s", sampling=SamplingParams(max_tokens=9, seed=4))
        await endpoint.chat("a", session="s")
        await endpoint.chat("a", session="s")
        seeds.append([r.sampling.seed for r in endpoint.policy.requests])
    assert seeds[0] == seeds[1]


async def test_a_session_that_ended_or_never_began_is_refused():
    endpoint = make_endpoint("one", max_unopened=0)
    endpoint.recorder.open("s")
    with pytest.raises(ForgeliteError, match="open already"):
        endpoint.recorder.open("s")
    assert (await endpoint.chat("a", session="s"))["status"] == 200
    endpoint.recorder.close("s")
    for session in ("s", "unknown"):
        refused = await endpoint.chat("a", session=session)
        assert (refused["status"], refused["error"]["code"]) == (404, "no_session")


async def test_sessions_that_nobody_opened_are_dropped_when_there_are_too_many():
    endpoint = make_endpoint("one", "two", "three", "four", max_unopened=2)
    endpoint.recorder.open("kept")
    for session in ("a", "b", "a", "c"):
        await endpoint.chat("x", session=session)
    for session, there in [("a", True), ("b", False), ("c", True), ("kept", True)]:
        assert ((await endpoint.client.get(f"/v1/sessions/{session}")).status_code == 200) == there


async def test_a_recorded_session_can_be_read_and_deleted_over_http():
    endpoint = make_endpoint("one")
    await endpoint.chat("a", session="g/0")
    read = (await endpoint.client.get("/v1/sessions/g/0")).json()
    (trajectory,) = read["trajectories"]
    (recorded,) = endpoint.recorder.trajectories("g/0", group_id="g/0")
    assert trajectory["token_ids"] == recorded.token_ids
    assert trajectory["loss_mask"] == recorded.loss_mask
    assert (await endpoint.client.delete("/v1/sessions/g/0")).status_code == 200
    assert (await endpoint.client.get("/v1/sessions/g/0")).status_code == 404


@given(steps=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=12))
def test_whatever_the_branches_every_sampled_token_is_trained_exactly_once(steps: list[tuple[int, int, int]]):
    recorder = SessionRecorder()
    session = recorder.open("s")
    token = iter(range(10**6))  # every token is another one, so that it can be told where it came from
    for parent, new, sampled in steps:
        recorded: list[int] = []
        if parent < len(session.turns):
            completion = session.turns[parent].completion
            recorded = [*completion.prompt_ids, *completion.token_ids]
        planned = plan_completion(session, [*recorded, *(next(token) for _ in range(new))])
        assert planned.parent is (session.turns[parent] if recorded else None)
        completion = Completion(
            request_id="r",
            prompt_ids=planned.prompt_ids,
            token_ids=[next(token) for _ in range(sampled)],
            logprobs=[-1.0] * sampled,
            spans=[VersionSpan(version=len(session.turns), start=0, end=sampled)],
            finish_reason="stop",
        )
        session.turns.append(Turn(completion=completion, text="", conversation=None, parent=planned.parent))
    trajectories = recorder.trajectories("s", group_id="g")
    trained = [i for t in trajectories for i, m in zip(t.token_ids, t.loss_mask, strict=True) if m]
    assert sorted(trained) == sorted(i for turn in session.turns for i in turn.completion.token_ids)
    for trajectory in trajectories:
        covered = [at for span in trajectory.spans for at in range(span.start, span.end)]
        assert [i for i, p in enumerate(trajectory.logprobs) if p != 0.0] == covered
        assert set(covered) >= {i for i, m in enumerate(trajectory.loss_mask) if m}
