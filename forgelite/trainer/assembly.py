"""Model, optimizer and schedule from torchtitan's parts. To be imported after `prepare_torchtitan()`."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.optimizer import OptimizersContainer, default_adamw
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
from torchtitan.config import CommConfig, CompileConfig, DebugConfig
from torchtitan.config import ParallelismConfig as TitanParallelism
from torchtitan.config import TrainingConfig as TitanTraining
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as titan_distributed
from torchtitan.models.common.decoder import Decoder

from forgelite.config.schema import ModelConfig
from forgelite.config.trainer import LRSchedulerConfig, OptimizerConfig, TrainerConfig
from forgelite.errors import ConfigError
from forgelite.model.build import build_model, starting_weights
from forgelite.model.forward import TokenScores, score_tokens
from forgelite.model.hf import load_hf
from forgelite.model.spec import ModelDefinition, define_model
from forgelite.trainer.ranks import ALONE, Rank, Share
from forgelite.types import TrainingBatch

logger = logging.getLogger(__name__)

_NO_END = 2**62  # steps of a schedule that never decays


@dataclass(kw_only=True, slots=True)
class Parts:
    """What a trainer is made of."""

    definition: ModelDefinition
    model: Decoder
    optimizers: OptimizersContainer
    schedulers: LRSchedulersContainer
    device: torch.device
    share: Share
    last_step: int | None  # of the schedule; None: it has no end
    expert_parallel: bool
    autocast: bool  # matrices in bfloat16 by autocast; a sharded model casts by itself

    def score(self, batch: TrainingBatch, temperature: float) -> TokenScores:
        """Log-probabilities and entropies of the trained tokens of a microbatch. A collective."""
        # No context at all in float32: entering autocast costs time even when it is switched off.
        context = torch.autocast(self.device.type, dtype=torch.bfloat16) if self.autocast else nullcontext()
        with context:
            return score_tokens(self.model, batch, temperature=temperature, with_entropy=True, device=self.device)

    def clip_gradients(self, max_norm: float) -> float:
        """Scale the gradients of all ranks down to `max_norm` and give their norm before it. A collective."""
        norm = titan_distributed.clip_grad_norm_(
            list(self.model.parameters()), max_norm, foreach=True, ep_enabled=self.expert_parallel
        )
        return float(norm)


def assemble(
    model: ModelConfig,
    config: TrainerConfig,
    *,
    steps: int,
    seed: int,
    device: torch.device,
    rank: Rank | None,
) -> Parts:
    """Build everything.

    Args:
        model: Which model.
        config: How it is trained.
        steps: Optimizer steps of the run, for the learning-rate schedule.
        seed: Of random weights; no other randomness is used.
        device: Of this process.
        rank: This process among several; None: it is alone.

    Raises:
        ConfigError: the model is not supported, or the degrees of parallelism do not fit the processes.
    """
    definition = define_model(model, device=device, max_seq_len=config.training.seq_len)
    if rank is None:
        _check_single(config)
        built, share, expert_parallel = build_model(definition, seed, device), ALONE, False
    else:
        built, share, expert_parallel = _build_parallel(definition, config, seed, device, rank)
    logger.info(
        "trainer: %s on %s, %s attention, %s matrices, %d data-parallel rank(s)",
        definition.spec.name,
        device,
        "SDPA" if device.type == "cpu" else "varlen",
        config.training.mixed_precision_param,
        share.count,
    )
    optimizers = _optimizers(built, config.optimizer)
    schedulers, last_step = _schedulers(optimizers, config.lr_scheduler, steps)
    return Parts(
        definition=definition,
        model=built,
        optimizers=optimizers,
        schedulers=schedulers,
        device=device,
        share=share,
        last_step=last_step,
        expert_parallel=expert_parallel,
        autocast=rank is None and config.training.mixed_precision_param == "bfloat16",
    )


def _check_single(config: TrainerConfig) -> None:
    degrees = {name: value for name, value in config.parallelism if name.endswith("_degree")}
    wrong = {name: value for name, value in degrees.items() if value not in (1, -1)}
    if wrong:
        raise ConfigError(f"trainer.parallelism asks for {wrong}, but the trainer has one process")


def _build_parallel(
    definition: ModelDefinition, config: TrainerConfig, seed: int, device: torch.device, rank: Rank
) -> tuple[Decoder, Share, bool]:
    rank.export()
    parallelism = TitanParallelism(**config.parallelism.model_dump())
    training = TitanTraining(
        seq_len=config.training.seq_len, mixed_precision_param=config.training.mixed_precision_param
    )
    world = titan_distributed.init_distributed(CommConfig())
    try:
        dims = ParallelDims.from_config(parallelism, world)
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"trainer.parallelism does not fit {world} processes: {error}") from error
    titan_distributed.set_spmd_backend(parallelism.spmd_backend)
    spec = definition.spec
    spec.model.update_from_config(
        config=SimpleNamespace(parallelism=parallelism, training=training, debug=DebugConfig())
    )
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        ac_config=None,
        dump_folder="",
        compile_config=CompileConfig(enable=False),
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_states(buffer_device=None)
    load_hf(model, spec, starting_weights(definition, seed))
    model._skip_lm_head = True
    mesh = dims.get_optional_mesh("batch")  # None: every process sees all rows (tensor parallelism only)
    if mesh is None:
        return model, ALONE, dims.ep_enabled
    share = Share(index=mesh.get_local_rank(), count=mesh.size(), group=mesh.get_group())
    return model, share, dims.ep_enabled


def _optimizers(model: Decoder, config: OptimizerConfig) -> OptimizersContainer:
    built = default_adamw(lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)
    built.implementation = config.implementation
    optimizers = built.build(model_parts=[model])
    # The first state_dict() would make the moments by a step of length zero, which torch counts as a step:
    # saving before the first step would change the next ones. Made here once, and the count set back.
    optimizers.state_dict()
    for optimizer in optimizers:
        for state in optimizer.state.values():
            state["step"].zero_()
    return optimizers


def _schedulers(
    optimizers: OptimizersContainer, config: LRSchedulerConfig, steps: int
) -> tuple[LRSchedulersContainer, int | None]:
    total = config.total_steps or steps
    if config.warmup_steps > total:
        raise ConfigError(
            f"trainer.lr_scheduler.warmup_steps={config.warmup_steps} exceeds the schedule's {total} steps"
        )
    last_step = None if config.decay_ratio == 0 else total
    options = config.model_dump() | {"total_steps": last_step or _NO_END}
    schedule = LRSchedulersContainer.Config(**options)
    return schedule.build(optimizers=optimizers, training_steps=total), last_step
