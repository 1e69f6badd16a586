"""One prompt becomes a group of trajectories.

    first turn: one request for the whole group (the members share the prompt)
    later turns: each member on its own, with its whole sequence so far as the prompt, token by token as sampled

A member whose request or environment fails becomes a `Failure`; the others go on. The death of the policy is not a
failure of a member: it passes through.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol, TypeVar

from forgelite.errors import DeadlineExceeded, GenerationFailed, RequestRejected
from forgelite.observe.gates import within
from forgelite.rollout.environment import Environment, EnvironmentFactory, SingleTurn, Transition
from forgelite.rollout.tokenizer import Tokenizer
from forgelite.types import Completion, Failure, GroupRequest, Prompt, SamplingParams, Trajectory

T = TypeVar("T")


class Generator(Protocol):
    """What a rollout needs of the policy: `forgelite.policy.service.PolicyService`, or a fake."""

    async def generate_group(self, request: GroupRequest) -> list[Completion | Failure]:
        """Complete one prompt n times. Raises RequestRejected or GenerationFailed for the whole request."""
        ...


@dataclasses.dataclass(kw_only=True, slots=True, frozen=True)
class Rollout:
    """What the rollouts of a run have in common.

    Example: `Rollout(generator=policy, tokenizer=tokenizer, sampling=SamplingParams(max_tokens=64), seed=0)`.
    """

    generator: Generator
    tokenizer: Tokenizer
    sampling: SamplingParams  # its seed is replaced by one derived from `seed` and the group's id
    seed: int
    max_tokens: int  # longest sequence that can be trained, prompt and all turns
    environment: EnvironmentFactory = SingleTurn
    max_turns: int = 16
    timeout_s: float = 600.0

    async def run(self, group_id: str, prompt: Prompt, size: int) -> list[Trajectory | Failure]:
        """Roll out `size` members; entry i is the trajectory `<group_id>/<i>` or why there is none."""
        begun = await _typed(
            partial(self._begin, group_id, group_id, prompt, size),
            self.timeout_s,
            f"the first turn of group {group_id}",
        )
        if isinstance(begun, Failure):
            return [begun] * size
        return await asyncio.gather(
            *(self._later_turns(f"{group_id}/{i}", group_id, *member) for i, member in enumerate(begun))
        )

    async def run_member(self, group_id: str, prompt: Prompt, index: int) -> Trajectory | Failure:
        """Roll out the member `<group_id>/<index>` alone, by requests of its own.

        For groups that do not wait for their slowest members. The members of a group still find one another's prompt
        in the prefix cache. When the caller is cancelled, the requests are ended in the engine too.
        """
        name = f"{group_id}/{index}"
        begun = await _typed(
            partial(self._begin, name, group_id, prompt, 1), self.timeout_s, f"the first turn of {name}"
        )
        return begun if isinstance(begun, Failure) else await self._later_turns(name, group_id, *begun[0])

    async def _later_turns(
        self, trajectory_id: str, group_id: str, environment: Environment, first: Completion | Failure
    ) -> Trajectory | Failure:
        return await _typed(
            partial(self._continue, trajectory_id, group_id, environment, first),
            self.timeout_s,
            f"the later turns of {trajectory_id}",
        )

    async def _begin(
        self, request_id: str, group_id: str, prompt: Prompt, size: int
    ) -> list[tuple[Environment, Completion | Failure]]:
        """`size` environments, each with its first completion, by one request."""
        with _users_code():
            environments = [self.environment(self.tokenizer) for _ in range(size)]
            starts = await asyncio.gather(*(e.reset(prompt) for e in environments))
        budget = self.max_tokens - len(starts[0])
        if budget < 1:
            raise RequestRejected(
                f"group {group_id}: a prompt of {len(starts[0])} tokens leaves no room for an answer in "
                f"trainer.training.seq_len={self.max_tokens}"
            )
        request = GroupRequest(
            request_id=request_id,
            prompt_ids=tuple(starts[0]),
            sampling=self._sampling(request_id, budget),
            n=len(environments),
            session=group_id,
        )
        if any(tuple(s) != request.prompt_ids for s in starts):
            raise GenerationFailed(f"group {group_id}: the environment does not begin alike for every member")
        return list(zip(environments, await self.generator.generate_group(request), strict=True))

    async def _continue(
        self, trajectory_id: str, group_id: str, environment: Environment, first: Completion | Failure
    ) -> Trajectory | Failure:
        if isinstance(first, Failure):
            return first
        trajectory = _empty_trajectory(trajectory_id, group_id, first.prompt_ids)
        completion, texts = first, []
        for turn in range(1, self.max_turns + 1):
            if completion.finish_reason == "abort":
                return Failure(reason="aborted", message=f"{trajectory_id} was aborted in turn {turn}")
            if not completion.token_ids:
                return Failure(reason="empty", message=f"{trajectory_id}: turn {turn} has no tokens")
            _append_completion(trajectory, completion)
            texts.append(self.tokenizer.decode(completion.token_ids, skip_special_tokens=True))
            transition = await _step(environment, completion)
            _add_reward(trajectory, transition.reward)
            if transition.done or turn == self.max_turns:
                break
            budget = self.max_tokens - len(trajectory.token_ids) - len(transition.observation)
            if budget < 1:
                trajectory.finish_reason = "length"
                break
            _append_observation(trajectory, transition.observation)
            (following,) = await self.generator.generate_group(
                GroupRequest(
                    request_id=f"{trajectory_id}/{turn}",
                    prompt_ids=tuple(trajectory.token_ids),
                    sampling=self._sampling(f"{trajectory_id}/{turn}", budget),
                    session=group_id,
                )
            )
            if isinstance(following, Failure):
                return following
            completion = following
        trajectory.completion_text = "".join(texts)
        return trajectory

    def _sampling(self, name: str, budget: int) -> SamplingParams:
        return dataclasses.replace(
            self.sampling,
            max_tokens=min(self.sampling.max_tokens, budget),
            seed=derive_seed(self.seed, name),
        )


def derive_seed(seed: int, name: str) -> int:
    """A seed for one named thing of a run: a 31-bit number, the same in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest(), "big") >> 1


