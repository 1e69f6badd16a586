"""Losses against formulas written down once more, token by token in float64."""

from __future__ import annotations

import math

import pytest
import torch

from forgelite.config.loss import ClipLossConfig, CrossEntropyLossConfig
from forgelite.losses import LOSSES, LossInputs
from forgelite.losses.divergence import k3
from forgelite.losses.ratios import MAX_LOG_RATIO


def _inputs(seed: int = 0, rows: int = 5, length: int = 9, scale: float = 0.4) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)

    def noise() -> torch.Tensor:
        return scale * torch.randn(rows, length, generator=generator)

    base = -2.0 + noise()
    return LossInputs(
        logprobs=(base + noise()).requires_grad_(),
        behaviour_logprobs=base,
        advantages=torch.randn(rows, 1, generator=generator).expand(rows, length).clone(),
        mask=torch.rand(rows, length, generator=generator) > 0.3,
        versions=torch.randint(2, 5, (rows, length), generator=generator, dtype=torch.int32),
        sequence_ids=torch.arange(rows, dtype=torch.int32)[:, None].expand(rows, length),
        reference_logprobs=base + noise(),
    )


def _clip_by_hand(inputs: LossInputs, config: ClipLossConfig, tokens: int) -> tuple[float, torch.Tensor]:
    """Value and gradient of the clipped loss, one token at a time."""
    loss, gradient = 0.0, torch.zeros(inputs.logprobs.shape, dtype=torch.float64)
    for at in inputs.mask.nonzero().tolist():
        r, t = at
        new, old = inputs.logprobs[r, t].double().item(), inputs.behaviour_logprobs[r, t].double().item()
        advantage = inputs.advantages[r, t].double().item()
        ratio = math.exp(new - old)
        held = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        loss += -min(ratio * advantage, held * advantage)
        is_free = ratio * advantage <= held * advantage
        gradient[r, t] = -ratio * advantage if is_free else 0.0
        x = new - inputs.reference_logprobs[r, t].double().item()
        loss += config.kl_coefficient * (math.exp(-x) - 1 + x)
        gradient[r, t] += config.kl_coefficient * (1 - math.exp(-x))
    return loss / tokens, gradient / tokens


@pytest.mark.parametrize("kl_coefficient", [0.0, 0.3])
@pytest.mark.parametrize("bounds", [(0.2, 0.28), (0.0, 0.0), (0.5, 3.0)])
def test_the_clipped_loss_and_its_gradient_are_those_of_the_formula(
    bounds: tuple[float, float], kl_coefficient: float
) -> None:
    config = ClipLossConfig(clip_low=bounds[0], clip_high=bounds[1], kl_coefficient=kl_coefficient)
    inputs = _inputs()
    tokens = int(inputs.mask.sum())
    output = LOSSES["clip"](inputs, config, denominator=tokens, trainer_version=0)
    output.loss.backward()
    loss, gradient = _clip_by_hand(inputs, config, tokens)
    assert output.loss.item() == pytest.approx(loss, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(inputs.logprobs.grad.double(), gradient, rtol=1e-5, atol=1e-7)


def _single(ratio: float, advantage: float) -> LossInputs:
    one = torch.ones(1, 1)
    return LossInputs(
        logprobs=torch.full((1, 1), math.log(ratio) - 1.0).requires_grad_(),
        behaviour_logprobs=-one,
        advantages=advantage * one,
        mask=one.bool(),
        versions=one.int(),
        sequence_ids=one.int(),
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "has_gradient"),
    [
        (1.28 - 1e-4, 1.0, True),
        (1.28 + 1e-4, 1.0, False),
        (0.8 - 1e-4, 1.0, True),
        (0.8 + 1e-4, -1.0, True),
        (0.8 - 1e-4, -1.0, False),
        (1.28 + 1e-4, -1.0, True),
        (1.0, 0.0, False),
    ],
)
def test_the_gradient_ends_at_the_bound_on_the_side_of_the_advantage(
    ratio: float, advantage: float, has_gradient: bool
) -> None:
    inputs = _single(ratio, advantage)
    LOSSES["clip"](inputs, ClipLossConfig(), denominator=1, trainer_version=0).loss.backward()
    assert (inputs.logprobs.grad.item() != 0) == has_gradient


