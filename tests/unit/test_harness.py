"""A rollout that is played by a harness: what it becomes, and what it becomes when the harness fails."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import httpx
import pytest

from forgelite.errors import ConfigError, StationDied
from forgelite.policy.openai.server import serve
from forgelite.rollout.harness import HarnessRollout, load_harness
from forgelite.types import Failure, Prompt, SamplingParams, Trajectory
from tests.unit.openai_fakes import FakeEndpoint, make_endpoint

PROMPT = Prompt(prompt_id="0", text="2 + 2?", token_ids=(1,))
SAMPLING = SamplingParams(max_tokens=16)


def make_rollout(endpoint: FakeEndpoint, harness: Any, **options: Any) -> HarnessRollout:
    async def played(*, base_url: str, api_key: str, session_id: str, prompt: Prompt) -> Any:
        return await harness(endpoint, session_id, prompt)

    settings = {"sampling": SAMPLING, "seed": 0, "max_tokens": 200} | options
    return HarnessRollout(harness=played, recorder=endpoint.recorder, base_url="", api_key="", **settings)


async def ask_once(endpoint: FakeEndpoint, session_id: str, prompt: Prompt) -> float:
    await endpoint.chat(prompt.text, session=session_id)
    return 0.5


async def test_every_member_is_a_session_and_becomes_a_trajectory_with_its_reward():
    endpoint = make_endpoint("four", "five", max_unopened=0)
    members = await make_rollout(endpoint, ask_once).run("g3", PROMPT, 2)
    assert [m.trajectory_id for m in members] == ["g3/0", "g3/1"]
    assert [m.completion_text for m in members] == ["four", "five"]
    assert {(m.group_id, m.environment_reward) for m in members} == {("g3", 0.5)}
    seeds = [r.sampling.seed for r in endpoint.policy.requests]
    assert len(set(seeds)) == 2
    assert None not in seeds
    assert (await endpoint.chat("a", session="g3/0"))["error"]["code"] == "no_session"  # it is freed


async def raises(endpoint: FakeEndpoint, session_id: str, prompt: Prompt) -> None:
    raise RuntimeError("the tool broke")


async def hangs(endpoint: FakeEndpoint, session_id: str, prompt: Prompt) -> None:
    await asyncio.Event().wait()


async def cancels_itself(endpoint: FakeEndpoint, session_id: str, prompt: Prompt) -> None:
    raise asyncio.CancelledError


async def says_nothing(endpoint: FakeEndpoint, session_id: str, prompt: Prompt) -> float:
    return 1.0


async def rewards_nan(endpoint: FakeEndpoint, session_id: str, prompt: Prompt) -> float:
    await ask_once(endpoint, session_id, prompt)
    return math.nan


async def deletes_its_session(endpoint: FakeEndpoint, session_id: str, prompt: Prompt) -> None:
    endpoint.recorder.close(session_id)


@pytest.mark.parametrize(
    ("harness", "reason", "message"),
    [
        (raises, "harness", "RuntimeError: the tool broke"),
        (hangs, "timeout", "rollout.timeout_s"),
        (cancels_itself, "harness", "cancelled itself"),
        (says_nothing, "empty", "X-Session-Id"),
        (rewards_nan, "harness", "nan"),
        (deletes_its_session, "harness", "there is no session"),
    ],
)
async def test_what_goes_wrong_in_a_harness_fails_its_rollout_alone(harness: Any, reason: str, message: str):
    endpoint = make_endpoint("four", max_unopened=0)
    (member,) = await make_rollout(endpoint, harness, timeout_s=0.1).run("g", PROMPT, 1)
    assert isinstance(member, Failure)
    assert member.reason == reason
    assert message in member.message
    endpoint.recorder.open("g/0")  # it is freed


async def test_a_harness_without_reward_leaves_it_to_the_scorers():
    async def no_reward(endpoint: FakeEndpoint, session_id: str, prompt: Prompt) -> None:
        await endpoint.chat(prompt.text, session=session_id)

    (member,) = await make_rollout(make_endpoint("four"), no_reward).run("g", PROMPT, 1)
    assert isinstance(member, Trajectory)
    assert member.environment_reward is None


async def test_a_rollout_that_was_aborted_gets_no_further_answers_and_is_not_trained():
    codes = []

    async def insists(endpoint: FakeEndpoint, session_id: str, prompt: Prompt) -> float:
        await endpoint.chat("a", session=session_id)
        codes.append((await endpoint.chat("b", session=session_id))["error"]["code"])
        return 1.0

    endpoint = make_endpoint("cut", finish="abort")
    (member,) = await make_rollout(endpoint, insists).run("g", PROMPT, 1)
    assert codes == ["aborted"]
    assert member.reason == "aborted"


async def test_a_harness_that_gives_up_because_its_rollout_was_aborted_has_not_failed():
    async def gives_up(endpoint: FakeEndpoint, session_id: str, prompt: Prompt) -> None:
        await endpoint.chat("a", session=session_id)
        raise RuntimeError("the answer is cut off")

    (member,) = await make_rollout(make_endpoint("cut", finish="abort"), gives_up).run("g", PROMPT, 1)
    assert member.reason == "aborted"


async def test_the_death_of_the_policy_is_no_failure_of_a_rollout():
    async def insists(endpoint: FakeEndpoint, session_id: str, prompt: Prompt) -> None:
        answer = await endpoint.chat(prompt.text, session=session_id)
        assert answer["status"] == 200, answer

    endpoint = make_endpoint(error=StationDied("the policy is gone"))
    with pytest.raises(StationDied, match="the policy is gone"):
        await make_rollout(endpoint, insists).run("g", PROMPT, 1)


async def test_of_several_branches_the_one_with_the_most_sampled_tokens_is_trained(caplog: pytest.LogCaptureFixture):
    async def asks_twice(endpoint: FakeEndpoint, session_id: str, prompt: Prompt) -> float:
        await endpoint.chat("a", session=session_id)
        await endpoint.chat("b", session=session_id)
        return 1.0

    rollout = make_rollout(make_endpoint("short", "the longer one"), asks_twice)
    (member,) = await rollout.run("g", PROMPT, 1)
    assert (member.trajectory_id, member.completion_text) == ("g/0", "the longer one")
    assert rollout.left_out == {"rollouts": 1, "branches": 1}
    assert "1 branches beside the one that is trained" in caplog.text


async def test_turns_that_branches_share_count_for_each_of_them_and_are_trained_with_the_chosen_one():
    async def goes_back(endpoint: FakeEndpoint, session_id: str, prompt: Prompt) -> float:
        first = (await endpoint.chat("a", session=session_id))["choices"][0]["message"]
        answer = {"role": "assistant", "content": first["content"]}
        await endpoint.chat("a", answer, "b", session=session_id)
        await endpoint.chat("a", answer, "c", session=session_id)
        return 1.0

    rollout = make_rollout(make_endpoint("shared turn", "x", "longer"), goes_back)
    (member,) = await rollout.run("g", PROMPT, 1)
    assert member.completion_text == "shared turnlonger"
    assert sum(member.loss_mask) == len("shared turn") + len("longer") + 2  # and the end of each turn


async def test_a_harness_that_fails_aborts_its_open_requests():
    endpoint = make_endpoint("four", waits=asyncio.Event())

    async def gives_up(*, base_url: str, api_key: str, session_id: str, prompt: Prompt) -> None:
        body = {"model": "policy", "messages": [{"role": "user", "content": prompt.text}]}
        headers = {"X-Session-Id": session_id}
        async with httpx.AsyncClient(headers=headers, timeout=30) as client, asyncio.TaskGroup() as tasks:
            tasks.create_task(client.post(f"{base_url}/v1/chat/completions", json=body))
            await endpoint.policy.asked.wait()
            raise RuntimeError("no patience")

    async with serve(endpoint.client._transport.app, host="127.0.0.1", port=0) as address:
        rollout = HarnessRollout(
            harness=gives_up,
            recorder=endpoint.recorder,
            base_url=address,
            api_key="",
            sampling=SAMPLING,
            seed=0,
            max_tokens=200,
        )
        (member,) = await rollout.run("g", PROMPT, 1)
        await asyncio.wait_for(endpoint.policy.was_aborted.wait(), 20)
    assert member.reason == "harness"
    assert endpoint.policy.aborted == ["g/0/0"]


def sync_harness(base_url: str, api_key: str, session_id: str, prompt: Prompt) -> float:
    return 0.0


async def other_arguments(url: str) -> float:
    return 0.0


def test_a_harness_is_checked_before_anything_starts():
    assert load_harness("tests.unit.test_harness:good_harness", "rollout.harness") is good_harness
    for name, message in [("sync_harness", "not an async function"), ("other_arguments", "must take base_url")]:
        with pytest.raises(ConfigError, match=message):
            load_harness(f"tests.unit.test_harness:{name}", "rollout.harness")


async def good_harness(*, base_url: str, api_key: str, session_id: str, prompt: Prompt) -> float:
    return 0.0
