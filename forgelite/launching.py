"""Start the stations of a run, connect them, and end them.

    spawn all processes ──> set up all engines at the same time ──> [the run] ──> close ──> stop

Importing vLLM takes longest, so everything else hides behind it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import platform
import re
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from monarch.actor import this_proc

from forgelite.config import GRPOConfig, MeshConfig, RewardConfig, ServeConfig, SFTConfig, StationConfig
from forgelite.errors import ConfigError
from forgelite.mesh.environment import station_environment
from forgelite.mesh.fleet import Fleet
from forgelite.mesh.processes import Station
from forgelite.policy.environment import policy_environment
from forgelite.policy.replicas import ReplicaSettings
from forgelite.policy.service import PolicyService
from forgelite.policy.tensor_parallel import tensor_parallel_size
from forgelite.policy_stations import ReplicaLauncher, ReplicaPlan
from forgelite.scoring.reference_actor import ReferenceActor
from forgelite.scoring.reward_actor import RewardActor, RewardSpec
from forgelite.scoring.reward_client import RewardClient, seconds_to_score
from forgelite.stations import INNER_FIRST_S, PolicyHandle, ReferenceHandle, RewardHandle, TrainerHandle
from forgelite.trainer.actor import TrainerActor, TrainerSetup
from forgelite.weights import SHARED_MEMORY, reclaim, start_directory, stop_directory
from forgelite.weights.carriers import choose_carrier
from forgelite.weights.manifest import Carrier
from forgelite.weights.opening import StoreSettings, open_sharded_store, open_store
from forgelite.weights_stations import start_carrier

logger = logging.getLogger(__name__)

Device = Literal["cpu", "cuda"]
SETUP = "setup (mesh.setup_timeout_s)"


@dataclass(kw_only=True, slots=True, frozen=True)
class Stations:
    """The stations of a GRPO run, set up and connected.

    Example: `async with launch(config, model_path=...) as stations: await stations.trainer.publish()`.
    """

    policy: PolicyHandle
    trainer: TrainerHandle | None  # None: loop.generate_only is true
    rewards: RewardClient
    reference: ReferenceHandle | None  # None: reference.enabled is false
    died: asyncio.Future[None]  # raises StationDied when a process dies, also while nobody talks to it
    capabilities: dict[str, Any]  # what the policy's engine can do, and where it runs


def choose_device(asked: Literal["auto", "cpu", "cuda"]) -> Device:
    """The device of all models of a run. Raises ConfigError when a GPU is asked for and there is none."""
    import torch

    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise ConfigError("mesh.device=cuda, but torch sees no GPU")
    return "cuda" if available and asked != "cpu" else "cpu"


def choose_swap(
    asked: Literal["auto", "copy", "zero_copy"], device: Device, carrier: Carrier, ranks: int = 1
) -> Literal["copy", "zero_copy"]:
    """How the policy takes new weights.

    Args:
        asked: `weights.swap`.
        device: of the policy.
        carrier: of the weights.
        ranks: processes of one replica (`policy.engine.tensor_parallel_size`).

    Raises:
        ConfigError: they cannot be used in place on this device, or by ranks that compute with slices of them.
    """
    if asked == "zero_copy" and ranks > 1:
        raise ConfigError(
            f"weights.swap=zero_copy, but policy.engine.tensor_parallel_size={ranks}: a rank computes with slices of "
            "the tensors; set weights.swap=copy or auto"
        )
    if asked == "zero_copy" and device != "cpu":
        raise ConfigError(f"weights.swap=zero_copy, but the policy runs on {device}: set weights.swap=copy or auto")
    in_place = device == "cpu" and carrier in ("shm", "rdma") and ranks == 1
    return "zero_copy" if in_place and asked != "copy" else "copy"


def publishes_shards(mesh: MeshConfig, carrier: Carrier) -> bool:
    """Whether every process of the trainer writes its own shards; the other carriers take whole versions from one."""
    return mesh.trainer_processes > 1 and carrier in ("shm", "rdma")


def free_port() -> int:
    """A port on which the processes of a trainer can meet. Another program may take it before they do."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@asynccontextmanager