def _empty_trajectory(trajectory_id: str, group_id: str, prompt_ids: Sequence[int]) -> Trajectory:
    size = len(prompt_ids)
    return Trajectory(
        trajectory_id=trajectory_id,
        group_id=group_id,
        token_ids=list(prompt_ids),
        loss_mask=[False] * size,
        logprobs=[0.0] * size,
        spans=[],
        finish_reason="stop",
    )


def _append_completion(trajectory: Trajectory, completion: Completion) -> None:
    start = len(trajectory.token_ids)
    trajectory.token_ids += completion.token_ids
    trajectory.loss_mask += [True] * len(completion.token_ids)
    trajectory.logprobs += completion.logprobs
    trajectory.spans += [span.shifted(start) for span in completion.spans]
    trajectory.finish_reason = completion.finish_reason


def _add_reward(trajectory: Trajectory, reward: float | None) -> None:
    if reward is not None:
        trajectory.environment_reward = (trajectory.environment_reward or 0.0) + reward


def _append_observation(trajectory: Trajectory, observation: Sequence[int]) -> None:
    trajectory.token_ids += observation
    trajectory.loss_mask += [False] * len(observation)
    trajectory.logprobs += [0.0] * len(observation)


class _EnvironmentFailed(Exception):
    """The user's environment raised, or returned something that is no transition."""


@contextmanager
def _users_code() -> Iterator[None]:
    """Whatever an environment raises is its failure, also a cancellation that nobody asked this task for."""
    try:
        yield
    except asyncio.CancelledError:
        if asyncio.current_task().cancelling():
            raise
        raise _EnvironmentFailed("the environment cancelled itself") from None
    except Exception as error:
        raise _EnvironmentFailed(f"{type(error).__name__}: {error}") from error


async def _step(environment: Environment, completion: Completion) -> Transition:
    with _users_code():
        transition = await environment.step(completion)
    if not isinstance(transition, Transition):
        raise _EnvironmentFailed(f"step returned {type(transition).__name__}, not a Transition")
    return transition


async def _typed(work: Callable[[], Awaitable[T]], seconds: float, gate: str) -> T | Failure:
    """Await with a deadline; what goes wrong with this rollout alone is a Failure, what ends the run is raised.

    The work is made here and not by the caller: a coroutine handed to a task that is cancelled before its first step
    would never be awaited.
    """
    try:
        return await within(seconds, work(), f"{gate} (rollout.timeout_s)")
    except DeadlineExceeded as error:
        return Failure(reason="timeout", message=str(error))
    except RequestRejected as error:
        return Failure(reason="rejected", message=str(error))
    except GenerationFailed as error:
        return Failure(reason="generation", message=str(error))
    except _EnvironmentFailed as error:
        return Failure(reason="environment", message=str(error))
