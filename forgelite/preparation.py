"""What is read and checked before any actor starts, so that a wrong input costs a second and not a minute."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from forgelite.checkpoint import checkpoint_step
from forgelite.config import (
    DataConfig,
    EndpointConfig,
    GRPOConfig,
    MetricsConfig,
    ModelConfig,
    ServeConfig,
    SFTConfig,
    import_object,
    to_yaml,
)
from forgelite.errors import ConfigError
from forgelite.launching import Stations, choose_device
from forgelite.loop.stations import ScoreGroup
from forgelite.losses import make_loss
from forgelite.observe.progress import make_progress
from forgelite.observe.recorder import Recorder, claim_folder
from forgelite.observe.recording import Record, RecordHeader, check_header, open_record
from forgelite.replay import check_replay
from forgelite.rollout.dataset import PromptStream, check_column, load_rows
from forgelite.rollout.demonstration import Demonstrations, demonstration
from forgelite.rollout.environment import EnvironmentFactory, SingleTurn
from forgelite.rollout.episode import Rollout, derive_seed
from forgelite.rollout.harness import Harness, HarnessRollout, load_harness
from forgelite.rollout.tokenizer import (
    Tokenizer,
    fingerprint,
    load_tokenizer,
    prompt_maker,
    read_model_type,
    read_vocab_size,
)
from forgelite.scoring.advantages import make_advantages
from forgelite.scoring.group import score_group
from forgelite.scoring.reward import load_reward
from forgelite.serving import Endpoint, open_endpoint
from forgelite.types import Prompt, SamplingParams, Trajectory

PROMPT_KINDS = (str, list)  # a text, or chat messages


@dataclass(kw_only=True, slots=True, frozen=True)
class Inputs:
    """What a GRPO run is made of, apart from its stations. Example: `inputs = prepare(config)`."""

    tokenizer: Tokenizer
    prompts: PromptStream
    held_out: Sequence[Prompt]  # empty: no evaluation
    sampling: SamplingParams
    environment: EnvironmentFactory
    harness: Harness | None  # in the place of the environment


def prepare(config: GRPOConfig) -> Inputs:
    """Read the tokenizer and the data, and find the user's code.

    Raises:
        ConfigError: a folder, a file or a function is missing, a dataset is empty, the tokenizer does not fit the
            model. The message names the key.
    """
    choose_device(config.mesh.device)
    check_metrics(config.metrics)
    # Both import and check what is the user's own; the stations make theirs again.
    make_loss(config.loss)
    make_advantages(config.advantage)
    for function in config.reward.functions:
        load_reward(function.path, name=function.name, weight=function.weight, timeout_s=function.timeout_s)
    tokenizer = open_tokenizer(config.model)
    to_prompt = prompt_maker(tokenizer, config.data.prompt)
    rows = load_rows(config.data.train, config.data.train_args, "data.train")
    check_column(rows, config.data.prompt, PROMPT_KINDS, "data.prompt")
    return Inputs(
        tokenizer=tokenizer,
        prompts=PromptStream(
            rows,
            to_prompt=to_prompt,
            seed=derive_seed(config.run.seed, "prompts"),
            shuffle=config.data.shuffle,
        ),
        held_out=_held_out(config.data, config.eval.max_prompts, tokenizer),
        sampling=_sampling(config, tokenizer),
        environment=(
            import_object(config.rollout.environment, "rollout.environment")
            if config.rollout.environment
            else SingleTurn
        ),
        harness=load_harness(config.rollout.harness, "rollout.harness") if config.rollout.harness else None,
    )


def open_tokenizer(model: ModelConfig) -> Tokenizer:
    """The tokenizer of `model`, checked against the model's vocabulary."""
    folder = model.path and Path(model.path)
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"model.path: there is no folder {folder}")
    vocab_size = read_vocab_size(folder) if folder is not None else None
    return load_tokenizer(model.tokenizer or model.path, vocab_size)


