"""Rank 0 of a replica of several processes: every command goes to all ranks, in one order; the tokens are its own.

    EngineLoop ──► LockstepEngine ──┬──► engine of rank 0, in a thread of its own
                    waits for all   ├──► socket ──► Follower of rank 1 ──► its engine
                                    └──► socket ──► Follower of rank 2 ──► its engine

What can end in a collective (a step, a swap, the start) runs in the engine's thread, and whoever waits for it also
hears of a rank that has died or failed: the wait ends at once with that cause, though the call itself may never end.
The replica is then beyond repair and its processes are to be replaced, as after any other broken step.

With every step goes a checksum of the tokens of the step before. A rank that sampled others says so.

Knows neither vLLM nor torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forgelite.errors import DeadlineExceeded, StationDied, WeightError
from forgelite.policy.engine_protocol import Engine, Sampled
from forgelite.policy.engine_thread import EngineThread
from forgelite.policy.ranks import Followers, checksum
from forgelite.policy.tensor_parallel import Rendezvous
from forgelite.types import SamplingParams

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class LockstepEngine:
    """The `Engine` of a replica of several ranks. `lead` is the way to get one."""

    def __init__(self, followers: Followers, thread: EngineThread, engine: Engine) -> None:
        """Args:
        followers: the other ranks, with their engines built.
        thread: that `engine` was built in. On a GPU it holds the current device.
        engine: of rank 0.
        """
        self._followers = followers
        self._thread = thread
        self._engine = engine
        self._sampled_before: int | None = None
        self._updates = 0
        self.limits = engine.limits
        self.capabilities = engine.capabilities

    def add(
        self,
        sequence_ids: Iterable[str],
        prompt_ids: Iterable[int],
        sampling: SamplingParams,
        seeds: Iterable[int],
        cache_salt: str,
    ) -> None:
        """See `Engine.add`."""
        self._followers.check()
        arguments = (list(sequence_ids), list(prompt_ids), sampling, list(seeds), cache_salt)
        self._engine.add(*arguments)  # what this rank refuses, the others are not told of
        self._followers.tell("add", *arguments)

    def abort(self, sequence_ids: Iterable[str]) -> None:
        """See `Engine.abort`."""
        if self._followers.failure is not None:  # the engine may be inside a step for ever
            return
        ids = list(sequence_ids)
        self._engine.abort(ids)
        self._followers.tell("abort", ids)

    def step(self) -> Sequence[Sampled]:
        """One forward pass, on all ranks.

        Raises:
            StationDied: a rank is gone or has failed, or has sampled other tokens.
            DeadlineExceeded: the ranks did not end the step in time.
        """
        self._followers.tell("step", self._sampled_before)
        sampled = self._followers.together(self._thread, self._engine.step, what="a step")
        self._sampled_before = checksum(sampled)
        return sampled

    def queue_lengths(self) -> tuple[int, int]:
        """See `Engine.queue_lengths`."""
        return self._engine.queue_lengths()

    def prepare_followers(self, source: Any) -> None:
        """Have every other rank take its own lease of a version and prepare it, beside the steps.

        To be called before the update of this rank, and followed by `discard_prepared` whatever happens.

        Args:
            source: a manifest or a version number.

        Raises:
            WeightError: a rank could not; all ranks keep their old weights.
            DeadlineExceeded: a rank was not ready in time; all ranks keep their old weights.
            StationDied: a rank is gone.
        """
        self._updates += 1  # a late answer to the update before is none to this one
        self._followers.tell("prepare", self._updates, source)
        what = "the other ranks of the replica to prepare their weights"
        refusals = self._followers.answers(f"prepared {self._updates}", what, fatal=False)
        faults = [f"rank {index}: {refusal}" for index, refusal in sorted(refusals.items()) if refusal is not None]
        if faults:
            raise WeightError("; ".join(faults))

    def discard_prepared(self) -> None:
        """Have every other rank give the lease of the prepared version back. Never raises."""
        self._followers.tell("discard")

    def prepare_weights(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Prepare this rank; what is returned puts the prepared weights of all ranks in use. See `Engine`."""
        put_in_use = self._engine.prepare_weights(tensors)

        def on_all_ranks() -> None:
            self._followers.tell("swap")
            try:
                self._followers.together(self._thread, put_in_use, what="a swap of weights", answer="swapped")
            except WeightError as error:  # the old weights are whole, but on this rank only
                raise StationDied(f"rank 0 did not take the weights that the others have taken: {error}") from error

        return on_all_ranks

    def drop_kv(self) -> None:
        """See `Engine.drop_kv`."""
        self._followers.tell("drop_kv")
        self._engine.drop_kv()

    def close(self) -> None:
        """Free the engines of all ranks. After a failure the engine of this rank may still be inside a collective:
        it is left to end with its process, and the other ranks end theirs."""
        if self._followers.failure is None:
            self._followers.part()
            try:
                self._followers.together(self._thread, self._engine.close, what="the end of the engines")
            except (StationDied, DeadlineExceeded) as error:
                log.warning("the ranks of this replica did not end together: %s", error)
            self._thread.end()
        self._followers.close()


def lead(build: Callable[[], Engine], rendezvous: Rendezvous) -> LockstepEngine:
    """Build the engine of rank 0 together with the others.

    Args:
        build: makes the engine of this rank; ends when all ranks have met.
        rendezvous: the same on all ranks.

    Raises:
        ConfigError: of `build`, on this rank or another.
        StationDied, DeadlineExceeded: another rank did not start.
    """
    followers, thread = Followers(rendezvous), EngineThread("policy-rank-0")
    followers.wait_for_all()
    began = time.monotonic()
    engine = followers.together(thread, build, what="the start of the engines", answer="built")
    log.info("%d ranks built their engines in %.1f s", rendezvous.ranks, time.monotonic() - began)
    return LockstepEngine(followers, thread, engine)
