"""Prompts become trajectories, over one turn and over several."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from forgelite.errors import GenerationFailed, RequestRejected
from forgelite.rollout.environment import SingleTurn, Transition
from forgelite.rollout.episode import Rollout, derive_seed
from forgelite.types import Completion, Failure, GroupRequest, Prompt, SamplingParams, Trajectory, VersionSpan
from tests.unit.fakes import CharTokenizer

PROMPT = Prompt(prompt_id="0", text="ab", token_ids=(7, 8))


class Script:
    """Answers every request with the same tokens; remembers what it was asked."""

    def __init__(self, tokens: Sequence[int] = (5, 6, 1), version: int = 3) -> None:
        self.tokens, self.version, self.requests = tokens, version, []

    async def generate_group(self, request: GroupRequest) -> list[Completion]:
        self.requests.append(request)
        tokens = list(self.tokens)[: request.sampling.max_tokens]
        return [
            Completion(
                request_id=f"{request.request_id}/{i}",
                prompt_ids=request.prompt_ids,
                token_ids=tokens,
                logprobs=[-0.5] * len(tokens),
                spans=[VersionSpan(version=self.version, start=0, end=len(tokens))] if tokens else [],
                finish_reason="stop",
            )
            for i in range(request.n)
        ]


class Countdown:
    """Observes (90, 91) after each turn and is done after the third."""

    def __init__(self, tokenizer: object) -> None:
        self.left = 3

    async def reset(self, prompt: Prompt) -> Sequence[int]:
        return prompt.token_ids

    async def step(self, completion: Completion) -> Transition:
        self.left -= 1
        return Transition(observation=(90, 91), reward=1.0, done=self.left == 0)


def make_rollout(generator, environment=SingleTurn, **options) -> Rollout:
    settings = {"sampling": SamplingParams(max_tokens=4), "seed": 0, "max_tokens": 64} | options
    return Rollout(generator=generator, tokenizer=CharTokenizer(), environment=environment, **settings)


async def test_a_group_is_one_request_and_each_member_a_trajectory():
    script = Script()
    members = await make_rollout(script).run("g0", PROMPT, 3)
    assert len(script.requests) == 1
    assert [m.trajectory_id for m in members] == ["g0/0", "g0/1", "g0/2"]
    assert members[0].token_ids == [7, 8, 5, 6, 1]
    assert members[0].loss_mask == [False, False, True, True, True]
    assert members[0].spans == [VersionSpan(version=3, start=2, end=5)]


async def test_turns_are_joined_token_by_token_and_observations_are_not_trained():
    script = Script()
    (trajectory,) = await make_rollout(script, Countdown).run("g0", PROMPT, 1)
    turn, observed = [5, 6, 1], [90, 91]
    assert trajectory.token_ids == [7, 8, *turn, *observed, *turn, *observed, *turn]
    assert [t for t, m in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if m] == turn * 3
    assert trajectory.environment_reward == 3.0
    assert [tuple(r.prompt_ids) for r in script.requests] == [
        (7, 8),
        (7, 8, *turn, *observed),
        (7, 8, *turn, *observed, *turn, *observed),
    ]
    assert [(s.start, s.end) for s in trajectory.spans] == [(2, 5), (7, 10), (12, 15)]


async def test_all_turns_of_a_group_share_a_session():
    script = Script()
    await make_rollout(script, Countdown).run("g0", PROMPT, 2)
    assert {r.session for r in script.requests} == {"g0"}


async def test_a_trajectory_never_outgrows_what_can_be_trained():
    script = Script()
    (trajectory,) = await make_rollout(script, Countdown, max_tokens=11).run("g0", PROMPT, 1)
    assert len(trajectory.token_ids) <= 11
    assert trajectory.finish_reason == "length"


async def test_a_prompt_without_room_for_an_answer_is_a_rejection_that_names_the_key():
    (failure,) = await make_rollout(Script(), max_tokens=2).run("g0", PROMPT, 1)
    assert failure.reason == "rejected"
    assert "trainer.training.seq_len=2" in failure.message


async def test_an_environment_that_raises_fails_its_own_trajectory_only():
    class Broken(Countdown):
        made = 0

        def __init__(self, tokenizer: object) -> None:
            super().__init__(tokenizer)
            Broken.made += 1
            self.number = Broken.made

        async def step(self, completion: Completion) -> Transition:
            if self.number == 2:
                raise RuntimeError("no such tool")
            return Transition(done=True)

    first, second = await make_rollout(Script(), Broken).run("g0", PROMPT, 2)
    assert isinstance(first, Trajectory)
    assert second == Failure(reason="environment", message="RuntimeError: no such tool")


@pytest.mark.parametrize("where", ["reset", "step"])
async def test_an_environment_that_cancels_itself_is_a_failure_and_its_group_ends(where):
    class Cancelling(Countdown):
        async def reset(self, prompt):
            return await (self.cancelled() if where == "reset" else super().reset(prompt))

        async def step(self, completion):
            return await (self.cancelled() if completion.request_id == "g0/0" else super().step(completion))

        async def cancelled(self):
            await asyncio.sleep(0)
            raise asyncio.CancelledError

    first, second = await make_rollout(Script(), Cancelling).run("g0", PROMPT, 2)
    assert (first.reason, first.message) == ("environment", "the environment cancelled itself")
    assert isinstance(second, Failure if where == "reset" else Trajectory)


async def test_an_environment_that_hangs_fails_its_own_trajectory_at_its_deadline():
    class Hangs(Countdown):
        made = 0

        def __init__(self, tokenizer: object) -> None:
            super().__init__(tokenizer)
            Hangs.made += 1
            self.number = Hangs.made

        async def step(self, completion: Completion) -> Transition:
            if self.number == 1:
                await asyncio.Event().wait()
            return Transition(done=True)

    first, second = await make_rollout(Script(), Hangs, timeout_s=0.2).run("g0", PROMPT, 2)
    assert first.reason == "timeout"
    assert "rollout.timeout_s" in first.message
    assert isinstance(second, Trajectory)


async def test_a_factory_that_raises_or_a_step_that_returns_nothing_is_a_failure_and_no_crash():
    class NoTransition(Countdown):
        async def step(self, completion: Completion):
            return None

    def broken(tokenizer: object):
        raise ValueError("no such level")

    (failure,) = await make_rollout(Script(), broken).run("g0", PROMPT, 1)
    assert failure == Failure(reason="environment", message="ValueError: no such level")
    (failure,) = await make_rollout(Script(), NoTransition).run("g0", PROMPT, 1)
    assert failure.message == "step returned NoneType, not a Transition"


async def test_what_the_policy_refuses_or_loses_is_a_typed_failure_of_every_member():
    class Refuses:
        async def generate_group(self, request: GroupRequest):
            raise RequestRejected("too long")

    class Loses:
        async def generate_group(self, request: GroupRequest):
            raise GenerationFailed("late")

    assert [m.reason for m in await make_rollout(Refuses()).run("g0", PROMPT, 2)] == ["rejected"] * 2
    assert [m.reason for m in await make_rollout(Loses()).run("g0", PROMPT, 2)] == ["generation"] * 2


async def test_an_empty_completion_is_a_failure():
    (failure,) = await make_rollout(Script(tokens=())).run("g0", PROMPT, 1)
    assert failure.reason == "empty"


def test_seeds_differ_by_name_and_repeat():
    assert derive_seed(0, "g1") == derive_seed(0, "g1")
    assert len({derive_seed(seed, f"g{i}") for seed in range(3) for i in range(100)}) == 300
    assert all(0 <= derive_seed(0, f"g{i}") < 2**31 for i in range(100))
