"""A rollout whose environment is an agent harness: a program that talks to the policy through its OpenAI endpoint.

    prompt ──> harness ──chat──> endpoint ──> policy
                  │                  │ records every turn, token by token
                  └──> reward        └──> trajectory

The harness is one async function of the user's, which runs in the controller's event loop. What it makes of the prompt,
which tools it calls and how many turns it takes are its own affair; what is trained is what the endpoint has recorded.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from forgelite.config import import_object
from forgelite.errors import ConfigError, DeadlineExceeded, ForgeliteError, StationDied
from forgelite.observe.gates import within
from forgelite.rollout.episode import derive_seed
from forgelite.types import Failure, Prompt, SamplingParams, Trajectory

logger = logging.getLogger(__name__)


class Harness(Protocol):
    """Plays one rollout. An exception fails this rollout alone, with its text.

    Example:

        async def harness(*, base_url, api_key, session_id, prompt):
            headers = {"X-Session-Id": session_id}
            async with AsyncOpenAI(base_url=base_url, api_key=api_key, default_headers=headers) as client:
                question = [{"role": "user", "content": prompt.text}]
                answer = await client.chat.completions.create(model="policy", messages=question)
            return float(answer.choices[0].message.content == prompt.row["answer"])
    """

    def __call__(self, *, base_url: str, api_key: str, session_id: str, prompt: Prompt) -> Awaitable[float | None]:
        """Play.

        Args:
            base_url: of the endpoint, for an OpenAI client.
            api_key: for it.
            session_id: to be sent as the header X-Session-Id with every request whose answer is to be trained.
            prompt: with its row of the dataset.

        Returns:
            The reward, for `RewardSample.environment_reward`; None: the harness gives none.
        """
        ...


class RecordedSession(Protocol):
    """A session of the endpoint while it is open."""

    died: StationDied | None  # the policy's death, if a request met it
    aborted: bool  # a request of it was ended from outside


class SessionRecorder(Protocol):
    """Where the endpoint records: `forgelite.policy.openai.recording.SessionRecorder`."""

    def open(
        self, session_id: str, *, sampling: SamplingParams | None = None, max_length: int | None = None
    ) -> RecordedSession:
        """Begin a session whose requests are sampled with `sampling`, prompt and answer within `max_length` tokens."""
        ...

    def branches(self, session_id: str, *, group_id: str) -> list[Trajectory]:
        """One trajectory for each branch of the session, trained wherever it was sampled."""
        ...

    def close(self, session_id: str) -> None:
        """Forget the session; later requests of it are refused."""
        ...


@dataclasses.dataclass(kw_only=True, slots=True, frozen=True)
class HarnessRollout:
    """What the rollouts of a run have in common; the counterpart of `episode.Rollout`.

    A harness that goes back and continues from an earlier turn, or a chat template that writes earlier turns anew,
    makes branches. A rollout is one trajectory, so the branch with the most sampled tokens is trained and the others
    are left out; a warning says so.

    Example: `HarnessRollout(harness=play, recorder=recorder, base_url="http://127.0.0.1:8000/v1", api_key="...",
    sampling=SamplingParams(max_tokens=64), seed=0, max_tokens=512)`.
    """

    harness: Harness
    recorder: SessionRecorder
    base_url: str
    api_key: str
    sampling: SamplingParams  # its seed is replaced by one derived from `seed` and the trajectory's id
    seed: int
    max_tokens: int  # longest sequence that can be trained, prompt and all turns
    timeout_s: float = 600.0  # of one rollout
    left_out: Counter[str] = dataclasses.field(default_factory=Counter)  # branches that were not trained, by kind

    async def run(self, group_id: str, prompt: Prompt, size: int) -> list[Trajectory | Failure]:
        """Roll out `size` members; entry i is the trajectory `<group_id>/<i>` or why there is none.

        Raises:
            StationDied: the policy is gone, which is not the failure of a member.
        """
        return await asyncio.gather(*(self._play(f"{group_id}/{i}", group_id, prompt) for i in range(size)))

    async def run_member(self, group_id: str, prompt: Prompt, index: int) -> Trajectory | Failure:
        """Roll out the member `<group_id>/<index>` alone. Raises what `run` raises."""
        return await self._play(f"{group_id}/{index}", group_id, prompt)

    async def _play(self, trajectory_id: str, group_id: str, prompt: Prompt) -> Trajectory | Failure:
        sampling = dataclasses.replace(self.sampling, seed=derive_seed(self.seed, trajectory_id))
        session = self.recorder.open(trajectory_id, sampling=sampling, max_length=self.max_tokens)
        try:
            gate = f"the harness to end rollout {trajectory_id} (rollout.timeout_s)"
            try:
                reward = await within(self.timeout_s, self._call(trajectory_id, prompt), gate)
            except (DeadlineExceeded, _HarnessFailed) as error:
                if session.died is not None:
                    raise session.died from error
                if session.aborted:
                    return _aborted(trajectory_id)
                reason = "timeout" if isinstance(error, DeadlineExceeded) else "harness"
                return Failure(reason=reason, message=str(error))
            if session.aborted:
                return _aborted(trajectory_id)
            try:
                branches = self.recorder.branches(trajectory_id, group_id=group_id)
            except ForgeliteError as error:  # the harness has deleted its own session
                return Failure(reason="harness", message=f"{trajectory_id}: {error}")
            return self._choose(branches, trajectory_id, reward)
        finally:
            self.recorder.close(trajectory_id)

    async def _call(self, trajectory_id: str, prompt: Prompt) -> float | None:
        """The harness's reward. Everything the user's code may do wrong comes out as _HarnessFailed."""
        try:
            reward: Any = await self.harness(
                base_url=self.base_url, api_key=self.api_key, session_id=trajectory_id, prompt=prompt
            )
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise _HarnessFailed(f"{trajectory_id}: the harness cancelled itself") from None
        except Exception as error:
            raise _HarnessFailed(f"{trajectory_id}: {type(error).__name__}: {error}") from error
        if reward is None:
            return None
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise _HarnessFailed(f"{trajectory_id}: the harness returned {reward!r}, not a finite number or None")
        return float(reward)

    def _choose(self, branches: list[Trajectory], trajectory_id: str, reward: float | None) -> Trajectory | Failure:
        sampled = [branch for branch in branches if any(branch.loss_mask)]
        if not sampled:
            return Failure(
                reason="empty",
                message=f"{trajectory_id}: nothing was sampled; does the harness send session_id as X-Session-Id?",
            )
        chosen = max(sampled, key=lambda branch: sum(branch.loss_mask))
        if len(sampled) > 1:
            self._note_left_out(trajectory_id, len(sampled) - 1)
        return dataclasses.replace(chosen, trajectory_id=trajectory_id, environment_reward=reward)

    def _note_left_out(self, trajectory_id: str, branches: int) -> None:
        self.left_out["rollouts"] += 1
        self.left_out["branches"] += branches
        if self.left_out["rollouts"].bit_count() == 1:  # the 1st, 2nd, 4th, 8th ...: a notice, not a flood
            logger.warning(
                "rollout %s has %d branches beside the one that is trained: the harness or the chat template changes "
                "earlier messages [so far: %d branches of %d rollouts]",
                *(trajectory_id, branches, self.left_out["branches"], self.left_out["rollouts"]),
            )


def _aborted(trajectory_id: str) -> Failure:
    return Failure(reason="aborted", message=f"{trajectory_id} was aborted")


class _HarnessFailed(Exception):
    """The user's harness raised, or returned something that is no reward."""


def load_harness(path: str, key: str) -> Callable[..., Awaitable[float | None]]:
    """The harness that a config names as `package.module:function`.

    Raises:
        ConfigError: there is none, it is not async, or it does not take the arguments of `Harness`.
    """
    harness = import_object(path, key)
    if not inspect.iscoroutinefunction(harness):
        raise ConfigError(f"{key}: {path} is not an async function")
    try:
        inspect.signature(harness).bind(base_url="", api_key="", session_id="", prompt=None)
    except TypeError as error:
        raise ConfigError(f"{key}: {path} must take base_url, api_key, session_id and prompt: {error}") from None
    return harness
