"""The sections of the configuration, one class each. `grpo.py` and `sft.py` put them together for an app.

Every field carries its meaning, which `--help` prints. Checks that concern one section stand in it; checks across
sections stand in the app's class and name both keys.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from forgelite.config.section import Section


class RunConfig(Section):
    """Where a run writes and what makes it repeatable."""

    dir: str = Field(description="folder of this run: config, metrics, rollouts, checkpoints, summary")
    seed: int = Field(0, ge=0, description="every random number of the run derives from it")


class ModelConfig(Section):
    """Which model: a Hugging Face folder, or an architecture by torchtitan's names, or both if they agree."""

    path: str | None = Field(None, description="Hugging Face folder (config.json, safetensors, tokenizer)")
    name: str | None = Field(None, description="torchtitan's model name, such as qwen3")
    flavor: str | None = Field(None, description="torchtitan's flavor of that model, such as 0.6B")
    tokenizer: str | None = Field(None, description="folder of the tokenizer, where it is not model.path")

    @model_validator(mode="after")
    def _names_something(self) -> ModelConfig:
        if (self.name is None) != (self.flavor is None):
            raise ValueError("model.name and model.flavor go together")
        if self.path is None and self.name is None:
            raise ValueError("give model.path, or model.name and model.flavor")
        if self.path is None and self.tokenizer is None:
            raise ValueError("model.tokenizer is needed where model.path is not given")
        return self


class DataConfig(Section):
    """Prompts to train on and prompts held out. A source is a .jsonl file or `package.module:function`."""

    train: str = Field(description="rows to train on: a .jsonl file, or module:function that returns rows")
    train_args: dict[str, Any] = Field(default_factory=dict, description="arguments of that function")
    eval: str | None = Field(None, description="held-out rows, in the same form; none: no evaluation")
    eval_args: dict[str, Any] = Field(default_factory=dict, description="arguments of that function")
    prompt: str = Field("prompt", description="column with the prompt: text, or a list of chat messages")
    shuffle: bool = Field(True, description="draw the rows in a new order in every epoch, from run.seed")


class RolloutConfig(Section):
    """How a prompt becomes a trajectory."""

    environment: str | None = Field(
        None, description="module:function that makes an environment from the tokenizer; none: a single turn"
    )
    harness: str | None = Field(
        None,
        description="module:function, async, that plays a rollout against the OpenAI endpoint, in the place of an "
        "environment",
    )
    max_turns: int = Field(
        16, ge=1, description="most turns of one trajectory; then it ends with 'length' (a harness counts its own)"
    )
    timeout_s: float = Field(
        600.0, gt=0, description="deadline of the first turn of a group, and of all later ones; of a harness's rollout"
    )

    @model_validator(mode="after")
    def _is_played_by_one(self) -> RolloutConfig:
        if self.environment is not None and self.harness is not None:
            raise ValueError(
                f"rollout.environment={self.environment} and rollout.harness={self.harness} are two ways to play a "
                "rollout: give one"
            )
        return self


