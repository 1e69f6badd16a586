"""What stands at masked places, and how the batch is cut, does not reach a loss."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forgelite.config.loss import ClipLossConfig, CrossEntropyLossConfig
from forgelite.losses import LOSSES, LossInputs, LossOutput

CONFIGS = {
    "clip": ClipLossConfig(kl_coefficient=0.2),
    "cross_entropy": CrossEntropyLossConfig(),
}


def _inputs(mask: torch.Tensor, garbage: float) -> LossInputs:
    generator = torch.Generator().manual_seed(3)

    def numbers() -> torch.Tensor:
        return torch.randn(mask.shape, generator=generator).masked_fill(~mask, garbage)

    return LossInputs(
        logprobs=numbers().requires_grad_(),
        behaviour_logprobs=numbers(),
        advantages=numbers(),
        mask=mask,
        versions=torch.ones(mask.shape, dtype=torch.int32),
        sequence_ids=torch.zeros(mask.shape, dtype=torch.int32),
        reference_logprobs=numbers(),
    )


def _run(name: str, inputs: LossInputs, denominator: float) -> LossOutput:
    output = LOSSES[name](inputs, CONFIGS[name], denominator=denominator, trainer_version=1)
    output.loss.backward()
    return output


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf"), -1e4, 1e30])
@pytest.mark.parametrize("name", list(LOSSES))
def test_numbers_at_masked_places_change_nothing(name: str, garbage: float) -> None:
    mask = torch.rand(4, 6, generator=torch.Generator().manual_seed(1)) > 0.4
    clean, dirty = _inputs(mask, 0.0), _inputs(mask, garbage)
    a, b = _run(name, clean, 7), _run(name, dirty, 7)
    assert torch.equal(a.loss, b.loss)
    assert torch.equal(clean.logprobs.grad, dirty.logprobs.grad)
    assert {k: v.item() for k, v in a.sums.items()} == {k: v.item() for k, v in b.sums.items()}
    assert {k: v.item() for k, v in a.maxima.items()} == {k: v.item() for k, v in b.maxima.items()}


@pytest.mark.parametrize("name", list(LOSSES))
def test_without_a_trained_token_the_loss_is_zero_and_backward_runs(name: str) -> None:
    inputs = _inputs(torch.zeros(2, 3, dtype=torch.bool), float("nan"))
    output = _run(name, inputs, 5)
    assert output.loss.item() == 0.0
    assert torch.equal(inputs.logprobs.grad, torch.zeros(2, 3))


@pytest.mark.parametrize("name", list(LOSSES))
def test_a_batch_without_any_trained_token_has_no_mean(name: str) -> None:
    with pytest.raises(ValueError, match="averaged over 0 tokens"):
        _run(name, _inputs(torch.zeros(2, 3, dtype=torch.bool), 0.0), 0)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(list(LOSSES)), st.lists(st.integers(0, 2), min_size=8, max_size=8))
def test_the_shares_of_any_split_add_up_to_the_whole(name: str, assignment: list[int]) -> None:
    mask = torch.rand(8, 5, generator=torch.Generator().manual_seed(2)) > 0.3
    whole = _inputs(mask, 0.0)
    tokens = int(mask.sum())
    expected = _run(name, whole, tokens)

    loss, gradient = torch.zeros(()), torch.zeros(mask.shape)
    sums = {key: torch.zeros(()) for key in expected.sums}
    for part in set(assignment):
        rows = torch.tensor([i for i, chosen in enumerate(assignment) if chosen == part])
        inputs = LossInputs(
            logprobs=whole.logprobs.detach()[rows].requires_grad_(),
            behaviour_logprobs=whole.behaviour_logprobs[rows],
            advantages=whole.advantages[rows],
            mask=mask[rows],
            versions=whole.versions[rows],
            sequence_ids=whole.sequence_ids[rows],
            reference_logprobs=whole.reference_logprobs[rows],
        )
        output = _run(name, inputs, tokens)
        loss += output.loss.detach()
        gradient[rows] = inputs.logprobs.grad
        sums = {key: sums[key] + value for key, value in output.sums.items()}
    torch.testing.assert_close(loss, expected.loss.detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(gradient, whole.logprobs.grad)
    for key, value in expected.sums.items():
        torch.testing.assert_close(sums[key].float(), value.float(), rtol=1e-5, atol=1e-5)
