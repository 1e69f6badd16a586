"""One optimizer step: what changes it, what does not, and what happens when it fails."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forgelite.config import ModelConfig, TrainerConfig
from forgelite.config.corrections import SequenceTIS, Veto
from forgelite.config.loss import (
    ClipLossConfig,
    CrossEntropyLossConfig,
    CustomLossConfig,
    DecoupledPPOLossConfig,
    GSPOLossConfig,
    LossConfig,
)
from forgelite.errors import ConfigError, TrainingDiverged
from forgelite.scoring.reference import Reference
from forgelite.trainer.trainer import Trainer
from forgelite.types import StepResult, TrainingBatch
from tests.engines.tiny import model_config, one_each, pack_rows, save_llama, save_qwen3, sequences

pytestmark = pytest.mark.engine

SAMPLES = sequences()
LOSS = ClipLossConfig(kl_coefficient=0.1)
RATE = 1e-2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return model_config(save_llama(tmp_path_factory.mktemp("llama")))


def _trainer(
    model: ModelConfig, loss: LossConfig = LOSS, steps: int = 100, temperature: float = 1.0, **sections: dict
) -> Trainer:
    defaults = {"optimizer": {"lr": RATE}, "training": {"seq_len": 100, "local_batch_size": 100}}
    return Trainer.build(
        model, TrainerConfig.model_validate(defaults | sections), loss, steps=steps, temperature=temperature
    )


def _weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.export_hf()}


def _gradients(trainer: Trainer, batch: TrainingBatch, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """The gradients of a step, taken when it is about to clip them."""
    parts, found = trainer._parts, {}

    def take(parameters: list, *_: object, **__: object) -> torch.Tensor:
        found.update({name: p.grad.clone() for name, p in parts.model.named_parameters()})
        return torch.tensor(1.0)

    with monkeypatch.context() as patch:
        patch.setattr("torchtitan.distributed.utils.clip_grad_norm_", take)
        trainer.train_step(batch)
    return found


PACKAGINGS: dict[str, tuple[Sequence[Sequence[int]], int]] = {
    "packed in three rows": ([[0, 1, 2], [3, 4, 5, 6], [7]], 100),
    "packed in one row": ([[0, 1, 2, 3, 4, 5, 6, 7]], 100),
    "rows in another order": ([[7], [5], [3], [1], [0], [2], [4], [6]], 100),
    "one row a microbatch": ([[i] for i in range(8)], 1),
    "uneven microbatches": ([[i] for i in range(8)], 3),
}


@pytest.mark.parametrize("packaging", list(PACKAGINGS))
@pytest.mark.parametrize("save", [save_llama, save_qwen3])
def test_packaging_changes_neither_loss_nor_gradients(
    save: object, packaging: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_config(save(tmp_path))
    rows, local_batch_size = PACKAGINGS[packaging]
    plain = _trainer(model)
    other = _trainer(model, training={"seq_len": 100, "local_batch_size": local_batch_size})
    expected = _gradients(plain, one_each(SAMPLES), monkeypatch)
    found = _gradients(other, pack_rows(SAMPLES, rows), monkeypatch)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-5)


BY_SEQUENCE = GSPOLossConfig(
    clip_low=0.3,
    clip_high=0.3,
    anchor="proximal",
    corrections=[SequenceTIS(cap=3.0), Veto(lowest=0.2)],
    whiten_advantages=True,
    kl_coefficient=0.1,
)


@pytest.mark.parametrize("packaging", list(PACKAGINGS))
def test_packaging_changes_nothing_in_a_loss_of_whole_sequences(
    model: ModelConfig, packaging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, local_batch_size = PACKAGINGS[packaging]
    other = _trainer(model, BY_SEQUENCE, training={"seq_len": 100, "local_batch_size": local_batch_size})
    expected = _gradients(_trainer(model, BY_SEQUENCE), one_each(SAMPLES), monkeypatch)
    found = _gradients(other, pack_rows(SAMPLES, rows), monkeypatch)
    assert max(gradient.abs().max().item() for gradient in expected.values()) > 1e-3
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-5)


def test_the_proximal_policy_is_the_one_of_a_forward_pass_before_the_step(model: ModelConfig) -> None:
    """Sampled by a policy that gave every token e^-1 of the probability: every weight is e, in every microbatch."""
    batch = pack_rows(SAMPLES, [[0, 1, 2], [3, 4, 5, 6], [7]])
    before_the_step = Reference.build(model, max_seq_len=100).logprobs(batch)
    batch = replace(batch, logprobs=before_the_step - 1.0)
    trainer = _trainer(model, DecoupledPPOLossConfig(), training={"seq_len": 100, "local_batch_size": 1})
    metrics = trainer.train_step(batch).metrics
    assert metrics["correction/weight_mean"] == pytest.approx(math.e, rel=1e-5)
    assert metrics["correction/weight_max"] == pytest.approx(math.e, rel=1e-4)
    assert metrics["ratio/clipped_tokens"] == 0  # the ratio to the proximal policy is 1


def test_a_loss_of_the_user_s_that_is_not_there_is_refused(model: ModelConfig) -> None:
    with pytest.raises(ConfigError, match=r"loss\.path: cannot import nowhere"):
        _trainer(model, CustomLossConfig(path="nowhere:f", uses_ratio=True))


def _metrics(result: StepResult) -> dict[str, float]:
    return {name: value for name, value in result.metrics.items() if not name.startswith("time/")}


@pytest.mark.parametrize("packaging", list(PACKAGINGS))
def test_packaging_does_not_change_the_metrics(model: ModelConfig, packaging: str) -> None:
    rows, local_batch_size = PACKAGINGS[packaging]
    other = _trainer(model, training={"seq_len": 100, "local_batch_size": local_batch_size})
    found = _metrics(other.train_step(pack_rows(SAMPLES, rows)))
    assert found == pytest.approx(_metrics(_trainer(model).train_step(one_each(SAMPLES))), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -1e4])
def test_numbers_at_masked_places_do_not_change_a_step(model: ModelConfig, garbage: float) -> None:
    rows = [[0, 1, 2], [3, 4, 5, 6], [7]]
    clean, dirty = _trainer(model), _trainer(model)
    assert _metrics(clean.train_step(pack_rows(SAMPLES, rows))) == _metrics(
        dirty.train_step(pack_rows(SAMPLES, rows, garbage=garbage))
    )
    expected = _weights(clean)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in _weights(dirty).items())


def test_metrics_have_the_documented_names(model: ModelConfig) -> None:
    metrics = _trainer(model).train_step(one_each(SAMPLES)).metrics
    assert set(metrics) == {
        *("loss/policy", "loss/kl_ref", "loss/entropy", "loss/grad_norm"),
        *("ratio/mean", "ratio/max", "ratio/clipped_fraction", "ratio/clipped_tokens", "ratio/ess"),
        *("mismatch/logprob_abs_mean", "mismatch/logprob_abs_max", "mismatch/tokens"),
        *("mismatch/age_0/kl", "mismatch/age_0/tokens"),
        *("tokens/trained", "time/train_s", "trainer/lr"),
    }


def test_tokens_of_an_older_version_have_no_mismatch(model: ModelConfig) -> None:
    trainer = _trainer(model)
    trainer.train_step(one_each(SAMPLES))
    metrics = trainer.train_step(one_each(SAMPLES)).metrics  # sampled by version 0, trained at version 1
    assert {name for name in metrics if name.startswith("mismatch/")} == {"mismatch/age_1/kl", "mismatch/age_1/tokens"}


def test_the_version_counts_completed_steps(model: ModelConfig) -> None:
    trainer = _trainer(model)
    versions = [trainer.version] + [trainer.train_step(one_each(SAMPLES)).version for _ in range(3)]
    assert versions == [0, 1, 2, 3]
    assert trainer.version == 3


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_at_equal_weights_the_ratio_is_one(model: ModelConfig, temperature: float) -> None:
    batch = pack_rows(SAMPLES, [[0, 1, 2, 3], [4, 5, 6, 7]])
    policy = Reference.build(model, max_seq_len=100, temperature=temperature)
    batch = replace(batch, logprobs=policy.logprobs(batch))
    metrics = _trainer(model, temperature=temperature).train_step(batch).metrics
    assert metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["ratio/max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["mismatch/logprob_abs_max"] < 1e-5
    assert metrics["ratio/clipped_tokens"] == 0


def test_training_on_demonstrations_lowers_their_held_out_loss(model: ModelConfig) -> None:
    trainer = _trainer(model, CrossEntropyLossConfig())
    batch = one_each(SAMPLES)
    before = trainer.evaluate(batch)
    losses = [trainer.train_step(batch).metrics["loss/cross_entropy"] for _ in range(10)]
    assert losses[0] == pytest.approx(before, rel=1e-5)
    assert trainer.evaluate(batch) < 0.5 * before


def test_an_evaluation_changes_nothing(model: ModelConfig) -> None:
    trainer = _trainer(model)
    before = _weights(trainer)
    trainer.evaluate(one_each(SAMPLES))
    assert all(torch.equal(tensor, before[name]) for name, tensor in _weights(trainer).items())


def test_gradients_are_clipped_and_the_norm_before_it_is_reported(model: ModelConfig) -> None:
    free = _trainer(model, training={"seq_len": 100, "max_norm": 1e6})
    norm = free.train_step(one_each(SAMPLES)).metrics["loss/grad_norm"]
    held = _trainer(model, training={"seq_len": 100, "max_norm": norm / 10})
    assert held.train_step(one_each(SAMPLES)).metrics["loss/grad_norm"] == pytest.approx(norm, rel=1e-5)
    moments = [state["exp_avg"] for optimizer in held._parts.optimizers for state in optimizer.state.values()]
    total = torch.stack([moment.square().sum() for moment in moments]).sum().sqrt() / (1 - 0.9)
    assert total.item() == pytest.approx(norm / 10, rel=1e-3)


def test_the_first_step_of_adamw_is_as_long_as_the_learning_rate(model: ModelConfig) -> None:
    trainer = _trainer(model)
    before = _weights(trainer)
    trainer.train_step(one_each(SAMPLES))
    moved = (_weights(trainer)["model.layers.0.mlp.up_proj.weight"] - before["model.layers.0.mlp.up_proj.weight"]).abs()
    assert moved.median().item() == pytest.approx(RATE, rel=1e-3)  # with its moments corrected for one step


def test_gradients_do_not_add_up_over_steps(model: ModelConfig) -> None:
    still = _trainer(model, optimizer={"lr": 1e-12})
    norms = [still.train_step(one_each(SAMPLES)).metrics["loss/grad_norm"] for _ in range(2)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_the_learning_rate_warms_up_stays_and_decays(model: ModelConfig) -> None:
    schedule = {"warmup_steps": 2, "decay_ratio": 0.5}
    trainer = _trainer(model, steps=8, lr_scheduler=schedule)
    batch = one_each(SAMPLES[:2])
    rates = [trainer.train_step(batch).metrics["trainer/lr"] / RATE for _ in range(8)]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 0.75, 0.5, 0.25])
    with pytest.raises(ConfigError, match="the learning-rate schedule ended at step 8"):
        trainer.train_step(batch)


def test_by_default_the_learning_rate_is_constant_and_never_ends(model: ModelConfig) -> None:
    trainer = _trainer(model, steps=1)
    batch = one_each(SAMPLES[:2])
    assert [trainer.train_step(batch).metrics["trainer/lr"] for _ in range(4)] == [RATE] * 4


def _state(trainer: Trainer) -> dict[str, torch.Tensor]:
    optimizer = trainer._parts.optimizers.state_dict()
    return _weights(trainer) | {k: v.clone() for k, v in optimizer.items() if isinstance(v, torch.Tensor)}


@pytest.mark.parametrize("name", ["advantages", "logprobs", "reference_logprobs"])
def test_a_step_that_diverges_leaves_everything_as_it_was(model: ModelConfig, name: str) -> None:
    trainer, undisturbed = _trainer(model), _trainer(model)
    good, bad = one_each(SAMPLES), one_each(SAMPLES)
    getattr(bad, name)[bad.loss_mask] = float("nan")
    trainer.train_step(good)
    undisturbed.train_step(good)
    before = _state(trainer)
    with pytest.raises(TrainingDiverged, match=r"step 2: .* weights are still those of version 1"):
        trainer.train_step(bad)
    after = _state(trainer)
    assert trainer.version == 1
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert _metrics(trainer.train_step(good)) == _metrics(undisturbed.train_step(good))


def test_a_step_that_fails_half_way_does_not_add_to_the_next_one(model: ModelConfig) -> None:
    one_row_at_a_time = {"seq_len": 100, "local_batch_size": 1}
    trainer, undisturbed = (_trainer(model, training=one_row_at_a_time) for _ in range(2))
    bad = one_each(SAMPLES)
    bad.loss_mask[-1, 0] = True
    with pytest.raises(ValueError, match="a trained token starts a sequence"):
        trainer.train_step(bad)
    good = one_each(SAMPLES)
    assert _metrics(trainer.train_step(good)) == _metrics(undisturbed.train_step(good))


def test_a_batch_without_trained_tokens_is_refused(model: ModelConfig) -> None:
    batch = one_each(SAMPLES)
    batch.loss_mask.zero_()
    with pytest.raises(ValueError, match="no trained token"):
        _trainer(model).train_step(batch)


def test_a_batch_with_rows_that_are_too_long_is_refused(model: ModelConfig) -> None:
    with pytest.raises(ValueError, match=r"rows of \d+ tokens, trainer.training.seq_len=20"):
        _trainer(model, training={"seq_len": 20}).train_step(pack_rows(SAMPLES, [list(range(8))]))


def test_more_processes_than_there_are_is_an_error(model: ModelConfig) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_degree.*one process"):
        _trainer(model, parallelism={"tensor_parallel_degree": 2})


def test_bfloat16_matrices_keep_float32_weights_and_nearly_the_same_loss(model: ModelConfig) -> None:
    exact = _trainer(model).train_step(one_each(SAMPLES)).metrics
    trainer = _trainer(model, training={"seq_len": 100, "mixed_precision_param": "bfloat16"})
    rough = trainer.train_step(one_each(SAMPLES)).metrics
    assert all(tensor.dtype == torch.float32 for _, tensor in trainer.export_hf())
    assert rough["loss/policy"] == pytest.approx(exact["loss/policy"], abs=0.05)
    assert rough["loss/policy"] != exact["loss/policy"]
