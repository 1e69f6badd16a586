"""The policy as a Monarch actor: a thin shell around `EngineLoop`.

Every endpoint is concurrent, because one long plain endpoint would hold up all others. What blocks runs in a
thread: building the engine, the long poll, and the update, which waits for the engine's step in progress.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Literal, TypeVar

from monarch.actor import Actor, concurrent_endpoint, current_rank

from forgelite.errors import StationDied, WeightError
from forgelite.policy.engine_loop import EngineLoop
from forgelite.policy.engine_protocol import DRAIN_TIMEOUT_S, EngineStats, UpdateMode, UpdateReport
from forgelite.policy.follower import Follower, follow
from forgelite.policy.groups import GroupProgress, GroupResult
from forgelite.policy.leased_weights import LeasedWeights, WeightReader
from forgelite.policy.lockstep import LockstepEngine, lead
from forgelite.policy.stop_texts import StopTexts
from forgelite.policy.tensor_parallel import Rank, Rendezvous
from forgelite.policy.updates import unchanged
from forgelite.types import Failure, GroupRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")


class PolicyActor(Actor):
    """One engine in one process, or one rank of it. Its environment must be `policy_environment`.

    Where a replica has several ranks, `setup` is called on all of them and everything else on rank 0 only, whose
    engine leads the others (`lockstep`).
    """

    def __init__(self) -> None:
        self._claimed = False
        self._loop: EngineLoop | None = None
        self._lockstep: LockstepEngine | None = None  # rank 0 of several
        self._follower: Follower | None = None  # another rank
        self._reader: WeightReader | None = None
        self._in_place = False
        self._updating = asyncio.Lock()
        self._served = AsyncExitStack()  # holds the lease of the version that is served in place

    @concurrent_endpoint
    async def setup(
        self,
        model_path: str,
        engine: dict[str, Any],
        seed: int,
        version: int = 0,
        open_reader: Callable[[], WeightReader] | None = None,
        swap: Literal["copy", "zero_copy"] = "copy",
        tokenizer: str | None = None,
        rendezvous: Rendezvous | None = None,
    ) -> dict[str, Any]:
        """Import vLLM, build the engine and start its thread.

        Args:
            model_path: a Hugging Face folder.
            engine: vLLM's EngineArgs by name (`policy.engine.*`).
            seed: requests without a seed derive theirs from it.
            version: of the weights in the folder.
            open_reader: makes, in this process, the reader of published weights; None: they never change.
            swap: copy published weights, or serve them in place (`weights.swap`).
            tokenizer: folder of the tokenizer that finds stop texts; None: `model_path`.
            rendezvous: of the ranks of this replica (`policy.engine.tensor_parallel_size`); None: this process alone.

        Returns:
            The fields of `Capabilities`, by name.

        Raises:
            ConfigError: names the key that is wrong.
        """
        if self._claimed:
            raise RuntimeError("this process was set up already, and two engines never share one")
        self._claimed = True
        rank = None if rendezvous is None else Rank(index=current_rank().rank, rendezvous=rendezvous)
        build = partial(_build, model_path, engine, seed, swap, rank)
        self._in_place = swap == "zero_copy"
        self._reader = open_reader() if open_reader is not None else None
        if rank is not None and rank.index > 0:
            prepare = partial(
                LeasedWeights,
                reader=self._reader,
                events=asyncio.get_running_loop(),
                timeout_s=rank.rendezvous.call_timeout_s,
            )
            self._follower = await asyncio.to_thread(follow, build, rank, prepare=prepare, on_lost=_end_process)
            return dataclasses.asdict(self._follower.capabilities)
        if rank is None:
            built = await asyncio.to_thread(build)
        else:
            built = self._lockstep = await asyncio.to_thread(lead, build, rank.rendezvous)
        self._loop = EngineLoop(built, seed=seed, version=version, stop_texts=StopTexts(tokenizer or model_path))
        return dataclasses.asdict(built.capabilities)

    @concurrent_endpoint
    async def process_id(self) -> int:
        """For whoever must kill this process when it does not answer any more. Answers before `setup` too."""
        return os.getpid()

    @concurrent_endpoint
    async def submit(self, requests: list[GroupRequest]) -> list[Failure | None]:
        """Hand requests to the engine; for each, None or why it was refused."""
        loop = self._running()
        if any(request.sampling.stop for request in requests):  # the first one loads the tokenizer
            return await asyncio.to_thread(loop.submit, requests)
        return loop.submit(requests)

    @concurrent_endpoint
    async def collect(self, timeout_s: float) -> list[GroupResult | GroupProgress]:
        """Wait until a request is finished or has something to report, and return all that there is.

        Empty at the timeout. The reports of a request are in order and come before its result.

        There is one caller: what it has been given is gone from here.
        """
        loop = self._running()
        return await asyncio.to_thread(loop.collect, timeout_s)

    @concurrent_endpoint
    async def abort(self, request_ids: list[str]) -> None:
        """End requests at the next step boundary; each still has its result."""
        self._running().abort(request_ids)

    @concurrent_endpoint
    async def update_weights(
        self,
        version: int,
        manifest: Any,
        mode: UpdateMode = "in_flight",
        keep_kv: bool = False,
        drain_timeout_s: float = DRAIN_TIMEOUT_S,
    ) -> UpdateReport:
        """Take a published version between two steps, and return when it is in use.

        The lease is taken, the fingerprint compared and the update prepared while the engine still samples. The
        lease is held until the weights are copied, or, where they are served in place, until the next version is
        served.

        Args:
            version: of the new weights.
            manifest: of that version, which saves the reader the way to the directory; None: the reader finds
                it.
            mode, keep_kv, drain_timeout_s: see `EngineLoop.update`.

        Raises:
            WeightError: they could not be had or do not fit; the old ones stay in use.
            DeadlineExceeded: running sequences did not end in time (drain); the old ones stay in use.
            StationDied: the engine is broken.
        """
        loop = self._running()
        if self._reader is None:
            raise WeightError("this policy was set up without a reader of published weights")
        if manifest is not None and manifest.version != version:
            raise WeightError(f"asked for version {version} with the manifest of {manifest.version}")
        async with self._updating, AsyncExitStack() as leases:
            if loop.holds(version):  # what is served in place keeps the lease that it has
                return unchanged(version, mode)
            source = version if manifest is None else manifest
            if self._lockstep is not None:
                leases.callback(self._lockstep.discard_prepared)
                await asyncio.to_thread(self._lockstep.prepare_followers, source)
            tensors = await leases.enter_async_context(self._reader.lease(source))
            report = await asyncio.to_thread(
                loop.update, version, lambda: tensors, mode=mode, keep_kv=keep_kv, drain_timeout_s=drain_timeout_s
            )
            if self._in_place:
                before, self._served = self._served, leases.pop_all()
                await before.aclose()
            return report

    @concurrent_endpoint
    async def stats(self) -> EngineStats:
        """What the engine has done so far."""
        return self._running().stats()

    @concurrent_endpoint
    async def version(self) -> int:
        """The version of the weights that the next token will be computed with."""
        return self._running().version

    @concurrent_endpoint
    async def close(self) -> None:
        """Abort what is running and free the engine. Safe to call again, and before `setup`."""
        if self._loop is not None:
            await asyncio.to_thread(self._loop.close)
        await self._served.aclose()
        if self._reader is not None:
            self._reader.close()

    def _running(self) -> EngineLoop:
        if self._loop is None:
            raise StationDied("the policy has no engine yet: call setup first")
        return self._loop


class ActorCalls:
    """The calls of a `PolicyClient` to an actor mesh of one policy."""

    def __init__(self, actor: Any, answer: Callable[[Awaitable[T]], Awaitable[T]]) -> None:
        """Wrap a handle.

        Args:
            actor: an actor mesh with one `PolicyActor`.
            answer: awaits a call and gives Monarch's errors back as forgelite's: the death of the process as
                StationDied, an exception of the actor as itself.
        """
        self._actor = actor
        self._answer = answer

    async def submit(self, requests: Sequence[GroupRequest]) -> Sequence[Failure | None]:
        return await self._answer(self._actor.submit.call_one(list(requests)))

    async def collect(self, timeout_s: float) -> list[GroupResult | GroupProgress]:
        return await self._answer(self._actor.collect.call_one(timeout_s))

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._answer(self._actor.abort.call_one(list(request_ids)))

    async def update_weights(
        self, version: int, manifest: Any, mode: UpdateMode, keep_kv: bool, drain_timeout_s: float
    ) -> UpdateReport:
        call = self._actor.update_weights.call_one(version, manifest, mode, keep_kv, drain_timeout_s)
        return await self._answer(call)

    async def stats(self) -> EngineStats:
        return await self._answer(self._actor.stats.call_one())

    async def version(self) -> int:
        return await self._answer(self._actor.version.call_one())


def _build(
    model_path: str, engine: dict[str, Any], seed: int, swap: Literal["copy", "zero_copy"], rank: Rank | None
) -> Any:
    # While vLLM is imported it logs before it has read its own log level (VLLM_LOGGING_LEVEL).
    logging.getLogger("vllm").setLevel(logging.ERROR)
    from forgelite.policy.engine import build_engine  # imports torch and vLLM: many seconds

    return build_engine(model_path, engine=engine, seed=seed, swap=swap, rank=rank)


def _end_process(cause: str) -> None:
    """A rank without rank 0: its engine may be inside a collective for ever, so that nothing milder ends it."""
    logger.error("%s; this process ends", cause)
    os._exit(1)