class LoopConfig(Section):
    """Pacing and staleness."""

    steps: int = Field(ge=0, description="optimizer steps of the run")
    depth: int | None = Field(
        1,
        ge=0,
        description="batches that generation may run ahead: 0 synchronous, K bounded (never more than max_policy_age, "
        "beyond which samples would be born too old), null an unbounded stream",
    )
    max_policy_age: int = Field(1, ge=0, description="oldest age, in versions, that the loss accepts")
    selection: Literal["fifo", "windowed", "freshest"] = Field(
        "windowed",
        description="which ready groups make a batch. fifo: the next ones in the order in which they started, a "
        "straggler holds the line; windowed: the oldest ready ones, a straggler may be overtaken (see window); "
        "freshest: the newest ready ones, old ones may wait until they are too old",
    )
    window: int | None = Field(
        None,
        ge=0,
        description="for selection=windowed: groups that may overtake a straggler before it holds the line; ages are "
        "then at most depth + (window + the surplus of oversample) / groups_per_step, rounded up; null: any number, "
        "max_policy_age alone bounds ages",
    )
    on_stale: Literal["drop_sample", "drop_group", "mask_tokens"] = Field(
        "drop_sample", description="what goes when a trajectory is too old: it, its group, or the old tokens"
    )
    reissue: bool = Field(
        True, description="sample the prompt of a group that was rejected whole, or cancelled as too old, once more"
    )
    sync_every: int = Field(1, ge=1, description="steps between two weight updates of the policy")
    groups_per_step: int = Field(16, ge=1, description="prompts in one batch")
    group_size: int = Field(8, ge=1, description="trajectories of each prompt")
    oversample: float = Field(
        1.0,
        ge=1,
        description="groups started for a batch of 1: at 1.25 a quarter more than it needs, so that it need not wait "
        "for its slowest groups; long answers are then trained less often",
    )
    surplus: Literal["keep", "cut"] = Field(
        "keep",
        description="groups still in flight beyond the pace when a batch is taken. keep: they go on and count for a "
        "later batch if they are young enough; cut: the oldest are cancelled. Finished groups are always kept",
    )
    complete_at: int | None = Field(
        None,
        ge=1,
        description="members of a group that must be scored; the others are cancelled (reason straggler), which trains "
        "long answers less often; null: all group_size",
    )
    group_deadline_s: float | None = Field(
        None,
        gt=0,
        description="seconds after which a group is complete with the members that are scored, as soon as there are "
        "two; null: no such deadline",
    )
    filter_zero_variance: bool = Field(True, description="leave out groups whose rewards are all equal")
    replace_filtered: bool = Field(
        True, description="sample other groups in the place of filtered ones; false: the batch is smaller by them"
    )
    max_groups_in_flight: int = Field(256, ge=1, description="most groups being sampled at once; caps depth")
    max_groups_queued: int = Field(1024, ge=1, description="most groups waiting; at depth null the oldest goes first")
    batch_timeout_s: float = Field(1800.0, gt=0, description="the run fails when a batch takes longer")
    record: bool = Field(
        False, description="write every trained batch to <run.dir>/record, from which loop.replay trains again"
    )
    replay: str | None = Field(
        None, description="train from the record of this run folder: no policy, rewards or reference is started"
    )
    generate_only: bool = Field(
        False, description="sample, score and record loop.steps batches by the starting weights; no trainer is started"
    )

    @property
    def surplus_groups(self) -> int:
        """Groups that are started beyond what the pace needs: the share of `oversample`, rounded up."""
        return math.ceil(round((self.oversample - 1) * self.groups_per_step, 6))  # 0.1 of 10 is 1.0000000000000009

    @model_validator(mode="after")
    def _policy_can_keep_up(self) -> LoopConfig:
        lag = self.sync_every - 1
        if self.depth is not None and lag > self.depth:
            raise ValueError(
                f"loop.sync_every={self.sync_every} leaves the policy {lag} versions behind, but "
                f"loop.depth={self.depth} allows {self.depth}: lower loop.sync_every or raise loop.depth"
            )
        if lag > self.max_policy_age:
            raise ValueError(
                f"loop.sync_every={self.sync_every} makes samples {lag} versions old, but "
                f"loop.max_policy_age={self.max_policy_age} would reject them all"
            )
        ahead = self.groups_per_step * ((self.depth or 0) + 1) + self.surplus_groups
        if self.max_groups_queued < ahead:
            raise ValueError(
                f"loop.max_groups_queued={self.max_groups_queued} does not hold what loop.depth={self.depth}, "
                f"loop.groups_per_step={self.groups_per_step} and loop.oversample={self.oversample:g} let run ahead: "
                f"it must be at least {ahead}"
            )
        return self

    @model_validator(mode="after")
    def _selection_makes_sense(self) -> LoopConfig:
        if self.window is not None and self.selection != "windowed":
            raise ValueError(f"loop.window={self.window} is for loop.selection=windowed, not {self.selection}")
        if self.depth is None and (self.selection == "fifo" or self.window is not None):
            raise ValueError(
                f"loop.depth=null with loop.selection={self.selection} and loop.window={self.window}: while a "
                "straggler holds the line, an unbounded stream pushes out what waits behind it; set loop.depth, or "
                "loop.selection=windowed with loop.window=null"
            )
        if self.oversample > 1 and (self.selection == "fifo" or self.window == 0):
            raise ValueError(
                f"loop.oversample={self.oversample:g} with loop.selection={self.selection} and loop.window="
                f"{self.window}: a surplus cannot overtake a straggler that holds the line; set "
                "loop.selection=windowed, with loop.window above 0 or null"
            )
        if self.oversample > 1 and self.depth is None:
            raise ValueError(
                f"loop.oversample={self.oversample:g} with loop.depth=null: an unbounded stream has no pace that could "
                "be exceeded; set loop.depth"
            )
        if self.surplus == "cut" and self.oversample == 1:
            raise ValueError("loop.surplus=cut with loop.oversample=1: there is no surplus; raise loop.oversample")
        if self.complete_at is not None and not min(2, self.group_size) <= self.complete_at <= self.group_size:
            raise ValueError(
                f"loop.complete_at={self.complete_at} of loop.group_size={self.group_size} members: it must be from 2 "
                "(one member has nothing to be compared with) to loop.group_size"
            )
        return self


