"""The processes of the policy's replicas: how one is started, and how it is ended whatever state it is in."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from forgelite.errors import ConfigError
from forgelite.mesh.fleet import Fleet
from forgelite.mesh.processes import Station
from forgelite.policy.actor import ActorCalls, PolicyActor
from forgelite.policy.leased_weights import WeightReader
from forgelite.policy.tensor_parallel import Rendezvous, new_rendezvous, tensor_parallel_size

_FIRST_ANSWER = "process_id (mesh.setup_timeout_s)"
_SETUP = "setup (mesh.setup_timeout_s)"


@dataclass(kw_only=True, slots=True, frozen=True)
class ReplicaPlan:
    """What every replica is built with.

    Example: `ReplicaPlan(model_path="runs/toy/hf", engine={"dtype": "float32"}, seed=0, swap="zero_copy",
    open_reader=open_reader, environment=environment, setup_timeout_s=300.0)`.
    """

    model_path: str  # version 0
    engine: Mapping[str, Any]  # policy.engine.*
    seed: int
    swap: Literal["copy", "zero_copy"]
    open_reader: Callable[[], WeightReader] | None  # called in the replica's process; None: the weights never change
    environment: Mapping[str, str]
    setup_timeout_s: float
    tokenizer: str | None = None  # its folder, where it is not model_path
    step_timeout_s: float = 120.0  # until all ranks of a replica have done one step (policy.hang_timeout_s)
    gpu_shares: tuple[str, ...] = ()  # values of CUDA_VISIBLE_DEVICES, one for a replica; empty: all see what is there


class ReplicaLauncher:
    """Starts replicas in a fleet. Its `start` is what a `PolicyService` is given."""

    def __init__(self, fleet: Fleet, plan: ReplicaPlan) -> None:
        self._fleet = fleet
        self._plan = plan
        self._free_shares = list(plan.gpu_shares)
        self.capabilities: dict[str, Any] = {}  # of the engine that was built last

    async def start(self, name: str) -> ProcessOfReplica:
        """Spawn the process of one replica, or one for each of its ranks, and build its engine.

        Raises:
            ConfigError: the engine refuses its configuration, or no GPU is left.
            StationDied, DeadlineExceeded: the process did not come up.
        """
        plan, fleet = self._plan, self._fleet
        ranks = tensor_parallel_size(plan.engine)
        share = self._take_share(name)
        environment = plan.environment if share is None else {**plan.environment, "CUDA_VISIBLE_DEVICES": share}
        try:
            station = fleet.spawn(name, PolicyActor, environment=environment, processes=ranks, expendable=True)
        except BaseException:
            self._give_back(share)
            raise
        process = ProcessOfReplica(station, fleet, on_end=lambda: self._give_back(share))
        try:
            answers = await station.call(station.actor.process_id.call(), plan.setup_timeout_s, _FIRST_ANSWER)
            process.watch(*(process_id for _, process_id in answers))
            setup = station.actor.setup.call(
                plan.model_path,
                dict(plan.engine),
                plan.seed,
                0,
                plan.open_reader,
                plan.swap,
                plan.tokenizer,
                _rendezvous(plan, ranks),
            )
            built = await station.call(setup, plan.setup_timeout_s, _SETUP)
            self.capabilities = next(capabilities for _, capabilities in built)  # the same on all ranks
        except BaseException:
            await process.kill()
            raise
        return process

    def _take_share(self, name: str) -> str | None:
        if not self._plan.gpu_shares:
            return None
        if not self._free_shares:
            raise ConfigError(f"no GPU is left for {name}: name more in mesh.policy_gpus, or remove a replica first")
        return self._free_shares.pop(0)

    def _give_back(self, share: str | None) -> None:
        if share is not None:
            self._free_shares.insert(0, share)


class ProcessOfReplica:
    """The process of one replica, or the processes of its ranks, and the calls to the actor of rank 0."""

    def __init__(self, station: Station, fleet: Fleet, *, on_end: Callable[[], None]) -> None:
        self.calls = ActorCalls(station.actor.slice(procs=0), station.answer)
        self._station = station
        self._fleet = fleet
        self._on_end = on_end
        self.process_ids: tuple[int, ...] = ()  # by rank
        self._handles: list[int] = []  # of processes: a process id could mean another process by now
        self._ended = False

    def watch(self, *process_ids: int) -> None:
        """Learn which processes `kill` is to end, in the order of their ranks."""
        self.process_ids = process_ids
        for process_id in process_ids:
            with suppress(ProcessLookupError):  # it has died since it answered
                self._handles.append(os.pidfd_open(process_id))

    async def ended(self) -> str:
        """Wait until one of its processes is gone; returns what a message says of that."""
        handles = [os.dup(handle) for handle in self._handles]  # a loop has one reader for each, and `kill` reads too
        waits = [asyncio.ensure_future(_readable(handle)) for handle in handles]
        how = "its process has ended"
        try:
            if len(handles) == len(self.process_ids):
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                how = _how_it_ended(next(h for h, wait in zip(handles, waits, strict=True) if wait in done))
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
            for handle in handles:
                os.close(handle)
        return f"station {self._station.name} died: {how}"

    async def kill(self) -> None:
        """End it by SIGKILL, which a stopped process obeys too; then the kernel has taken back all that it held.

        Nothing in it is worth a clean end, which takes vLLM seconds.
        """
        if self._ended:
            return
        self._ended = True
        handles, self._handles = self._handles, []
        try:
            for handle in handles:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            await asyncio.gather(*(_readable(handle) for handle in handles))
            await self._fleet.stop(self._station)
        finally:
            for handle in handles:
                os.close(handle)
            self._on_end()


def _rendezvous(plan: ReplicaPlan, ranks: int) -> Rendezvous | None:
    """Where the ranks of a replica that is about to start meet; None where there is one."""
    if ranks == 1:
        return None
    return new_rendezvous(ranks, build_timeout_s=plan.setup_timeout_s, call_timeout_s=plan.step_timeout_s)


def _how_it_ended(handle: int) -> str:
    try:
        end = os.waitid(os.P_PIDFD, handle, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # Monarch, whose child it is too, has asked before
        return "its process has ended"
    if end is None or end.si_code == os.CLD_EXITED:
        return f"its process has ended with exit code {end.si_status if end else 'unknown'}"
    return f"its process was killed by {signal.Signals(end.si_status).name}"


async def _readable(handle: int) -> None:
    """Returns when the process behind a handle has ended."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(handle, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(handle)
