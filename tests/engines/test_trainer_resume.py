"""Saving and loading the whole state of a trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forgelite.config import ModelConfig, TrainerConfig
from forgelite.config.loss import ClipLossConfig
from forgelite.scoring.reference import Reference
from forgelite.trainer.trainer import Trainer
from forgelite.types import StepResult
from tests.engines.tiny import model_config, one_each, save_llama, save_qwen3, sequences

pytestmark = pytest.mark.engine

CONFIG = TrainerConfig.model_validate(
    {
        "optimizer": {"lr": 1e-2, "weight_decay": 0.1},
        "lr_scheduler": {"warmup_steps": 3, "decay_ratio": None},
        "training": {"seq_len": 64},
    }
)
BATCHES = [one_each(sequences(seed=seed)) for seed in range(5)]


@pytest.fixture(scope="module", params=[save_llama, save_qwen3])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return model_config(request.param(tmp_path_factory.mktemp("model")))


def _trainer(model: ModelConfig) -> Trainer:
    return Trainer.build(model, CONFIG, ClipLossConfig(), steps=10)


def _metrics(result: StepResult) -> dict[str, float]:
    return {name: value for name, value in result.metrics.items() if not name.startswith("time/")}


@pytest.mark.parametrize("done", [0, 2])
def test_the_steps_after_a_resume_are_bit_for_bit_those_that_would_have_come(
    model: ModelConfig, tmp_path: Path, done: int
) -> None:
    straight, saved = _trainer(model), _trainer(model)
    for batch in BATCHES[:done]:
        straight.train_step(batch)
        saved.train_step(batch)
    saved.save(tmp_path / "state")
    resumed = _trainer(model)
    resumed.train_step(BATCHES[-1])  # whatever it did before is replaced
    resumed.load(tmp_path / "state")
    assert resumed.version == done
    for batch in BATCHES[done : done + 2]:
        expected = _metrics(straight.train_step(batch))
        assert _metrics(resumed.train_step(batch)) == expected
        assert _metrics(saved.train_step(batch)) == expected  # saving has not disturbed the one that saved
    weights = dict(straight.export_hf())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in resumed.export_hf())


def test_saving_again_replaces_the_state_and_leaves_nothing_else(model: ModelConfig, tmp_path: Path) -> None:
    trainer = _trainer(model)
    trainer.save(tmp_path / "state")
    trainer.train_step(BATCHES[0])
    trainer.save(tmp_path / "state")
    other = _trainer(model)
    other.load(tmp_path / "state")
    assert other.version == 1
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_loading_from_an_unfinished_save_is_an_error(model: ModelConfig, tmp_path: Path) -> None:
    (tmp_path / ".state.partial").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no trainer checkpoint"):
        _trainer(model).load(tmp_path / "state")


def test_the_exported_folder_is_the_trained_model(model: ModelConfig, tmp_path: Path) -> None:
    trainer = _trainer(model)
    trainer.train_step(BATCHES[0])
    trainer.save_hf(tmp_path / "hf")
    from_folder = Trainer.build(model_config(tmp_path / "hf"), CONFIG, ClipLossConfig(), steps=10)
    assert from_folder.evaluate(BATCHES[1]) == trainer.evaluate(BATCHES[1])


def test_trainer_and_reference_start_from_the_same_random_weights() -> None:
    model = ModelConfig(name="llama3", flavor="debugmodel", tokenizer="unused")
    batch = one_each(sequences(2))
    trainer = Trainer.build(model, CONFIG, ClipLossConfig(), steps=10, seed=3)
    logprobs = Reference.build(model, max_seq_len=64, seed=3).logprobs(batch)
    mean = -logprobs.sum().item() / batch.trained_tokens
    assert trainer.evaluate(batch) == pytest.approx(mean, rel=1e-5)