class SamplingConfig(Section):
    """How tokens are drawn."""

    max_tokens: int = Field(ge=1, description="most new tokens of one turn")
    temperature: float = Field(
        1.0, ge=0, le=2, description="divides the logits before sampling, from 0.01; 0: the likeliest token"
    )
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus; 1: off")
    top_k: int = Field(0, ge=0, description="keep the k likeliest tokens; 0: off")
    min_p: float = Field(0.0, ge=0, le=1, description="drop tokens below this share of the likeliest; 0: off")
    stop_token_ids: list[int] | None = Field(
        None, description="tokens that end a turn; none given: the tokenizer's end-of-sequence token"
    )
    stop: list[str] = Field(default_factory=list, description="texts that end a turn; their tokens stay in it")
    ignore_eos: bool = Field(False, description="sample past the stop tokens, up to max_tokens (benchmarks)")

    @field_validator("stop")
    @classmethod
    def _stop_at_something(cls, stop: list[str]) -> list[str]:
        if not all(stop):
            raise ValueError("policy.sampling.stop holds an empty text, which every completion begins with")
        return stop

    @field_validator("temperature")
    @classmethod
    def _is_one_that_the_engine_knows(cls, temperature: float) -> float:
        if 0 < temperature < 0.01:
            raise ValueError(
                f"policy.sampling.temperature={temperature:g} is below 0.01, where vLLM samples at another one: set "
                "0.01, or 0 for the likeliest token"
            )
        return temperature


class PolicyConfig(Section):
    """The vLLM side."""

    replicas: int = Field(1, ge=1, description="engines behind one service, each in a process of its own")
    max_open_requests: int | None = Field(
        None, ge=1, description="requests that one replica is given at a time, more wait in the service; null: no limit"
    )
    sampling: SamplingConfig
    engine: dict[str, Any] = Field(
        default_factory=dict, description="passed to vLLM's EngineArgs, by vLLM's own names; it must hold dtype"
    )
    request_timeout_s: float = Field(300.0, gt=0, description="deadline of one generation request, waiting included")
    max_restarts: int = Field(
        3, ge=0, description="restarts of one replica within policy.restart_window_s; then it is given up"
    )
    restart_window_s: float = Field(1800.0, gt=0, description="a restart counts for so long against max_restarts")
    heartbeat_timeout_s: float = Field(
        5.0, gt=0, description="a replica that leaves a heartbeat (one a second) unanswered is replaced"
    )
    hang_timeout_s: float = Field(
        120.0, gt=0, description="a replica whose engine has work and makes no step for so long is replaced"
    )


class RewardFunctionConfig(Section):
    """One reward."""

    path: str = Field(description="module:function, sync or async; takes a RewardSample, returns a number")
    name: str | None = Field(None, description="its name in metrics; default: the function's name")
    weight: float = Field(1.0, description="its share in the sum")
    timeout_s: float = Field(10.0, gt=0, description="a sample that takes longer is a counted failure")


