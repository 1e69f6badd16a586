"""The configuration of `apps.sft`: its sections, and what must fit together across them."""

from __future__ import annotations

from pydantic import Field, model_validator

from forgelite.config.loss import CrossEntropyLossConfig
from forgelite.config.schema import DataConfig, EvalConfig, MeshConfig, MetricsConfig, ModelConfig, RunConfig
from forgelite.config.section import Section
from forgelite.config.trainer import TrainerConfig, check_schedule, check_world_size


class SFTDataConfig(DataConfig):
    """Demonstrations to train on and demonstrations held out."""

    answer: str = Field("answer", description="column with the demonstration")


class SFTLoopConfig(Section):
    """Pacing of supervised fine-tuning."""

    steps: int = Field(ge=1, description="optimizer steps")
    batch_size: int = Field(ge=1, description="demonstrations in one step")


class SFTConfig(Section):
    """Everything that `apps.sft` can be told."""

    run: RunConfig
    model: ModelConfig
    data: SFTDataConfig
    loop: SFTLoopConfig
    loss: CrossEntropyLossConfig = Field(default_factory=CrossEntropyLossConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    mesh: MeshConfig = Field(default_factory=MeshConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)

    @model_validator(mode="after")
    def _fits_together(self) -> SFTConfig:
        check_schedule(self.trainer, self.loop.steps)
        check_world_size(self.trainer, self.mesh.trainer_processes)
        return self
