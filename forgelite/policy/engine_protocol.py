"""What the engine loop needs of an engine, and what it tells of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, get_args

from forgelite.policy.admission import Limits
from forgelite.types import SamplingParams

if TYPE_CHECKING:
    import torch


UpdateMode = Literal["in_flight", "drain", "abort"]  # what an update does to running sequences: see `updates.py`
UPDATE_MODES: tuple[UpdateMode, ...] = get_args(UpdateMode)
DRAIN_TIMEOUT_S = 300.0  # how long an update waits for running sequences unless told (policy.update.drain_timeout_s)

ENGINE_DEAD = "engine_dead"  # the reason of a failure that means: the engine serves nobody any more


class Sampled(NamedTuple):
    """What one step gave one sequence. A tuple, because there is one for every sequence and step."""

    sequence_id: str
    token_ids: list[int]  # [n], nearly always one
    logprobs: list[float]  # [n], of the distribution really sampled from
    finish_reason: str | None  # vLLM's word: stop, length, error, repetition; None: the sequence goes on


class Engine(Protocol):
    """An engine that samples one step at a time. All calls but `prepare_weights` come from one thread."""

    limits: Limits

    def add(
        self,
        sequence_ids: Iterable[str],
        prompt_ids: Iterable[int],
        sampling: SamplingParams,
        seeds: Iterable[int],
        cache_salt: str,
    ) -> None:
        """Queue one sequence per id, all with the same prompt.

        Args:
            sequence_ids: unique among the unfinished ones.
            prompt_ids: within `limits`.
            sampling: for all of them; its own seed is not looked at.
            seeds: one per sequence.
            cache_salt: sequences share cached prefixes only with those of the same salt.

        Raises:
            ValueError: the sampling parameters are refused; nothing was queued.
        """

    def abort(self, sequence_ids: Iterable[str]) -> None:
        """Drop sequences. Nothing more is emitted for them after this step; unknown ids are ignored."""

    def step(self) -> Sequence[Sampled]:
        """One forward pass over what is scheduled. Nothing is in flight when it returns."""

    def queue_lengths(self) -> tuple[int, int]:
        """How many sequences are being computed, and how many wait for a place."""

    def prepare_weights(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Do all of an update that can be done beside a step, in the caller's thread.

        Args:
            tensors: a complete set, by checkpoint name.

        Returns:
            What puts them in use, to be called between two steps. A WeightError of it means that the old weights
            are whole; after any other error the weights are undefined.

        Raises:
            WeightMismatch: the set does not fit; nothing was changed.
        """

    def drop_kv(self) -> None:
        """Forget every cached key and value; unfinished sequences are prefilled again from their tokens."""

    def close(self) -> None:
        """Free the engine."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineStats:
    """Counters since the start, and the state after the last step.

    Example: `EngineStats(version=3, alive_s=20.0, busy_s=12.5, steps=900, generated_tokens=40000,
    running=128, waiting=16, last_step_age_s=0.004)`: 62 % busy.
    """

    version: int
    alive_s: float
    busy_s: float  # all time but the waiting for a command
    steps: int
    generated_tokens: int
    running: int  # sequences
    waiting: int  # sequences
    last_step_age_s: float = 0.0  # since the engine's thread last got something done; 0 when it has nothing to do
    first_versions: Mapping[str, int] = field(default_factory=dict)  # by session: of its oldest running token


@dataclass(kw_only=True, slots=True, frozen=True)
class UpdateReport:
    """What an update cost.

    Example: `UpdateReport(version=4, mode="in_flight", queued_s=0.006, paused_s=0.002, recomputed=128)`.
    """

    version: int  # that the engine computes with now
    queued_s: float  # waited for the step in progress and, with mode "drain", for the running sequences to end
    paused_s: float  # no token was sampled in this time
    recomputed: int  # unfinished sequences that are prefilled again, because their KV cache was dropped
    mode: UpdateMode = "in_flight"
    held: int = 0  # requests that came while running ones were drained, and waited