async def launch(config: GRPOConfig, *, on_phase: Callable[[str], None] = lambda text: None) -> AsyncIterator[Stations]:
    """The stations of `config`; ended when the block ends, however it ends.

    Args:
        config: of the run.
        on_phase: called with what is being done.

    Raises:
        ConfigError: a station refuses its part of the configuration.
        StationDied, DeadlineExceeded: a station did not come up.
    """
    device = choose_device(config.mesh.device)
    for path in reclaim(SHARED_MEMORY):
        on_phase(f"removed {path}, which a killed run had left behind")
    on_phase(f"starting the stations on {device}")
    mesh, run_id, training = config.mesh, _run_identity(config.run.dir), config.trainer.training
    temperature, trains = config.policy.sampling.temperature, not config.loop.generate_only
    carrier = choose_carrier(config.weights.carrier, hosts={platform.node()})
    swap = choose_swap(config.weights.swap, device, carrier, tensor_parallel_size(config.policy.engine))
    on_phase(
        f"weights travel by {carrier}, and the policy takes them by {swap}"
        if trains
        else "no trainer: the policy keeps its starting weights (loop.generate_only=true)"
    )
    settings = _store_settings(config, run_id, carrier, swap)
    plan = _replica_plan(config, device, swap if trains else "copy")
    async with _nothing_left_of(run_id), Fleet(stop_timeout_s=mesh.stop_timeout_s) as fleet, AsyncExitStack() as ending:
        trainer_handle, open_reader = None, None
        if trains:
            trainer = _spawn_trainer(fleet, mesh, device)
            trainer_handle = TrainerHandle(
                trainer, timeout_s=mesh.call_timeout_s, publish_timeout_s=config.weights.timeout_s
            )
            puller = await start_carrier(fleet, settings, mesh, _environment(mesh, "cpu", None), on_phase)
            open_reader = partial(open_store, settings, puller)
        launcher = ReplicaLauncher(fleet, dataclasses.replace(plan, open_reader=open_reader))
        service = PolicyService(
            launcher.start,
            settings=_replica_settings(config, update_timeout_s=config.weights.timeout_s + INNER_FIRST_S),
            request_timeout_s=config.policy.request_timeout_s,
            max_open_requests=config.policy.max_open_requests,
            on_dead=fleet.fail,
        )
        setups = [
            service.start(),
            _start_rewards(fleet, config.reward, mesh),
        ]
        if trains:
            # In this process, so that it outlives whatever station dies.
            setups.append(start_directory(this_proc(), name=run_id))
            setups.append(
                _set_up_trainer(
                    trainer,
                    TrainerSetup(
                        model=config.model,
                        trainer=config.trainer,
                        loss=config.loss,
                        steps=_schedule_steps(config),
                        seed=config.run.seed,
                        temperature=temperature,
                        open_store=partial(open_store, settings),
                        open_shards=partial(open_sharded_store, settings) if publishes_shards(mesh, carrier) else None,
                        processes=mesh.trainer_processes,
                        master_port=free_port() if mesh.trainer_processes > 1 else 0,
                    ),
                    mesh,
                )
            )
        if config.reference.enabled:
            reference = fleet.spawn(
                "reference", ReferenceActor, environment=_environment(mesh, device, mesh.reference_gpus)
            )
            row_length = config.reference.row_length or training.seq_len
            rows = max(1, training.local_batch_size * training.seq_len // row_length)  # the trainer's microbatch
            setup = reference.actor.setup.call_one(config.model, row_length, config.run.seed, temperature, rows)
            setups.append(reference.call(setup, mesh.setup_timeout_s, SETUP))
            reference_handle = ReferenceHandle(reference, row_length=row_length, timeout_s=mesh.call_timeout_s)
        ending.push_async_callback(service.close)
        _, reward_process, *_ = await fleet.together(*setups)
        if trainer_handle is not None:
            ending.push_async_callback(_close_trainer, trainer_handle)
        capabilities = launcher.capabilities
        on_phase("policy: " + ", ".join(f"{name} {value}" for name, value in capabilities.items()))
        yield Stations(
            policy=PolicyHandle(service, trainer_handle, update=config.policy.update),
            trainer=trainer_handle,
            rewards=RewardClient(
                reward_process,
                replace=partial(_start_rewards, fleet, config.reward, mesh),
                seconds_for=partial(seconds_to_score, config.reward),
                max_hung_threads=config.reward.max_hung_threads,
            ),
            reference=reference_handle if config.reference.enabled else None,
            died=fleet.died,
            capabilities=capabilities,
        )


@asynccontextmanager
async def launch_trainer(
    config: SFTConfig | GRPOConfig, *, on_phase: Callable[[str], None] = lambda text: None
) -> AsyncIterator[TrainerHandle]:
    """The trainer alone, for supervised fine-tuning or a replay. Raises as `launch` does."""
    device = choose_device(config.mesh.device)
    on_phase(f"starting the trainer on {device}")
    async with Fleet(stop_timeout_s=config.mesh.stop_timeout_s) as fleet:
        trainer = _spawn_trainer(fleet, config.mesh, device)
        setup = TrainerSetup(
            model=config.model,
            trainer=config.trainer,
            loss=config.loss,
            steps=_schedule_steps(config),
            seed=config.run.seed,
            temperature=config.policy.sampling.temperature if isinstance(config, GRPOConfig) else 1.0,
            processes=config.mesh.trainer_processes,
            master_port=free_port() if config.mesh.trainer_processes > 1 else 0,
        )
        await fleet.together(_set_up_trainer(trainer, setup, config.mesh))
        handle = TrainerHandle(trainer, timeout_s=config.mesh.call_timeout_s)
        try:
            yield handle
        finally:
            await _close_trainer(handle)


@dataclass(kw_only=True, slots=True, frozen=True)
class ServedPolicy:
    """A policy without a trainer. Example: `async with launch_policy(config) as served: await served.died`."""

    service: PolicyService
    died: asyncio.Future[None]  # raises StationDied when the last replica is lost for good
    capabilities: dict[str, Any]  # what the engine can do, and where it runs


@asynccontextmanager
async def launch_policy(
    config: ServeConfig, *, on_phase: Callable[[str], None] = lambda text: None
) -> AsyncIterator[ServedPolicy]:
    """The policy alone, with weights that never change. Raises as `launch` does."""
    device = choose_device(config.mesh.device)
    on_phase(f"starting the policy on {device}")
    plan = _replica_plan(config, device, "copy")
    async with Fleet(stop_timeout_s=config.mesh.stop_timeout_s) as fleet, AsyncExitStack() as ending:
        launcher = ReplicaLauncher(fleet, plan)
        service = PolicyService(
            launcher.start,
            settings=_replica_settings(config, update_timeout_s=config.mesh.answer_timeout_s),
            request_timeout_s=config.policy.request_timeout_s,
            max_open_requests=config.policy.max_open_requests,
            on_dead=fleet.fail,
        )
        ending.push_async_callback(service.close)
        await fleet.together(service.start())
        capabilities = launcher.capabilities
        on_phase("policy: " + ", ".join(f"{name} {value}" for name, value in capabilities.items()))
        yield ServedPolicy(service=service, died=fleet.died, capabilities=capabilities)


def _spawn_trainer(fleet: Fleet, mesh: MeshConfig, device: Device) -> Station:
    environment = _environment(mesh, device, mesh.trainer_gpus)
    return fleet.spawn("trainer", TrainerActor, environment=environment, processes=mesh.trainer_processes)


def _store_settings(
    config: GRPOConfig, run_id: str, carrier: Carrier, swap: Literal["copy", "zero_copy"]
) -> StoreSettings:
    weights = config.weights
    return StoreSettings(
        run_id=run_id,
        carrier=carrier,
        retain=weights.retain,
        fingerprint=weights.fingerprint,
        timeout_s=weights.timeout_s,
        # Replicas that serve hold one version, or two while they update; one that is being removed holds an older one.
        served_in_place=min(config.policy.replicas, 2) if swap == "zero_copy" else 0,
        transfer_dtype=config.transfer_dtype,
        folder=weights.folder or str(Path(config.run.dir, "weights").absolute()),
    )


def _replica_plan(config: GRPOConfig | ServeConfig, device: Device, swap: Literal["copy", "zero_copy"]) -> ReplicaPlan:
    """For weights that never change. Raises ConfigError where replicas and GPUs do not fit together."""
    mesh, replicas = config.mesh, config.policy.replicas
    shares: tuple[str, ...] = ()
    if device == "cuda" and mesh.policy_gpus is not None:
        gpus = [gpu.strip() for gpu in mesh.policy_gpus.split(",")]
        size = len(gpus) // replicas
        if size < (ranks := tensor_parallel_size(config.policy.engine)):
            raise ConfigError(
                f"mesh.policy_gpus={mesh.policy_gpus} gives each of policy.replicas={replicas} replicas {size}, but "
                f"policy.engine.tensor_parallel_size={ranks} needs one GPU a rank"
            )
        shares = tuple(",".join(gpus[start : start + size]) for start in range(0, len(gpus), size))
    elif device == "cuda" and replicas > 1:
        raise ConfigError(f"policy.replicas={replicas} on GPUs: say in mesh.policy_gpus which ones are theirs")
    return ReplicaPlan(
        model_path=config.model.path,
        engine=config.policy.engine,
        seed=config.run.seed,
        swap=swap,
        open_reader=None,
        environment=policy_environment(device) | _environment(mesh, device, None),
        setup_timeout_s=mesh.setup_timeout_s,
        tokenizer=config.model.tokenizer,
        gpu_shares=shares,
        step_timeout_s=config.policy.hang_timeout_s,
    )


def _replica_settings(config: GRPOConfig | ServeConfig, *, update_timeout_s: float) -> ReplicaSettings:
    policy = config.policy
    return ReplicaSettings(
        replicas=policy.replicas,
        max_restarts=policy.max_restarts,
        restart_window_s=policy.restart_window_s,
        heartbeat_timeout_s=policy.heartbeat_timeout_s,
        hang_timeout_s=policy.hang_timeout_s,
        update_timeout_s=update_timeout_s,
        answer_s=config.mesh.answer_timeout_s,
    )


async def _set_up_trainer(station: Station, setup: TrainerSetup, mesh: MeshConfig) -> None:
    await station.call(station.actor.setup.call(setup), mesh.setup_timeout_s, SETUP)


@asynccontextmanager
async def _nothing_left_of(run_id: str) -> AsyncIterator[None]:
    """Take away, when all processes have ended, what a trainer that was killed could not take away itself."""
    try:
        yield
    finally:
        reclaim(SHARED_MEMORY, run_id)
        with suppress(Exception):  # it was never started, or its process is ending
            await stop_directory(run_id)


async def _close_trainer(handle: TrainerHandle) -> None:
    try:
        await handle.close()
    except Exception as error:  # it may be dead, and then whatever ended the run is what the user should read
        logger.warning("the trainer did not close cleanly: %s", error)


async def _start_rewards(fleet: Fleet, reward: RewardConfig, mesh: MeshConfig) -> RewardHandle:
    station = fleet.spawn("reward", RewardActor, environment=_environment(mesh, "cpu", None), expendable=True)
    specs = [RewardSpec(path=f.path, name=f.name, weight=f.weight, timeout_s=f.timeout_s) for f in reward.functions]
    setup = station.actor.setup.call_one(specs, reward.max_concurrency, reward.max_threads)
    await station.call(setup, mesh.setup_timeout_s, SETUP)
    return RewardHandle(station, stop=fleet.stop)


def _schedule_steps(config: GRPOConfig | SFTConfig) -> int:
    """Steps over which the learning rate is scheduled; a short run ends within its warm-up."""
    return max(config.loop.steps, config.trainer.lr_scheduler.warmup_steps, 1)


def _environment(mesh: StationConfig, device: Device, gpus: str | None) -> dict[str, str]:
    # Actors of user modules are imported by name in the children, so they see what this process sees.
    paths = [os.getcwd(), os.environ.get("PYTHONPATH", "")]
    environment = station_environment(cpu_threads=mesh.cpu_threads, PYTHONPATH=os.pathsep.join(p for p in paths if p))
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # else engines would find a GPU and use it
    elif gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpus
    return environment


def _run_identity(folder: str) -> str:
    """A name for this run's shared memory and directory: its folder's, its process's, and one of its own."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(folder).name)[:40].strip("-") or "run"
    return f"{name}-{os.getpid()}-{secrets.token_hex(3)}"