def open_recorder(
    config: GRPOConfig | SFTConfig,
    *,
    steps: int,
    rollouts_per_step: int | None = 0,
    checkpoint: Path | None = None,
    record: RecordHeader | None = None,
) -> Recorder:
    """Claim the run folder and open everything that is written there.

    Args:
        config: of the run.
        steps: of the whole run, for the display.
        rollouts_per_step: trajectories that are recorded; None: all.
        checkpoint: what the run goes on from, in its own folder; None: it is a new run.
        record: the header of the record that is written; None: there is none.
    """
    folder, metrics = Path(config.run.dir), config.metrics
    claim, moved = claim_folder(folder, resume=checkpoint is not None)
    recorder = Recorder(
        folder,
        config_yaml=to_yaml(config),
        config=config.model_dump(),
        progress=make_progress(metrics.progress, steps, str(folder)),
        tensorboard=metrics.tensorboard,
        wandb=metrics.wandb,
        rollouts_per_step=rollouts_per_step,
        record=record,
        first_step=0 if checkpoint is None else checkpoint_step(checkpoint),
        claim=claim,
    )
    if moved is not None:
        recorder.on_phase(f"an earlier run was in {folder}; it is in {moved} now")
    if checkpoint is not None:
        recorder.on_phase(f"resuming from {checkpoint}")
    return recorder


def record_header(config: GRPOConfig, tokenizer: Tokenizer) -> RecordHeader:
    """What the record of this run says of itself, and what one must say that this run is to train from."""
    return RecordHeader(
        model_type=read_model_type(config.model.path),
        vocab_size=read_vocab_size(config.model.path),
        tokenizer=fingerprint(tokenizer),
        temperature=config.policy.sampling.temperature,
        groups_per_step=config.loop.groups_per_step,
        group_size=config.loop.group_size,
        advantage=config.advantage.model_dump(mode="json"),
    )


def prepare_replay(config: GRPOConfig) -> Record:
    """Find the record of `loop.replay` and compare it with the configuration.

    Raises:
        ConfigError: there is none, it is too short, or it was made with another model, tokenizer or way of sampling.
            The message names the key.
    """
    choose_device(config.mesh.device)
    check_metrics(config.metrics)
    make_loss(config.loss)
    record = open_record(Path(config.loop.replay))
    check_header(record.header, record_header(config, open_tokenizer(config.model)), record.folder)
    check_replay(record, config)
    return record


def make_rollout(
    config: GRPOConfig,
    inputs: Inputs,
    stations: Stations,
    *,
    greedy: bool = False,
    endpoint: Endpoint | None = None,
) -> Rollout | HarnessRollout:
    """How the prompts of this run are rolled out.

    Args:
        config, inputs: of the run.
        stations: its policy generates.
        greedy: take the likeliest token at every place (held-out evaluation).
        endpoint: that `rollout.harness` talks to, see `open_rollout_endpoint`; None: there is no harness.

    Raises:
        ConfigError: `rollout.harness` is given and there is no endpoint.
    """
    sampling = inputs.sampling
    if greedy:
        sampling = dataclasses.replace(sampling, temperature=0.0)
    max_tokens = min(config.trainer.training.seq_len, stations.capabilities["max_model_len"])
    if inputs.harness is not None:
        if endpoint is None:
            raise ConfigError("rollout.harness needs an endpoint: open one with open_rollout_endpoint")
        return HarnessRollout(
            harness=inputs.harness,
            recorder=endpoint.recorder,
            base_url=endpoint.base_url,
            api_key=endpoint.api_key or "",
            sampling=sampling,
            seed=config.run.seed,
            max_tokens=max_tokens,
            timeout_s=config.rollout.timeout_s,
        )
    return Rollout(
        generator=stations.policy,
        tokenizer=inputs.tokenizer,
        sampling=sampling,
        seed=config.run.seed,
        max_tokens=max_tokens,
        environment=inputs.environment,
        max_turns=config.rollout.max_turns,
        timeout_s=config.rollout.timeout_s,
    )


@asynccontextmanager
async def open_rollout_endpoint(
    config: GRPOConfig, inputs: Inputs, stations: Stations
) -> AsyncIterator[Endpoint | None]:
    """The endpoint that `rollout.harness` talks to, on a free port of this machine; None where there is no harness."""
    if inputs.harness is None:
        yield None
        return
    async with open_endpoint(
        stations.policy.service,
        settings=EndpointConfig(port=0, recorded_sessions=0),
        tokenizer=inputs.tokenizer,
        sampling=inputs.sampling,
        max_model_len=stations.capabilities["max_model_len"],
        api_key=secrets.token_urlsafe(24),
        request_timeout_s=config.policy.request_timeout_s,
    ) as endpoint:
        yield endpoint


