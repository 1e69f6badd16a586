"""The actor around the trainer: one a process, all of them called alike."""

from __future__ import annotations

import asyncio
import threading
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
    from forgelite.weights.opening import Store
    from forgelite.weights.sharded_store import ShardedStore
    from forgelite.weights.sharding import Exchange

T = TypeVar("T")


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainerSetup:
    """All that the trainer's processes are told.

    Example: `TrainerSetup(model=config.model, trainer=config.trainer, loss=config.loss, steps=40, seed=0,
    temperature=1.0, open_store=partial(open_store, settings))`.
    """

    model: ModelConfig
    trainer: TrainerConfig
    loss: LossConfig
    steps: int  # optimizer steps of the run
    seed: int
    temperature: float  # at which the policy samples
    open_store: Callable[[], Store] | None = None  # called in the first process; None: no store
    open_shards: Callable[[int, Exchange], ShardedStore] | None = None  # in every process, instead of a store
    processes: int = 1
    master_addr: str = "127.0.0.1"  # where several processes meet
    master_port: int = 29500


class TrainerActor(Actor):
    """Trains, publishes and saves. With several processes every endpoint is called on all of them.

    Calls are answered one after the other, in the order in which they arrive, by one thread: weights do not
    change while they are saved, and the collectives of all processes come in the same order. The endpoints are
    concurrent so that `version` and `close` need not wait behind them.

    Only the copy of a publication runs beside the next call: a training step waits for it before it changes the
    weights, not before its forward and backward passes.
    """

    def __init__(self) -> None:
        self._rank = current_rank().rank
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        self._turn = asyncio.Lock()
        self._trainer: Trainer | None = None
        self._store: Store | None = None
        self._shards: ShardedStore | None = None
        self._copying: asyncio.Future[Manifest] | None = None
        self._copied = threading.Event()  # nobody reads the weights but the trainer's own thread
        self._copied.set()
        self._announcing: asyncio.Task[None] | None = None

    @concurrent_endpoint
    async def setup(self, setup: TrainerSetup) -> int:
        """Build the model and the optimizer; returns the version.

        Raises:
            ConfigError: something that was asked for is not supported or does not fit.
        """
        async with self._turn:
            self._trainer = await self._blocking(_build, setup, self._rank)
            if setup.open_shards is not None:
                from forgelite.trainer.ranks import exchange

                self._shards = setup.open_shards(self._rank, exchange)
            elif setup.open_store is not None and self._trainer.is_first_rank:
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
            return await self._blocking(
                lambda: self._ready().train_step(decode_batch(encoded_batch), before_change=self._wait_until_copied)
            )

    @concurrent_endpoint
    async def evaluate(self, encoded_batch: bytes) -> float:
        """The mean negative log-probability of the trained tokens of a batch of `wire.encode_batch`."""
        from forgelite.wire import decode_batch

        async with self._turn:
            return await self._blocking(lambda: self._ready().evaluate(decode_batch(encoded_batch)))

    @concurrent_endpoint
    async def publish(self) -> Manifest | None:
        """Write the weights into the store under the trainer's version. The first process gets the manifest.

        With a sharded store every process writes what it holds before the next call is answered. Otherwise the first
        one gathers, and the next call is answered as soon as the tensors are known; their copy goes on beside it.

        With the manifest the version can be read at once. The directory, which only late readers ask, learns of it
        while the policy already takes it; if that fails, the next `publish` or `close` raises it.

        Raises:
            WeightError: the version was not published, or the one before not announced; what was published
                before is whole.
        """
        if self._shards is not None:
            return await self._publish_shards(self._shards)
        async with self._turn:
            trainer, store = self._ready(), self._store
            if store is None and trainer.is_first_rank:
                raise RuntimeError("the trainer was set up without open_store: it has nowhere to publish")
            tensors = await self._blocking(_drawn, trainer, store is not None)
            if store is None:
                return None
            await self._settled()
            self._copied.clear()
            self._copying = copying = asyncio.ensure_future(store.commit(trainer.version, tensors))
            copying.add_done_callback(lambda _: self._copied.set())
        manifest = await asyncio.shield(copying)
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
            await self._settled()
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
        store, self._store = self._store or self._shards, None
        self._shards = None
        trainer, self._trainer = self._trainer, None
        try:
            await self._settled()
        finally:
            if store is not None:
                store.close()
            if trainer is not None:
                await self._blocking(trainer.close)
            self._thread.shutdown(wait=False)

    async def _publish_shards(self, shards: ShardedStore) -> Manifest | None:
        async with self._turn:
            trainer = self._ready()
            await self._settled()
            manifest = await self._blocking(_write_shards, trainer, shards)
            if not trainer.is_first_rank:
                return None
            self._announcing = asyncio.ensure_future(shards.announce(manifest))
            return manifest

    def _ready(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError("the trainer is not set up, or closed")
        return self._trainer

    async def _settled(self) -> None:
        """Wait until the last publication is copied and announced; raises what the announcement raised."""
        copying, self._copying = self._copying, None
        if copying is not None:
            await asyncio.wait([copying])  # its error went to who asked for it
        announcing, self._announcing = self._announcing, None
        if announcing is not None:
            await announcing

    def _wait_until_copied(self) -> None:
        self._copied.wait()  # ends with the copy, whose own waits have deadlines

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


def _write_shards(trainer: Trainer, shards: ShardedStore) -> Manifest:
    return shards.commit(trainer.version, trainer.describe_hf(), trainer.export_shards)


def _drawn(trainer: Trainer, keep: bool) -> dict[str, Any]:
    # Gathering a tensor takes all processes, so all of them draw; only the one with the store keeps any.
    return {name: tensor for name, tensor in trainer.export_hf() if keep}
