"""The actor around the trainer: one a process, all of them called alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from monarch.actor import Actor, concurrent_endpoint, current_rank

from forgelite.config import LossConfig, ModelConfig, TrainerConfig
from forgelite.types import StepResult

if TYPE_CHECKING:
    from forgelite.trainer.trainer import Trainer
    from forgelite.weights.manifest import Manifest
    from forgelite.weights.store import WeightStore

T = TypeVar("T")


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainerSetup:
    """All that the trainer's processes are told.

    Example: `TrainerSetup(model=config.model, trainer=config.trainer, loss=config.loss, steps=40, seed=0,
    temperature=1.0, open_store=partial(open_store, config.weights, run_id))`.
    """

    model: ModelConfig
    trainer: TrainerConfig
    loss: LossConfig
    steps: int  # optimizer steps of the run
    seed: int
    temperature: float  # at which the policy samples
    open_store: Callable[[], WeightStore] | None = None  # called in the first process; None: no store
    transfer_dtype: str | None = None  # torch's name of the type to publish in; None: as held
    processes: int = 1
    master_addr: str = "127.0.0.1"  # where several processes meet
    master_port: int = 29500


class TrainerActor(Actor):
    """Trains, publishes and saves. With several processes every endpoint is called on all of them.

    Calls are answered one after the other, in the order in which they arrive, by one thread: weights do not
    change while they are published or saved, and the collectives of all processes come in the same order. The
    endpoints are concurrent so that `version` and `close` need not wait behind them.
    """

    def __init__(self) -> None:
        self._rank = current_rank().rank
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        self._turn = asyncio.Lock()
        self._trainer: Trainer | None = None
        self._store: WeightStore | None = None
        self._transfer_dtype: str | None = None
        self._announcing: asyncio.Task[None] | None = None

    @concurrent_endpoint
    async def setup(self, setup: TrainerSetup) -> int:
        """Build the model and the optimizer; returns the version.

        Raises:
            ConfigError: something that was asked for is not supported or does not fit.
        """
        async with self._turn:
            self._trainer = await self._blocking(_build, setup, self._rank)
            self._transfer_dtype = setup.transfer_dtype
            if setup.open_store is not None and self._trainer.is_first_rank:
                self._store = setup.open_store()
            return self._trainer.version

    @concurrent_endpoint
    async def train_step(self, encoded_batch: bytes) -> StepResult:
        """One optimizer step on a batch of `wire.encode_batch`.

        Raises:
            TrainingDiverged: nothing has changed.
        """
        from forgelite.wire import decode_batch

        async with self._turn:
            return await self._blocking(lambda: self._ready().train_step(decode_batch(encoded_batch)))

    @concurrent_endpoint
    async def evaluate(self, encoded_batch: bytes) -> float:
        """The mean negative log-probability of the trained tokens of a batch of `wire.encode_batch`."""
        from forgelite.wire import decode_batch

        async with self._turn:
            return await self._blocking(lambda: self._ready().evaluate(decode_batch(encoded_batch)))

    @concurrent_endpoint
    async def publish(self) -> Manifest | None:
        """Write the weights into the store under the trainer's version. The first process gets the manifest.

        With the manifest the version can be read at once. The directory, which only late readers ask, learns of it
        while the policy already takes it; if that fails, the next `publish` or `close` raises it.

        Raises:
            WeightError: the version was not published, or the one before not announced; what was published
                before is whole.
        """
        async with self._turn:
            trainer, store = self._ready(), self._store
            if store is None and trainer.is_first_rank:
                raise RuntimeError("the trainer was set up without open_store: it has nowhere to publish")
            tensors = await self._blocking(_drawn, trainer, store is not None, self._transfer_dtype)
            if store is None:
                return None
            await self._announced()
            manifest = await store.commit(trainer.version, tensors)
            self._announcing = asyncio.ensure_future(store.announce(manifest))
            return manifest

    @concurrent_endpoint
    async def version(self) -> int:
        """Completed optimizer steps."""
        return self._ready().version

    @concurrent_endpoint
    async def save(self, folder: str) -> None:
        """Write the full state, from which `load` continues bit for bit."""
        async with self._turn:
            await self._blocking(self._ready().save, folder)

    @concurrent_endpoint
    async def load(self, folder: str) -> int:
        """Take over the state that `save` wrote; returns its version.

        Raises:
            FileNotFoundError: there is none.
        """
        async with self._turn:
            await self._blocking(self._ready().load, folder)
            return self._ready().version

    @concurrent_endpoint
    async def save_hf(self, folder: str) -> None:
        """Write a Hugging Face folder that transformers and vLLM can load."""
        async with self._turn:
            await self._blocking(self._ready().save_hf, folder)

    @concurrent_endpoint
    async def close(self) -> None:
        """Close the store and leave the process group. May be called twice."""
        store, self._store = self._store, None
        trainer, self._trainer = self._trainer, None
        try:
            await self._announced()
        finally:
            if store is not None:
                store.close()
            if trainer is not None:
                await self._blocking(trainer.close)
            self._thread.shutdown(wait=False)

    def _ready(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError("the trainer is not set up, or closed")
        return self._trainer

    async def _announced(self) -> None:
        announcing, self._announcing = self._announcing, None
        if announcing is not None:
            await announcing

    async def _blocking(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)


def _build(setup: TrainerSetup, rank: int) -> Trainer:
    from forgelite.trainer.ranks import Rank
    from forgelite.trainer.trainer import Trainer

    place = Rank(
        rank=rank,
        world_size=setup.processes,
        local_rank=rank,
        master_addr=setup.master_addr,
        master_port=setup.master_port,
    )
    return Trainer.build(
        setup.model,
        setup.trainer,
        setup.loss,
        steps=setup.steps,
        seed=setup.seed,
        temperature=setup.temperature,
        rank=place if setup.processes > 1 else None,
    )


def _drawn(trainer: Trainer, keep: bool, transfer_dtype: str | None) -> dict[str, Any]:
    import torch

    dtype = getattr(torch, transfer_dtype) if transfer_dtype is not None else None
    tensors = {}
    # Gathering a tensor takes all processes, so all of them draw; only the one with the store keeps any.
    for name, tensor in trainer.export_hf():
        if keep:
            tensors[name] = tensor if dtype is None else tensor.to(dtype)
    return tensors