class RewardConfig(Section):
    """Rewards run in a process of their own."""

    functions: list[RewardFunctionConfig] = Field(min_length=1, description="the rewards that are added up")
    on_failure: Literal["drop_sample", "drop_group"] = Field(
        "drop_sample", description="what goes when a member fails: its rollout, its environment or a reward"
    )
    max_concurrency: int = Field(64, ge=1, description="calls of async rewards that run at the same time")
    max_threads: int = Field(4, ge=1, description="threads that call sync rewards")
    max_hung_threads: int = Field(
        16, ge=1, description="threads left behind by rewards that hang before the process is replaced"
    )

    @field_validator("functions")
    @classmethod
    def _distinct_names(cls, functions: list[RewardFunctionConfig]) -> list[RewardFunctionConfig]:
        names = [f.name or f.path.rpartition(":")[2] for f in functions]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise ValueError(f"reward.functions: two rewards are named {twice[0]}; give one a name")
        return functions


class ReferenceConfig(Section):
    """The frozen starting model."""

    enabled: bool = Field(False, description="compute the reference's logprobs, for loss/kl_ref and the KL term")
    row_length: int | None = Field(None, ge=2, description="tokens in a packed row; default: trainer.training.seq_len")


class WeightsConfig(Section):
    """How versions travel from the trainer to the policy."""

    carrier: Literal["auto", "shm", "rdma", "torchstore", "filesystem"] = Field(
        "auto",
        description="shm: shared memory of one host; rdma: from host to host by Monarch's RDMA buffers; torchstore: "
        "one packed key; filesystem: safetensors in weights.folder; auto: shm on one host, rdma on several; it is "
        "logged",
    )
    folder: str | None = Field(None, description="for carrier=filesystem; default: weights in the run folder")
    transfer_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="type in which weights travel; null: policy.engine.dtype"
    )
    swap: Literal["auto", "copy", "zero_copy"] = Field(
        "auto",
        description="copy: into the policy's parameters; zero_copy: the policy computes with the published version in "
        "place (CPU only); auto: zero_copy on a CPU, copy on a GPU; it is logged",
    )
    retain: int = Field(2, ge=1, description="committed versions that stay readable")
    fingerprint: bool = Field(True, description="compare a checksum of what was written and what was read")
    timeout_s: float = Field(120.0, gt=0, description="deadline of one publish or one update")


class StationConfig(Section):
    """What the processes of every app have in common."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where models compute; auto: cuda where torch sees a GPU, else cpu; it is logged"
    )
    cpu_threads: int = Field(1, ge=1, description="OpenMP threads of each process")
    setup_timeout_s: float = Field(300.0, gt=0, description="deadline for a station to build its engine")
    stop_timeout_s: float = Field(15.0, gt=0, description="deadline for the processes to stop")


class MeshConfig(StationConfig):
    """Processes, devices and deadlines."""

    trainer_gpus: str | None = Field(None, description="GPUs of the trainer, as in CUDA_VISIBLE_DEVICES")
    trainer_processes: int = Field(1, ge=1, description="processes of the trainer, one for each of its GPUs")
    call_timeout_s: float = Field(600.0, gt=0, description="deadline of one call to a station")


class EvalConfig(Section):
    """Held-out evaluation."""

    every: int = Field(10, ge=0, description="steps between two evaluations; 0: only before and after")
    max_prompts: int | None = Field(None, ge=1, description="at most so many held-out rows")


class CheckpointConfig(Section):
    """What a run can be resumed from."""

    every: int = Field(0, ge=0, description="steps between two checkpoints in <run.dir>/checkpoints; 0: none")
    keep: int = Field(2, ge=1, description="newest checkpoints that are kept")


class MetricsConfig(Section):
    """What is written and shown."""

    tensorboard: bool = Field(True, description="write tensorboard/ in the run folder")
    wandb: bool = Field(False, description="log to Weights & Biases as well (needs its login)")
    progress: Literal["auto", "live", "plain", "none"] = Field(
        "auto", description="live display, plain lines, or nothing; auto: live on a terminal"
    )


def check_policy_gpus(gpus: str | None, replicas: int) -> None:
    """Raise ValueError unless the GPUs of the policy (`mesh.policy_gpus`) divide among its replicas."""
    if gpus is not None and (count := len(gpus.split(","))) % replicas:
        raise ValueError(
            f"mesh.policy_gpus={gpus} names {count} GPUs, which do not divide among policy.replicas={replicas}"
        )
