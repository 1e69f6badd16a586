"""How the trainer trains: the keys below `trainer.`, named as torchtitan 0.3 names them.

Only options that work here exist. The defaults are those of reinforcement learning on one device in float32.
This module imports neither torch nor torchtitan, so that a config is checked before anything heavy is loaded.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from forgelite.config.section import Section


class OptimizerConfig(Section):
    """AdamW, built by torchtitan's `default_adamw`; the field names are torch's own."""

    lr: float = Field(default=1e-6, gt=0, description="Learning rate after the warm-up.")
    betas: tuple[float, float] = Field(
        default=(0.9, 0.95), description="Decay rates of the first and the second moment."
    )
    eps: float = Field(default=1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay.")
    implementation: Literal["for-loop", "foreach", "fused"] = Field(
        default="fused", description="How torch applies the update. All three give the same numbers."
    )

    @field_validator("betas")
    @classmethod
    def _betas_are_rates(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas are rates in [0, 1), not {betas}")
        return betas


class LRSchedulerConfig(Section):
    """Warm-up, plateau, decay: torchtitan's `LRSchedulersContainer`."""

    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear warm-up.")
    total_steps: int | None = Field(
        default=None, ge=1, description="Steps until the end of the decay. Null: the steps of the run."
    )
    decay_ratio: float | None = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of the steps in which the rate decays. 0: it stays constant after the warm-up. "
        "Null: it decays from the end of the warm-up.",
    )
    decay_type: Literal["linear", "sqrt", "cosine"] = Field(default="linear", description="Shape of the decay.")
    min_lr_factor: float = Field(
        default=0.0, ge=0, le=1, description="The rate at the end of the decay, as a share of optimizer.lr."
    )


class ParallelismConfig(Section):
    """How the model is spread over the trainer's processes: torchtitan's `ParallelismConfig`."""

    data_parallel_replicate_degree: int = Field(
        default=1, ge=1, description="Copies of the (sharded) model, each with its own rows."
    )
    data_parallel_shard_degree: int = Field(
        default=-1, description="Processes over which weights are sharded (FSDP). -1: all that are left."
    )
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = Field(
        default="default",
        description="Whether weights gathered for the forward pass are freed before the backward.",
    )
    tensor_parallel_degree: int = Field(default=1, ge=1, description="Processes over which each matrix is split.")
    enable_sequence_parallel: bool = Field(
        default=True, description="Shard activations along the sequence between tensor-parallel matrices."
    )
    expert_parallel_degree: int = Field(default=1, ge=1, description="Processes over which experts are dealt.")
    pipeline_parallel_degree: int = Field(default=1, description="Only 1: pipelines are not supported.")
    context_parallel_degree: int = Field(default=1, description="Only 1: packed rows are not split.")
    spmd_backend: Literal["partial_dtensor"] = Field(
        default="partial_dtensor",
        description="How sharded tensors are represented. torchtitan's own default, spmd_types, needs a "
        "torch newer than 2.13 for more than one process.",
    )

    @field_validator("pipeline_parallel_degree")
    @classmethod
    def _no_pipeline(cls, degree: int) -> int:
        if degree != 1:
            raise ValueError(f"pipeline parallelism is not supported: set 1, not {degree}")
        return degree

    @field_validator("context_parallel_degree")
    @classmethod
    def _no_context_parallelism(cls, degree: int) -> int:
        if degree != 1:
            raise ValueError(
                f"context parallelism is not supported (torchtitan has none for packed rows): set 1, not {degree}"
            )
        return degree

    @field_validator("data_parallel_shard_degree")
    @classmethod
    def _shard_degree_is_positive_or_the_rest(cls, degree: int) -> int:
        if degree != -1 and degree < 1:
            raise ValueError(f"the shard degree is at least 1, or -1 for all that are left, not {degree}")
        return degree


class TrainingConfig(Section):
    """The step itself: torchtitan's `TrainingConfig`."""

    local_batch_size: int = Field(
        default=8,
        ge=1,
        description="Packed rows in one microbatch of one data-parallel rank. Changes memory only.",
    )
    seq_len: int = Field(
        default=2048,
        ge=2,
        description="Tokens in a packed row, hence the longest sequence that can be trained.",
    )
    max_norm: float = Field(default=1.0, gt=0, description="Gradients are scaled down to this norm.")
    mixed_precision_param: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Type of the matrices in forward and backward; the weights themselves stay float32. "
        "bfloat16 pays on a GPU, and on a CPU from about six million parameters.",
    )


class TrainerConfig(Section):
    """Everything below `trainer.`."""

    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="AdamW.")
    lr_scheduler: LRSchedulerConfig = Field(default_factory=LRSchedulerConfig, description="Learning rate over time.")
    parallelism: ParallelismConfig = Field(default_factory=ParallelismConfig, description="Processes and sharding.")
    training: TrainingConfig = Field(default_factory=TrainingConfig, description="Microbatches, clipping, precision.")

    @model_validator(mode="after")
    def _warmup_fits_the_schedule(self) -> Self:
        schedule = self.lr_scheduler
        if schedule.total_steps is not None and schedule.warmup_steps > schedule.total_steps:
            raise ValueError(
                f"trainer.lr_scheduler.warmup_steps={schedule.warmup_steps} exceeds "
                f"trainer.lr_scheduler.total_steps={schedule.total_steps}"
            )
        return self


def check_schedule(trainer: TrainerConfig, steps: int) -> None:
    """Raise ValueError if the learning rate's schedule ends before the run (`loop.steps`) does."""
    schedule = trainer.lr_scheduler
    if schedule.total_steps is not None and schedule.decay_ratio != 0 and schedule.total_steps < steps:
        raise ValueError(
            f"trainer.lr_scheduler.total_steps={schedule.total_steps} ends the decay before loop.steps={steps} are done"
        )


def check_world_size(trainer: TrainerConfig, processes: int) -> None:
    """Raise ValueError if `trainer.parallelism` does not come to the trainer's processes (`mesh.trainer_processes`)."""
    parallelism = trainer.parallelism
    copies, shards = parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree
    matrices = parallelism.tensor_parallel_degree
    wanted = copies * matrices * max(shards, 1)
    if (processes % wanted if shards == -1 else processes - wanted) != 0:
        raise ValueError(
            f"trainer.parallelism asks for data_parallel_replicate_degree={copies} x "
            f"data_parallel_shard_degree={shards} x tensor_parallel_degree={matrices} processes, "
            f"but mesh.trainer_processes={processes}"
        )
