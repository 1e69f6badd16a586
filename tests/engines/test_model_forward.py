"""Log-probabilities of packed rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from forgelite.model.device import prepare_torchtitan
from tests.engines.tiny import VOCAB, model_config, one_each, pack_rows, save_llama, save_qwen3, sequences

pytestmark = pytest.mark.engine

CPU = torch.device("cpu")
SAMPLES = sequences()


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    prepare_torchtitan()
    from forgelite.model.build import build_model
    from forgelite.model.spec import define_model

    folder = tmp_path_factory.mktemp("model")
    save: Path = {"llama": save_llama, "qwen3": save_qwen3}[request.param](folder)
    return build_model(define_model(model_config(save), device=CPU, max_seq_len=64), 0, CPU)


def _score(model, batch, **options):
    from forgelite.model.forward import score_tokens

    return score_tokens(model, batch, **options)


def _by_sequence(values: torch.Tensor, batch) -> dict[int, torch.Tensor]:
    return {int(i): values[batch.sequence_ids == i] for i in batch.sequence_ids.unique() if i >= 0}


@pytest.mark.parametrize("rows", [[[0, 1, 2], [3, 4, 5, 6], [7]], [[7, 6, 5, 4, 3, 2, 1, 0]]])
def test_packed_sequences_have_the_logprobs_of_single_ones(model, rows: list[list[int]]) -> None:
    packed, single = pack_rows(SAMPLES, rows), one_each(SAMPLES)
    with torch.no_grad():
        ours = _by_sequence(_score(model, packed).logprobs, packed)
        theirs = _by_sequence(_score(model, single).logprobs, single)
    for i, expected in theirs.items():
        torch.testing.assert_close(ours[i], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy_are_those_of_the_tempered_softmax(model, temperature: float) -> None:
    from forgelite.model.attention import attention_masks

    batch = one_each(SAMPLES)
    with torch.no_grad():
        scores = _score(model, batch, temperature=temperature, with_entropy=True)
        masks = attention_masks(model, batch.positions)
        logits = model.lm_head(model(batch.token_ids, positions=batch.positions, attention_masks=masks))
    table = F.log_softmax(logits.double()[:, :-1] / temperature, dim=-1)
    mask = batch.loss_mask[:, 1:]
    logprobs = table.gather(2, batch.token_ids[:, 1:, None]).squeeze(2)
    entropy = -(table.exp() * table).sum(2)
    torch.testing.assert_close(scores.logprobs[:, 1:].double(), logprobs * mask, rtol=0, atol=1e-5)
    torch.testing.assert_close(scores.entropy[:, 1:].double(), entropy * mask, rtol=0, atol=1e-5)
    assert not scores.logprobs[:, 0].any()


def test_the_gradient_of_the_chosen_logprob_is_that_of_autograd() -> None:
    prepare_torchtitan()
    from forgelite.model.forward import _ChosenLogprobs

    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(6, VOCAB, generator=generator)).requires_grad_()
    targets = torch.randint(0, VOCAB, (6,), generator=generator)
    weights = torch.randn(6, generator=generator)
    logprobs, _ = _ChosenLogprobs.apply(logits, targets, 1 / 0.7, True)
    (ours,) = torch.autograd.grad((logprobs * weights).sum(), logits)
    precise = logits.detach().double().requires_grad_()
    table = F.log_softmax(precise / 0.7, dim=1)
    (theirs,) = torch.autograd.grad((table[range(6), targets] * weights).sum(), precise)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)


def test_logits_worked_on_in_pieces_give_the_same_numbers(model, monkeypatch: pytest.MonkeyPatch) -> None:
    from forgelite.model import forward

    def run() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        model.zero_grad()
        scores = _score(model, one_each(SAMPLES), with_entropy=True)
        scores.logprobs.sum().backward()
        return scores.logprobs.detach(), scores.entropy, model.norm.weight.grad.clone()

    whole = run()
    monkeypatch.setattr(forward, "_CHUNK", 7 * VOCAB)
    for piece, expected in zip(run(), whole, strict=True):
        torch.testing.assert_close(piece, expected, rtol=0, atol=1e-6)


def test_padding_tokens_do_not_change_the_logprobs(model) -> None:
    batch = pack_rows(SAMPLES, [[0, 1], [2]])
    other = replace(batch, token_ids=torch.where(batch.sequence_ids < 0, 17, batch.token_ids))
    with torch.no_grad():
        assert torch.equal(_score(model, batch).logprobs, _score(model, other).logprobs)


def test_a_batch_without_trained_tokens_runs_forward_and_backward(model) -> None:
    batch = one_each(SAMPLES)
    batch.loss_mask.zero_()
    model.zero_grad()
    scores = _score(model, batch, with_entropy=True)
    assert not scores.logprobs.any()
    scores.logprobs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_a_trained_first_token_is_an_error(model) -> None:
    batch = pack_rows(SAMPLES, [[0, 1]])
    batch.loss_mask[0, len(SAMPLES[0]["token_ids"])] = True
    with pytest.raises(ValueError, match="a trained token starts a sequence"):
        _score(model, batch)


def test_the_reference_gives_the_logprobs_of_the_trained_tokens(tmp_path: Path) -> None:
    from forgelite.model.build import build_model
    from forgelite.model.spec import define_model
    from forgelite.scoring.reference import Reference

    config = model_config(save_llama(tmp_path))
    model = build_model(define_model(config, device=CPU, max_seq_len=64), 0, CPU)
    batch = pack_rows(SAMPLES, [[0, 1, 2], [3, 4, 5, 6], [7]])
    with torch.no_grad():
        expected = _score(model, batch).logprobs
    for rows in (1, 2, 64):
        ours = Reference.build(config, max_seq_len=64, rows=rows).logprobs(batch)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
