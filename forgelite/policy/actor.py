"""The policy as a Monarch actor: a thin shell around `EngineLoop`.

Every endpoint is concurrent, because one long plain endpoint would hold up all others. What blocks runs in a
thread: building the engine, the long poll, and the update, which waits for the engine's step in progress.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from monarch.actor import Actor, concurrent_endpoint

from forgelite.errors import StationDied, WeightError
from forgelite.policy.engine_loop import EngineLoop
from forgelite.policy.engine_protocol import EngineStats, UpdateReport
from forgelite.policy.groups import GroupResult
from forgelite.types import Failure, GroupRequest

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class WeightReader(Protocol):
    """Where published weights are read; `forgelite.weights.WeightStore` is one."""

    def lease(self, version: Any) -> AbstractAsyncContextManager[Mapping[str, torch.Tensor]]:
        """Read-only CPU views of exactly that version, by checkpoint name, valid inside the block.

        Args:
            version: its number, or its manifest, with which the views are then compared.
        """

    def close(self) -> None:
        """Let go of what is being read."""


class PolicyActor(Actor):
    """One engine in one process. Its environment must be `policy_environment`."""

    def __init__(self) -> None:
        self._claimed = False
        self._loop: EngineLoop | None = None
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
    ) -> dict[str, Any]:
        """Import vLLM, build the engine and start its thread.

        Args:
            model_path: a Hugging Face folder.
            engine: vLLM's EngineArgs by name (`policy.engine.*`).
            seed: requests without a seed derive theirs from it.
            version: of the weights in the folder.
            open_reader: makes, in this process, the reader of published weights; None: they never change.
            swap: copy published weights, or serve them in place (`weights.swap`).

        Returns:
            The fields of `Capabilities`, by name.

        Raises:
            ConfigError: names the key that is wrong.
        """
        if self._claimed:
            raise RuntimeError("this process was set up already, and two engines never share one")
        self._claimed = True
        built = await asyncio.to_thread(_build, model_path, engine, seed, swap)
        self._in_place = swap == "zero_copy"
        self._reader = open_reader() if open_reader is not None else None
        self._loop = EngineLoop(built, seed=seed, version=version)
        return dataclasses.asdict(built.capabilities)

    @concurrent_endpoint
    async def submit(self, requests: list[GroupRequest]) -> list[Failure | None]:
        """Hand requests to the engine; for each, None or why it was refused."""
        return self._running().submit(requests)

    @concurrent_endpoint
    async def collect(self, timeout_s: float) -> list[GroupResult]:
        """Wait until at least one request is finished, and return all that are; none at the timeout.

        There is one caller: what it has been given is gone from here.
        """
        loop = self._running()
        return await asyncio.to_thread(loop.collect, timeout_s)

    @concurrent_endpoint
    async def abort(self, request_ids: list[str]) -> None:
        """End requests at the next step boundary; each still has its result."""
        self._running().abort(request_ids)

    @concurrent_endpoint
    async def update_weights(self, version: int, manifest: Any, keep_kv: bool = False) -> UpdateReport:
        """Take a published version between two steps, and return when it is in use.

        The lease is taken, the fingerprint compared and the update prepared while the engine still samples. The
        lease is held until the weights are copied, or, where they are served in place, until the next version is
        served.

        Args:
            version: of the new weights.
            manifest: of that version, which saves the reader the way to the directory; None: the reader finds
                it.
            keep_kv: see `EngineLoop.update`.

        Raises:
            WeightError: they could not be had or do not fit; the old ones stay in use.
            StationDied: the engine is broken.
        """
        loop = self._running()
        if self._reader is None:
            raise WeightError("this policy was set up without a reader of published weights")
        if manifest is not None and manifest.version != version:
            raise WeightError(f"asked for version {version} with the manifest of {manifest.version}")
        async with self._updating, AsyncExitStack() as leases:
            tensors = await leases.enter_async_context(self._reader.lease(version if manifest is None else manifest))
            report = await asyncio.to_thread(loop.update, version, lambda: tensors, keep_kv=keep_kv)
            if self._in_place:
                await self._served.aclose()
                self._served = leases.pop_all()
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

    async def collect(self, timeout_s: float) -> list[GroupResult]:
        return await self._answer(self._actor.collect.call_one(timeout_s))

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._answer(self._actor.abort.call_one(list(request_ids)))

    async def update_weights(self, version: int, manifest: Any, keep_kv: bool) -> UpdateReport:
        return await self._answer(self._actor.update_weights.call_one(version, manifest, keep_kv))

    async def stats(self) -> EngineStats:
        return await self._answer(self._actor.stats.call_one())

    async def version(self) -> int:
        return await self._answer(self._actor.version.call_one())


def _build(model_path: str, engine: dict[str, Any], seed: int, swap: Literal["copy", "zero_copy"]) -> Any:
    # While vLLM is imported it logs before it has read its own log level (VLLM_LOGGING_LEVEL).
    logging.getLogger("vllm").setLevel(logging.ERROR)
    from forgelite.policy.engine import build_engine  # imports torch and vLLM: many seconds

    return build_engine(model_path, engine=engine, seed=seed, swap=swap)
