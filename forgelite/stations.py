"""The stations as the controller talks to them: plain awaitables with deadlines, no actors in sight.

Tensors do not travel by RPC: batches and log-probabilities go as bytes (`wire`), weights through the store.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from forgelite.buffer.packing import pack, unpack
from forgelite.config import UpdateConfig
from forgelite.loop import Usage
from forgelite.mesh.processes import Station
from forgelite.policy.service import PolicyService
from forgelite.scoring.coalesce import Coalescer
from forgelite.scoring.reward import RewardSample
from forgelite.scoring.reward_actor import ScoringReply
from forgelite.types import Completion, Failure, GroupRequest, StepResult, TrainingBatch, Trajectory
from forgelite.weights.manifest import Manifest
from forgelite.wire import decode_tensors, encode_batch

INNER_FIRST_S = 10.0  # seconds by which an outer deadline exceeds the ones inside it


class TrainerHandle:
    """The trainer, one process or many: every call goes to all of them, the first one's answer counts."""

    def __init__(self, station: Station, *, timeout_s: float, publish_timeout_s: float = 120.0) -> None:
        """Args:
        station: of `TrainerActor`s.
        timeout_s: deadline of one call, in seconds (`mesh.call_timeout_s`).
        publish_timeout_s: deadline of one publication, in seconds (`weights.timeout_s`).
        """
        self._station = station
        self._timeout_s = timeout_s
        self._publish_timeout_s = publish_timeout_s
        self.manifest: Manifest | None = None  # of the last published version

    async def train_step(self, batch: TrainingBatch) -> StepResult:
        """One optimizer step. Raises TrainingDiverged when the loss is not finite."""
        return await self._call("train_step", encode_batch(batch))

    async def evaluate(self, batch: TrainingBatch) -> float:
        """The mean negative log-probability of the trained tokens of `batch`."""
        return await self._call("evaluate", encode_batch(batch))

    async def publish(self) -> Mapping[str, Any]:
        """Publish the current weights under their version; returns `sync/publish_s` and `sync/bytes`."""
        start = time.monotonic()
        self.manifest = await self._call("publish")
        return {"sync/publish_s": time.monotonic() - start, "sync/bytes": self.manifest.nbytes}

    async def version(self) -> int:
        """Completed optimizer steps."""
        return await self._call("version")

    async def save(self, folder: str) -> None:
        """Write the full state to `folder`."""
        await self._call("save", folder)

    async def load(self, folder: str) -> int:
        """Take over a state that `save` wrote; returns its version."""
        return await self._call("load", folder)

    async def save_hf(self, folder: str) -> None:
        """Write a Hugging Face folder that transformers and vLLM can load."""
        await self._call("save_hf", folder)

    async def close(self) -> None:
        """Let go of shared memory and of the process group."""
        await self._call("close")

    async def _call(self, endpoint: str, *arguments: Any) -> Any:
        publishes = endpoint == "publish"
        key = "weights.timeout_s" if publishes else "mesh.call_timeout_s"
        # The store's own waits end first and say more.
        seconds = self._publish_timeout_s + INNER_FIRST_S if publishes else self._timeout_s
        call = getattr(self._station.actor, endpoint).call(*arguments)
        answers = await self._station.call(call, seconds, f"{endpoint} ({key})")
        return next(value for _, value in answers)


class PolicyHandle:
    """The policy: generation through its service, updates from what the trainer published last."""

    def __init__(self, service: PolicyService, trainer: TrainerHandle | None, *, update: UpdateConfig) -> None:
        """Args:
        service: of the policy's replicas.
        trainer: its last manifest says where a version lies; None: no version is published.
        update: `policy.update`. With mode "barrier" the loop starts no rollout while an update waits, so the engine
            only has to let running sequences end.
        """
        self._service = service
        self._trainer = trainer
        self._update = update

    @property
    def service(self) -> PolicyService:
        """The service itself, for an endpoint in front of it."""
        return self._service

    async def generate_group(self, request: GroupRequest) -> list[Completion | Failure]:
        """See `PolicyService.generate_group`."""
        return await self._service.generate_group(request)

    async def cancel(self, group_id: str) -> int:
        """Abort all open requests of a group; returns how many there were. See `PolicyService.cancel`."""
        return await self._service.cancel(group_id)

    async def update_weights(self, version: int) -> Mapping[str, Any]:
        """Take a published version; returns metrics once every serving replica has acknowledged.

        They are `sync/fetch_s` (the whole update), `sync/pause_s` (no sampling, of the replica that paused longest),
        and the account of the replicas: how many serve, and the totals of restarts and of requests handed on.
        """
        start = time.monotonic()
        manifest = self._trainer.manifest if self._trainer else None
        update, service = self._update, self._service
        report = await service.update_weights(
            version,
            manifest if manifest and manifest.version == version else None,
            mode="drain" if update.mode == "barrier" else update.mode,
            keep_kv=update.kv == "keep",
            drain_timeout_s=update.drain_timeout_s,
        )
        return {
            "sync/fetch_s": time.monotonic() - start,
            "sync/pause_s": report.paused_s,
            "policy/replicas_serving": service.replicas_serving,
            "policy/restarts": service.restarts,
            "policy/redispatched": service.redispatched,
        }

    async def version(self) -> int:
        """The version that every serving replica has acknowledged."""
        return await self._service.version()

    async def usage(self) -> Usage:
        """What the engines have done so far (the time is the mean of a replica), and which groups they sample."""
        stats = await self._service.stats()
        return Usage(
            busy_s=stats.busy_s,
            steps=stats.steps,
            generated_tokens=stats.generated_tokens,
            first_versions=stats.first_versions,
        )


class ReferenceHandle:
    """The frozen starting model; groups that arrive together are computed together."""

    def __init__(self, station: Station, *, row_length: int, timeout_s: float) -> None:
        """Args:
        station: of one `ReferenceActor`.
        row_length: tokens in a packed row.
        timeout_s: deadline of one call, in seconds (`mesh.call_timeout_s`).
        """
        self._station = station
        self._row_length = row_length
        self._timeout_s = timeout_s
        self._coalescer: Coalescer[Trajectory, list[float]] = Coalescer(self._compute, max_calls=1)

    async def logprobs(self, trajectories: Sequence[Trajectory]) -> Sequence[list[float]]:
        """For each trajectory the [T] log-probabilities of its trained tokens, 0 elsewhere."""
        return await self._coalescer.submit(trajectories)

    async def _compute(self, trajectories: Sequence[Trajectory]) -> Sequence[list[float]]:
        batch = pack(trajectories, self._row_length)
        call = self._station.actor.logprobs.call_one(encode_batch(batch))
        answer = await self._station.call(call, self._timeout_s, "logprobs (mesh.call_timeout_s)")
        (values,) = decode_tensors(answer)
        return unpack(values, batch, len(trajectories))


class RewardHandle:
    """One reward process; `RewardClient` replaces it when it is beyond use."""

    def __init__(self, station: Station, *, stop: Callable[[Station], Awaitable[None]]) -> None:
        self._station = station
        self._stop = stop

    async def score(self, samples: Sequence[RewardSample]) -> ScoringReply:
        """Score samples. The client sets the deadline, which depends on how many there are."""
        return await self._station.answer(self._station.actor.score.call_one(list(samples)))

    async def stop(self) -> None:
        """End the process, also one that hangs."""
        await self._stop(self._station)
