"""The controller's side of the rewards: one handle, behind which the reward process may be replaced.

A reward is the user's code and may do anything to its process. When the process dies, does not answer, or has too
many threads that hang, a new one takes its place. The samples of a call without an answer are failures, and the
run goes on.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from forgelite.config import RewardConfig
from forgelite.errors import DeadlineExceeded, StationDied
from forgelite.observe.gates import within
from forgelite.scoring.coalesce import Coalescer
from forgelite.scoring.reward import PROCESS, RewardSample
from forgelite.scoring.reward_actor import ScoringReply
from forgelite.types import Failure, Score

logger = logging.getLogger(__name__)

MAX_REPLACEMENTS_IN_A_ROW = 3


def seconds_to_score(reward: RewardConfig, samples: int, calls: int) -> float:
    """How long a process may take for `samples` samples in `calls` calls when every reward uses up its deadline.

    The samples of all calls share the slots of a process (threads for sync rewards; an async one has
    `max_concurrency`, which is counted as threads too, to be on the safe side), and so do the rewards.
    """
    slots = min(reward.max_threads, reward.max_concurrency)
    rounds = math.ceil(samples / slots) + calls  # the shares of a call may not come out even
    return rounds * sum(f.timeout_s for f in reward.functions) + 10.0


class RewardProcess(Protocol):
    """A running reward process."""

    async def score(self, samples: Sequence[RewardSample]) -> ScoringReply:
        """Raises StationDied when the process is gone."""
        ...

    async def stop(self) -> None:
        """End the process, also one that hangs."""
        ...


class RewardClient:
    """Scores samples in the reward process; calls made at the same moment travel together."""

    def __init__(
        self,
        process: RewardProcess,
        *,
        replace: Callable[[], Awaitable[RewardProcess]],
        seconds_for: Callable[[int, int], float],
        max_hung_threads: int,
    ) -> None:
        """Args:
        process: the first process.
        replace: starts another one.
        seconds_for: how long a process may take that has (samples, calls) to answer; see `seconds_to_score`.
        max_hung_threads: hanging threads at which the process is replaced.
        """
        self._process = process
        self._replace = replace
        self._seconds_for = seconds_for
        self._open_samples = self._open_calls = 0  # asked for and not answered
        self._max_hung_threads = max_hung_threads
        self._replacing: asyncio.Lock = asyncio.Lock()
        self._replaced_in_a_row = 0
        self._coalescer = Coalescer(self._score, max_calls=8)

    async def score(self, samples: Sequence[RewardSample]) -> Sequence[Score | Failure]:
        """Score each sample. Raises StationDied when even new processes die."""
        return await self._coalescer.submit(samples)

    async def stop(self) -> None:
        """End the process."""
        await self._process.stop()

    async def _score(self, samples: Sequence[RewardSample]) -> Sequence[Score | Failure]:
        process = self._process
        self._open_samples += len(samples)
        self._open_calls += 1
        deadline = self._seconds_for(self._open_samples, self._open_calls)
        try:
            reply = await within(deadline, process.score(samples), "the reward process")
        except (StationDied, DeadlineExceeded) as error:
            await self._replace_process(process, str(error))
            return [Failure(reason=PROCESS, message=f"reward process: {error}")] * len(samples)
        finally:
            self._open_samples -= len(samples)
            self._open_calls -= 1
        self._replaced_in_a_row = 0
        if reply.hung_threads >= self._max_hung_threads:
            await self._replace_process(process, f"{reply.hung_threads} threads hang in rewards")
        return reply.results

    async def _replace_process(self, process: RewardProcess, reason: str) -> None:
        async with self._replacing:
            if self._process is not process:
                return  # another call has done it already
            self._replaced_in_a_row += 1
            if self._replaced_in_a_row > MAX_REPLACEMENTS_IN_A_ROW:
                raise StationDied(
                    f"the reward process was replaced {MAX_REPLACEMENTS_IN_A_ROW} times in a row: {reason}"
                )
            logger.warning("replacing the reward process: %s", reason)
            await process.stop()
            self._process = await self._replace()