def prepare_serving(config: ServeConfig) -> tuple[Tokenizer, SamplingParams, str | None]:
    """Check what `apps.serve` serves.

    Returns:
        The tokenizer, what a request is sampled with where it says nothing, and the API key (None: none is asked for).

    Raises:
        ConfigError: as `prepare`, and the environment variable of the key is not set.
    """
    choose_device(config.mesh.device)
    variable = config.endpoint.api_key_env
    key = None if variable is None else os.environ.get(variable, "")
    if key == "":
        raise ConfigError(f"endpoint.api_key_env={variable}, but that environment variable is not set or empty")
    tokenizer = open_tokenizer(config.model)
    return tokenizer, _sampling(config, tokenizer), key


def make_scoring(config: GRPOConfig, stations: Stations) -> ScoreGroup:
    """How the groups of this run are scored: by its rewards, its reference and its way of computing advantages."""
    return partial(
        score_group,
        score=stations.rewards.score,
        reference=stations.reference.logprobs if stations.reference else None,
        advantage=config.advantage,
        filter_zero_variance=config.loop.filter_zero_variance,
        drop_group_on_failure=config.reward.on_failure == "drop_group",
    )


def _sampling(config: GRPOConfig | ServeConfig, tokenizer: Tokenizer) -> SamplingParams:
    wanted = config.policy.sampling
    stop = wanted.stop_token_ids
    if stop is None:
        if tokenizer.eos_token_id is None:
            raise ConfigError("policy.sampling.stop_token_ids: the tokenizer has no end-of-sequence token; give one")
        stop = [tokenizer.eos_token_id]
    return SamplingParams(
        max_tokens=wanted.max_tokens,
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        top_k=wanted.top_k,
        min_p=wanted.min_p,
        stop_token_ids=tuple(stop),
        stop=tuple(wanted.stop),
        ignore_eos=wanted.ignore_eos,
    )


def _held_out(data: DataConfig, most: int | None, tokenizer: Tokenizer) -> list[Prompt]:
    if data.eval is None:
        return []
    to_prompt = prompt_maker(tokenizer, data.prompt)
    rows = load_rows(data.eval, data.eval_args, "data.eval")[:most]
    check_column(rows, data.prompt, PROMPT_KINDS, "data.prompt")
    return [to_prompt(str(i), row) for i, row in enumerate(rows)]


def prepare_demonstrations(config: SFTConfig) -> tuple[Demonstrations, list[Trajectory]]:
    """Read what `apps.sft` trains on and is evaluated on.

    Returns:
        An endless stream of demonstrations, and the held-out ones (empty: no evaluation).

    Raises:
        ConfigError: as `prepare`.
    """
    choose_device(config.mesh.device)
    check_metrics(config.metrics)
    tokenizer, data = open_tokenizer(config.model), config.data
    if tokenizer.eos_token_id is None:
        raise ConfigError("model.tokenizer: it has no end-of-sequence token to end a demonstration with")
    rows = load_rows(data.train, data.train_args, "data.train")
    check_column(rows, data.prompt, PROMPT_KINDS, "data.prompt")
    check_column(rows, data.answer, (str,), "data.answer")
    stream = PromptStream(
        rows,
        to_prompt=prompt_maker(tokenizer, data.prompt),
        seed=derive_seed(config.run.seed, "prompts"),
        shuffle=data.shuffle,
    )
    make = partial(demonstration, tokenizer=tokenizer, column=data.answer, max_tokens=config.trainer.training.seq_len)
    held_out = [make(prompt) for prompt in _held_out(data, config.eval.max_prompts, tokenizer)]
    return Demonstrations(stream, make, rows=len(rows)), [d for d in held_out if d is not None]


def check_metrics(metrics: MetricsConfig) -> None:
    """Raise ConfigError if a place where metrics go is not installed."""
    if metrics.wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError("metrics.wandb=true, but wandb is not installed: pip install wandb")
