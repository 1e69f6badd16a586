"""The configuration of `apps.grpo`: its sections, and what must fit together across them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from forgelite.config.advantage import AdvantageConfig
from forgelite.config.loss import ClipLossConfig, CrossEntropyLossConfig, LossConfig
from forgelite.config.schema import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LoopConfig,
    MeshConfig,
    MetricsConfig,
    ModelConfig,
    PolicyConfig,
    ReferenceConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    WeightsConfig,
    check_policy_gpus,
)
from forgelite.config.section import Section
from forgelite.config.trainer import TrainerConfig, check_schedule, check_world_size

_DTYPES = {"float32": "float32", "float": "float32", "bfloat16": "bfloat16", "float16": "float16", "half": "float16"}


class GRPORunConfig(RunConfig):
    """Where a run writes, what makes it repeatable, and whether it goes on."""

    resume: bool = Field(False, description="go on from the newest checkpoint in run.dir, if there is one")


class GRPOMeshConfig(MeshConfig):
    """Processes, devices and deadlines."""

    policy_gpus: str | None = Field(
        None, description="GPUs of the policy, as in CUDA_VISIBLE_DEVICES; divided among policy.replicas"
    )
    reference_gpus: str | None = Field(None, description="GPUs of the reference")
    answer_timeout_s: float = Field(60.0, gt=0, description="a policy that leaves a short call unanswered is dead")


class GRPOEvalConfig(EvalConfig):
    """Held-out evaluation, greedy, by the version that the policy serves."""

    timeout_s: float = Field(600.0, gt=0, description="deadline of one evaluation")


class GRPOMetricsConfig(MetricsConfig):
    """What is written and shown."""

    rollouts_per_step: int | None = Field(16, ge=0, description="trajectories in rollouts.jsonl; null: all")


class UpdateConfig(Section):
    """How the policy takes new weights."""

    mode: Literal["in_flight", "drain", "abort", "barrier"] = Field(
        "in_flight",
        description="what an update does to running sequences. in_flight: swap between two engine steps, they go on; "
        "drain: let them end first, hold newcomers; abort: cut them and go on from their tokens; "
        "barrier: drain whole rollouts, so that generation and training take turns",
    )
    kv: Literal["recompute", "keep"] = Field(
        "recompute",
        description="the KV cache of running sequences after an in_flight update: recompute it or keep it",
    )
    drain_timeout_s: float = Field(
        300.0, gt=0, description="drain and barrier: how long running sequences may take to end; then the update fails"
    )

    @model_validator(mode="after")
    def _keeps_a_cache_that_is_there(self) -> UpdateConfig:
        if self.kv == "keep" and self.mode != "in_flight":
            raise ValueError(
                f"policy.update.kv=keep means nothing with policy.update.mode={self.mode}, which leaves no sequence "
                "with a KV cache: set policy.update.kv=recompute, or policy.update.mode=in_flight"
            )
        return self


class GRPOSamplingConfig(SamplingConfig):
    """How tokens are drawn that will be trained."""

    temperature: float = Field(
        1.0, ge=0.01, le=2, description="divides the logits before sampling; vLLM knows none below 0.01"
    )

    @model_validator(mode="after")
    def _can_be_trained(self) -> GRPOSamplingConfig:
        for name, value, off in (("top_p", self.top_p, 1.0), ("top_k", self.top_k, 0), ("min_p", self.min_p, 0.0)):
            if value != off:
                raise ValueError(
                    f"policy.sampling.{name}={value:g} samples from a truncated distribution, whose probabilities the "
                    f"trainer cannot compute: every ratio would be biased; leave it at {off:g}"
                )
        return self


class GRPOPolicyConfig(PolicyConfig):
    """The vLLM side."""

    sampling: GRPOSamplingConfig
    update: UpdateConfig = Field(default_factory=UpdateConfig)


class GRPOConfig(Section):
    """Everything that `apps.grpo` can be told."""

    run: GRPORunConfig
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    loop: LoopConfig
    policy: GRPOPolicyConfig
    reward: RewardConfig
    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig)
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    loss: LossConfig = Field(default_factory=ClipLossConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    mesh: GRPOMeshConfig = Field(default_factory=GRPOMeshConfig)
    eval: GRPOEvalConfig = Field(default_factory=GRPOEvalConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    metrics: GRPOMetricsConfig = Field(default_factory=GRPOMetricsConfig)

    @property
    def transfer_dtype(self) -> str:
        """The type in which weights travel, by torch's name."""
        return self.weights.transfer_dtype or _DTYPES[self.policy.engine["dtype"]]

    @model_validator(mode="after")
    def _fits_together(self) -> GRPOConfig:
        if self.model.path is None:
            raise ValueError("model.path is missing: the policy starts from a Hugging Face folder")
        check_schedule(self.trainer, self.loop.steps)
        check_world_size(self.trainer, self.mesh.trainer_processes)
        self._check_loss()
        self._check_staleness()
        self._check_record()
        self._check_weights()
        self._check_lengths()
        self._check_dtype()
        check_policy_gpus(self.mesh.policy_gpus, self.policy.replicas)
        if self.loop.batch_timeout_s <= self.rollout.timeout_s:
            raise ValueError(
                f"loop.batch_timeout_s={self.loop.batch_timeout_s:g} must be longer than "
                f"rollout.timeout_s={self.rollout.timeout_s:g}: else one rollout that hangs ends the run"
            )
        return self

    def _check_loss(self) -> None:
        loss, advantage = self.loss, self.advantage
        if isinstance(loss, CrossEntropyLossConfig):
            raise ValueError("loss.name=cross_entropy is for demonstrations (apps.sft), not for rewards")
        for section, weight in (("loss", loss.kl_coefficient), ("advantage", advantage.kl_coefficient)):
            if weight > 0 and not self.reference.enabled:
                raise ValueError(f"{section}.kl_coefficient={weight:g} needs reference.enabled=true")
        if loss.kl_coefficient > 0 and advantage.kl_coefficient > 0:
            raise ValueError(
                f"loss.kl_coefficient={loss.kl_coefficient} and advantage.kl_coefficient={advantage.kl_coefficient} "
                "count the same divergence twice: keep it in the loss or in the reward"
            )
        if loss.whiten_advantages and advantage.name == "group_normalised":
            raise ValueError(
                f"loss.whiten_advantages=true (loss.name={loss.name}) with advantage.name=group_normalised divides by "
                "a deviation twice: set advantage.name=reward, or group_centred for a baseline"
            )
        if loss.name == "dr_grpo" and advantage.name == "group_normalised":
            raise ValueError(
                "loss.name=dr_grpo does not divide by the deviation of a group: set advantage.name=group_centred "
                "(the default is group_normalised), or take loss.name=clip with loss.aggregation=constant"
            )

    def _check_staleness(self) -> None:
        loop, loss = self.loop, self.loss
        # At depth 0 what a batch leaves of a surplus is trained by a later version.
        asynchronous = loop.depth != 0 or loop.oversample > 1
        if asynchronous and loop.max_policy_age > 0 and not loss.corrects_gap:
            ahead = f"loop.oversample={loop.oversample:g}" if loop.depth == 0 else f"loop.depth={loop.depth or 'null'}"
            raise ValueError(
                f"{ahead} with loop.max_policy_age={loop.max_policy_age} trains on samples of older "
                f"versions, which loss.name={loss.name} with loss.anchor={loss.anchor} takes for its own: it has no "
                "ratio to them, no trust region and no correction. Set loss.corrections=[{name: token_tis}], take a "
                "loss with a ratio such as loss.name=clip, or set loop.max_policy_age=0"
            )
        if loop.group_deadline_s is not None and loop.group_deadline_s >= self.rollout.timeout_s:
            raise ValueError(
                f"loop.group_deadline_s={loop.group_deadline_s:g} must be shorter than rollout.timeout_s="
                f"{self.rollout.timeout_s:g}, at which members that are late fail anyway"
            )
        if loop.group_size == 1 and loop.filter_zero_variance:
            raise ValueError(
                "loop.group_size=1 with loop.filter_zero_variance=true filters every group: a group of one has no "
                "variance"
            )
        if loop.group_size == 1 and self.advantage.name not in ("reward", "custom"):
            raise ValueError(
                f"loop.group_size=1 with advantage.name={self.advantage.name} gives only advantages of zero: "
                "set advantage.name=reward"
            )

    def _check_record(self) -> None:
        loop = self.loop
        if loop.replay is not None and loop.generate_only:
            raise ValueError(
                "loop.replay trains without sampling, loop.generate_only samples without training: take one"
            )
        if loop.replay is not None and loop.record:
            raise ValueError("loop.replay with loop.record=true: what a replay trains is on record already")
        if loop.replay is not None and Path(self.run.dir).resolve() in (
            Path(loop.replay).resolve(),
            *Path(loop.replay).resolve().parents,
        ):
            raise ValueError(
                f"loop.replay={loop.replay} lies in run.dir={self.run.dir}, where this run writes: set another run.dir"
            )
        if loop.replay is not None and loop.max_policy_age > 0 and not self.loss.corrects_gap:
            raise ValueError(
                f"loop.replay with loop.max_policy_age={loop.max_policy_age} trains on samples of older versions, "
                f"which loss.name={self.loss.name} takes for its own: set loss.corrections=[{{name: token_tis}}], "
                "take a loss with a ratio such as loss.name=clip, or set loop.max_policy_age=0"
            )
        if loop.generate_only and (self.run.resume or self.checkpoint.every > 0):
            key = "run.resume=true" if self.run.resume else f"checkpoint.every={self.checkpoint.every}"
            raise ValueError(f"{key} with loop.generate_only=true: a run without a trainer has no checkpoint")

    def _check_weights(self) -> None:
        weights = self.weights
        if weights.swap == "zero_copy" and weights.carrier in ("torchstore", "filesystem"):
            raise ValueError(
                f"weights.swap=zero_copy with weights.carrier={weights.carrier}: only what lies in shared memory can "
                "be used in place; set weights.swap=copy or auto"
            )
        if weights.folder is not None and weights.carrier != "filesystem":
            raise ValueError(f"weights.folder={weights.folder} is for weights.carrier=filesystem only")

    def _check_lengths(self) -> None:
        seq_len, most = self.trainer.training.seq_len, self.policy.sampling.max_tokens
        if most >= seq_len:
            raise ValueError(
                f"policy.sampling.max_tokens={most} leaves no room for a prompt in trainer.training.seq_len={seq_len}"
            )
        window = self.policy.engine.get("max_model_len")
        if isinstance(window, int) and window > seq_len:
            raise ValueError(
                f"policy.engine.max_model_len={window} lets a sequence grow past "
                f"trainer.training.seq_len={seq_len}: it could not be trained"
            )
        rows = self.reference.row_length
        if rows is not None and rows < seq_len:
            raise ValueError(
                f"reference.row_length={rows} is shorter than trainer.training.seq_len={seq_len}: "
                "a long sequence would not fit"
            )

    def _check_dtype(self) -> None:
        dtype = self.policy.engine.get("dtype")
        if dtype not in _DTYPES:
            raise ValueError(f"policy.engine.dtype={dtype}: say float32, bfloat16 or float16; weights travel in it")
        if self.transfer_dtype != _DTYPES[dtype]:
            raise ValueError(
                f"weights.transfer_dtype={self.weights.transfer_dtype} differs from policy.engine.dtype={dtype}"
            )
