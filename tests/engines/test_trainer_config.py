"""The trainer's keys are torchtitan's, and what does not work is refused before anything is built."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from forgelite.config import LossConfig, TrainerConfig
from forgelite.config.loss import ClipLossConfig, CrossEntropyLossConfig
from forgelite.config.trainer import LRSchedulerConfig, OptimizerConfig, ParallelismConfig, TrainingConfig
from forgelite.model.device import prepare_torchtitan

pytestmark = pytest.mark.engine


def _names_of(titan_class: type) -> set[str]:
    return {field.name for field in fields(titan_class)}


def test_every_key_exists_in_torchtitan_under_the_same_name() -> None:
    prepare_torchtitan()
    from torchtitan import config as titan
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer

    # torchtitan's default_adamw passes what is not its own on to torch's AdamW
    adamw = set(inspect.signature(torch.optim.AdamW).parameters)
    assert set(OptimizerConfig.model_fields) <= _names_of(OptimizersContainer.Config) | adamw
    assert set(LRSchedulerConfig.model_fields) <= _names_of(LRSchedulersContainer.Config)
    assert set(ParallelismConfig.model_fields) <= _names_of(titan.ParallelismConfig)
    assert set(TrainingConfig.model_fields) <= _names_of(titan.TrainingConfig)


def test_every_key_says_what_it_means() -> None:
    sections = (OptimizerConfig, LRSchedulerConfig, ParallelismConfig, TrainingConfig)
    for section in (*sections, ClipLossConfig, CrossEntropyLossConfig):
        assert all(field.description for field in section.model_fields.values()), section


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("parallelism", "pipeline_parallel_degree", 2, "pipeline parallelism is not supported"),
        ("parallelism", "context_parallel_degree", 2, "context parallelism is not supported"),
        ("parallelism", "spmd_backend", "spmd_types", "partial_dtensor"),
        ("parallelism", "data_parallel_shard_degree", 0, "at least 1, or -1"),
        ("optimizer", "betas", (0.9, 1.0), "betas are rates"),
        ("optimizer", "learning_rate", 1e-3, "Extra inputs are not permitted"),
        ("training", "mixed_precision_param", "float16", "float32"),
        ("training", "local_batch_size", 0, "greater than or equal to 1"),
        ("lr_scheduler", "decay_type", "step", "cosine"),
    ],
)
def test_what_does_not_work_is_refused(section: str, key: str, value: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainerConfig.model_validate({section: {key: value}})


def test_a_warm_up_longer_than_the_schedule_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"warmup_steps=20 exceeds trainer\.lr_scheduler\.total_steps=10"):
        TrainerConfig.model_validate({"lr_scheduler": {"warmup_steps": 20, "total_steps": 10}})


def test_a_loss_without_a_name_is_the_clipped_surrogate() -> None:
    assert TypeAdapter(LossConfig).validate_python({"clip_high": 0.3}) == ClipLossConfig(clip_high=0.3)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"name": "cross_entropy", "clip_low": 0.1}, r"cross_entropy\.clip_low\n.*Extra inputs"),
        ({"name": "ppo"}, r"'ppo'.*'clip', 'grpo'.*'cross_entropy'"),
        ({"clip_low": 1.5}, "less than 1"),
    ],
)
def test_an_unknown_loss_or_an_option_of_another_one_is_refused(loss: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(LossConfig).validate_python(loss)
