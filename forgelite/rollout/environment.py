"""What answers the policy: an environment per trajectory.

reset(prompt) ──observation──> policy ──completion──> step ──> observation, reward, done
                                 ^                       │
                                 └───── not done ────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from forgelite.rollout.tokenizer import Tokenizer
from forgelite.types import Completion, Prompt


@dataclass(kw_only=True, slots=True, frozen=True)
class Transition:
    """What an environment says to one completion.

    Example, a wrong guess: `Transition(observation=(9, 4, 4, 3), reward=None, done=False)`.
    """

    observation: Sequence[int] = ()  # token ids appended before the next turn; they are not trained
    reward: float | None = None  # of this turn; None: the environment gives none
    done: bool = True


class Environment(Protocol):
    """One episode. An exception ends this trajectory as failed, with its text; the others go on."""

    async def reset(self, prompt: Prompt) -> Sequence[int]:
        """Begin; return the token ids that the policy completes first."""
        ...

    async def step(self, completion: Completion) -> Transition:
        """Take what the policy wrote."""
        ...


EnvironmentFactory = Callable[[Tokenizer], Environment]


class SingleTurn:
    """The policy answers the prompt once. Rewards come from the scorers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        del tokenizer  # nothing is observed, so nothing is tokenized

    async def reset(self, prompt: Prompt) -> Sequence[int]:
        return prompt.token_ids

    async def step(self, completion: Completion) -> Transition:
        return Transition(done=True)
