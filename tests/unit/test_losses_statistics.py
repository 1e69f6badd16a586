"""What is logged of a loss, and advantages whitened over the batch."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from forgelite.config.loss import ClipLossConfig, CrossEntropyLossConfig, CustomLossConfig, DecoupledPPOLossConfig
from forgelite.errors import ConfigError
from forgelite.losses import LossOutput, Surrogate, make_loss, whitened
from forgelite.trainer.metrics import step_metrics
from tests.unit.losses_batches import VERSION, one_each, packed, samples, size_of

CHOSEN = samples(6)
SIZE = size_of(CHOSEN)


def _inputs():
    return packed(CHOSEN, one_each(CHOSEN))


def _metrics(output: LossOutput) -> dict[str, float]:
    totals = {f"sum/{k}": v.item() for k, v in output.sums.items()}
    return step_metrics(totals | {f"max/{k}": v.item() for k, v in output.maxima.items()}, SIZE.tokens)


@pytest.mark.parametrize("config", [ClipLossConfig(), DecoupledPPOLossConfig()], ids=lambda c: c.name)
def test_the_logged_ratio_is_that_to_the_policy_that_sampled_whatever_the_anchor(config: ClipLossConfig) -> None:
    inputs = _inputs()
    metrics = _metrics(make_loss(config)(inputs, size=SIZE, trainer_version=VERSION))
    ratios = (inputs.logprobs.detach() - inputs.behaviour_logprobs)[inputs.mask].double().exp()
    assert metrics["ratio/mean"] == pytest.approx(ratios.mean().item(), rel=1e-5)
    assert metrics["ratio/max"] == pytest.approx(ratios.max().item(), rel=1e-5)
    ess = ratios.sum() ** 2 / (len(ratios) * ratios.square().sum())
    assert metrics["ratio/ess"] == pytest.approx(ess.item(), rel=1e-5)


def test_equal_logprobs_give_a_ratio_of_exactly_one() -> None:
    inputs = _inputs()
    inputs.behaviour_logprobs = inputs.logprobs.detach().clone()
    output = make_loss(ClipLossConfig())(inputs, size=SIZE, trainer_version=VERSION)
    assert output.sums["ratio"].item() == SIZE.tokens
    assert output.maxima["ratio"].item() == 1.0
    assert output.sums["clipped"].item() == 0


def test_the_mismatch_is_measured_on_tokens_of_the_trainer_s_own_version_only() -> None:
    inputs = _inputs()
    output = make_loss(ClipLossConfig())(inputs, size=SIZE, trainer_version=VERSION)
    own = inputs.mask & (inputs.versions == VERSION)
    gap = (inputs.logprobs.detach() - inputs.behaviour_logprobs)[own].abs()
    assert output.sums["mismatch_tokens"].item() == own.sum().item() > 0
    assert output.sums["mismatch"].item() == pytest.approx(gap.sum().item(), rel=1e-5)
    assert output.maxima["mismatch"].item() == pytest.approx(gap.max().item(), rel=1e-5)


def test_the_gap_is_logged_by_the_age_of_the_token() -> None:
    inputs = _inputs()
    metrics = _metrics(make_loss(ClipLossConfig())(inputs, size=SIZE, trainer_version=VERSION + 1))  # ages 1 to 4
    gap = (inputs.logprobs.detach() - inputs.behaviour_logprobs).double()
    for name, ages in {"1": (1,), "2_3": (2, 3), "4_7": (4,)}.items():
        chosen = inputs.mask & torch.isin(VERSION + 1 - inputs.versions, torch.tensor(ages))
        divergence = [math.exp(d) - 1 - d for d in gap[chosen].tolist()]
        assert metrics[f"mismatch/age_{name}/tokens"] == len(divergence) > 0
        assert metrics[f"mismatch/age_{name}/kl"] == pytest.approx(statistics.fmean(divergence), rel=1e-4)
    assert "mismatch/age_0/kl" not in metrics
    assert "mismatch/age_8_up/kl" not in metrics


def test_whitened_advantages_have_mean_zero_and_deviation_one_over_trained_tokens() -> None:
    inputs = packed(CHOSEN, [[0, 1], [2, 3, 4], [5]], garbage=float("nan"))
    values = whitened(inputs.advantages, inputs.mask)
    trained = values[inputs.mask].tolist()
    assert statistics.fmean(trained) == pytest.approx(0.0, abs=1e-6)
    assert statistics.stdev(trained) == pytest.approx(1.0, rel=1e-5)
    assert torch.equal(values[~inputs.mask], torch.zeros(int((~inputs.mask).sum())))


def test_whitening_keeps_the_order_of_advantages() -> None:
    inputs = _inputs()
    before, after = inputs.advantages[inputs.mask], whitened(inputs.advantages, inputs.mask)[inputs.mask]
    assert torch.equal(before.argsort(stable=True), after.argsort(stable=True))


@pytest.mark.parametrize("advantages", [[2.0], [2.0, 2.0, 2.0]])
def test_equal_advantages_whiten_to_zero(advantages: list[float]) -> None:
    values = torch.tensor([advantages])
    assert torch.equal(whitened(values, torch.ones_like(values, dtype=torch.bool)), torch.zeros_like(values))


def test_cross_entropy_is_the_mean_negative_logprob() -> None:
    inputs = _inputs()
    output = make_loss(CrossEntropyLossConfig())(inputs, size=SIZE, trainer_version=0)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-inputs.logprobs[inputs.mask].double().mean().item(), rel=1e-6)
    torch.testing.assert_close(inputs.logprobs.grad, -inputs.mask.float() / SIZE.tokens)


def test_a_kl_weight_without_a_reference_is_an_error() -> None:
    inputs = _inputs()
    inputs.reference_logprobs = None
    with pytest.raises(ValueError, match=r"loss\.kl_coefficient=0\.1 needs reference logprobs"):
        make_loss(ClipLossConfig(kl_coefficient=0.1))(inputs, size=SIZE, trainer_version=0)


def test_the_proximal_anchor_without_its_logprobs_is_an_error() -> None:
    inputs = _inputs()
    inputs.proximal_logprobs = None
    with pytest.raises(ValueError, match=r"loss\.anchor=proximal needs proximal_logprobs"):
        make_loss(DecoupledPPOLossConfig())(inputs, size=SIZE, trainer_version=0)


def squared(tokens, *, tau: float) -> Surrogate:  # named by its path below
    loss = -tokens.advantages * tokens.logprobs + tau * tokens.log_ratio.square()
    return Surrogate(per_token=loss, clipped=torch.zeros_like(tokens.mask))


def test_a_surrogate_of_the_user_s_is_found_by_its_path() -> None:
    config = CustomLossConfig(path=f"{__name__}:squared", arguments={"tau": 0.3}, uses_ratio=True)
    inputs = _inputs()
    loss = make_loss(config)(inputs, size=SIZE, trainer_version=VERSION).loss.item()
    ratio = (inputs.logprobs - inputs.behaviour_logprobs)[inputs.mask]
    expected = -(inputs.advantages * inputs.logprobs)[inputs.mask].sum() + 0.3 * ratio.square().sum()
    assert loss == pytest.approx(expected.item() / SIZE.tokens, rel=1e-5)


@pytest.mark.parametrize(
    ("path", "arguments", "message"),
    [
        ("nowhere:f", {}, r"loss\.path: cannot import nowhere"),
        ("math:nothing", {}, r"loss\.path: module math has no nothing"),
        ("math", {}, r"loss\.path: 'math' is not of the form package\.module:name"),
        ("math:pi", {}, r"loss\.path: math:pi is not a function"),
        (f"{__name__}:squared", {"tua": 1}, r"loss\.arguments=\{'tua': 1\} do not fit"),
    ],
)
def test_a_surrogate_that_cannot_be_used_is_an_error_that_names_the_key(
    path: str, arguments: dict, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_loss(CustomLossConfig(path=path, arguments=arguments, uses_ratio=True))