def test_the_ratio_follows_the_behaviour_logprobs() -> None:
    inputs, config = _inputs(), ClipLossConfig()
    gradients = []
    for shift in (0.0, 0.1):
        inputs.logprobs.grad = None
        inputs.behaviour_logprobs = inputs.behaviour_logprobs + shift
        LOSSES["clip"](inputs, config, denominator=10, trainer_version=0).loss.backward()
        gradients.append(inputs.logprobs.grad.clone())
    assert not torch.allclose(*gradients)


def test_equal_logprobs_give_a_ratio_of_exactly_one() -> None:
    inputs = _inputs()
    inputs.behaviour_logprobs = inputs.logprobs.detach().clone()
    tokens = int(inputs.mask.sum())
    output = LOSSES["clip"](inputs, ClipLossConfig(), denominator=tokens, trainer_version=0)
    assert output.sums["ratio"].item() == tokens
    assert output.maxima["ratio"].item() == 1.0
    assert output.sums["clipped"].item() == 0


def test_a_huge_ratio_stays_finite() -> None:
    inputs = _single(1.0, -1.0)
    inputs.behaviour_logprobs = torch.full((1, 1), -1e4)
    output = LOSSES["clip"](inputs, ClipLossConfig(), denominator=1, trainer_version=0)
    output.loss.backward()
    assert output.maxima["ratio"].item() == pytest.approx(math.exp(MAX_LOG_RATIO))
    assert inputs.logprobs.grad.item() == 0.0


@pytest.mark.parametrize("x", [-60.0, -3.0, -1e-3, 0.0, 1e-3, 3.0, 60.0])
def test_k3_is_never_negative_and_never_overflows(x: float) -> None:
    policy = torch.tensor([x], requires_grad=True)
    value = k3(policy, torch.zeros(1))
    value.backward()
    held = min(max(x, -MAX_LOG_RATIO), MAX_LOG_RATIO)
    assert value.item() == pytest.approx(math.exp(-held) - 1 + held, rel=1e-4, abs=1e-8)
    assert value.item() >= 0
    expected = 0.0 if abs(x) > MAX_LOG_RATIO else 1 - math.exp(-x)
    assert policy.grad.item() == pytest.approx(expected, rel=1e-4, abs=1e-7)


def test_cross_entropy_is_the_mean_negative_logprob() -> None:
    inputs = _inputs()
    tokens = int(inputs.mask.sum())
    output = LOSSES["cross_entropy"](inputs, CrossEntropyLossConfig(), denominator=tokens, trainer_version=0)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-inputs.logprobs[inputs.mask].double().mean().item(), rel=1e-6)
    torch.testing.assert_close(inputs.logprobs.grad, -inputs.mask.float() / tokens)


def test_the_mismatch_is_measured_on_tokens_of_the_trainers_own_version_only() -> None:
    inputs = _inputs()
    output = LOSSES["clip"](inputs, ClipLossConfig(), denominator=10, trainer_version=3)
    own = inputs.mask & (inputs.versions == 3)
    gap = (inputs.logprobs.detach() - inputs.behaviour_logprobs)[own].abs()
    assert output.sums["mismatch_tokens"].item() == own.sum().item() > 0
    assert output.sums["mismatch"].item() == pytest.approx(gap.sum().item(), rel=1e-5)
    assert output.maxima["mismatch"].item() == pytest.approx(gap.max().item(), rel=1e-5)


def test_a_kl_weight_without_a_reference_is_an_error() -> None:
    inputs = _inputs()
    inputs.reference_logprobs = None
    with pytest.raises(ValueError, match=r"loss\.kl_coefficient=0\.1 needs reference logprobs"):
        LOSSES["clip"](inputs, ClipLossConfig(kl_coefficient=0.1), denominator=1, trainer_version=0)


def test_tensors_of_different_shapes_are_refused() -> None:
    inputs = _inputs()
    with pytest.raises(ValueError, match="advantages is"):
        LossInputs(
            logprobs=inputs.logprobs,
            behaviour_logprobs=inputs.behaviour_logprobs,
            advantages=inputs.advantages[:, :1],
            mask=inputs.mask,
            versions=inputs.versions,
            sequence_ids=inputs.sequence_ids,
        )


def test_every_configured_loss_is_registered() -> None:
    configured = {c.model_fields["name"].default for c in (ClipLossConfig, CrossEntropyLossConfig)}
    assert configured == set(LOSSES)
