"""Where a gradient ends: bounds, signs, advantages of zero, ratios beyond every measure."""

from __future__ import annotations

import math

import pytest
import torch

from forgelite.config import loss
from forgelite.config.policy_loss import PolicyLossConfig
from forgelite.losses import BatchSize, LossInputs, LossOutput, make_loss
from forgelite.losses.divergence import DIVERGENCES
from forgelite.losses.tokens import MAX_LOG_RATIO
from tests.unit.losses_batches import VERSION, one_each, packed, samples, single, size_of
from tests.unit.losses_configs import SURROGATES

ONE = BatchSize(tokens=1, sequences=1)
NEAR = 1e-6


def _run(config: PolicyLossConfig, inputs: LossInputs) -> LossOutput:
    output = make_loss(config)(inputs, size=ONE, trainer_version=VERSION)
    output.loss.backward()
    return output


def _gradient(config: PolicyLossConfig, ratio: float, advantage: float, probability: float = 0.3) -> float:
    inputs = single(ratio=ratio, advantage=advantage, probability=probability)
    _run(config, inputs)
    return inputs.logprobs.grad.item()


def _changes(old: float, new: float) -> float:
    """The ratio that takes a probability from `old` to `new`."""
    return new / old


CLIP = loss.ClipLossConfig(clip_low=0.2, clip_high=0.28)
DUAL = loss.DualClipLossConfig(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
GSPO = loss.GSPOLossConfig(clip_low=0.2, clip_high=0.28)
GMPO = loss.GMPOLossConfig(clip_low=0.4, clip_high=0.4)


@pytest.mark.parametrize("config", [CLIP, DUAL, GSPO], ids=lambda c: c.name)
@pytest.mark.parametrize(
    ("ratio", "advantage", "has_gradient"),
    [
        (1.28 - NEAR, 1.0, True),
        (1.28 + NEAR, 1.0, False),
        (0.8 - NEAR, 1.0, True),
        (0.8 + NEAR, -1.0, True),
        (0.8 - NEAR, -1.0, False),
        (1.28 + NEAR, -1.0, True),
        (1.0, 0.0, False),
    ],
)
def test_clipping_ends_the_gradient_on_the_side_of_the_advantage(
    config: PolicyLossConfig, ratio: float, advantage: float, has_gradient: bool
) -> None:
    assert (_gradient(config, ratio, advantage) != 0) == has_gradient


@pytest.mark.parametrize(("ratio", "has_gradient"), [(3.0 - NEAR, True), (3.0 + NEAR, False)])
def test_dual_clipping_also_ends_it_where_a_bad_token_has_become_far_likelier(ratio: float, has_gradient: bool) -> None:
    assert (_gradient(DUAL, ratio, -1.0) != 0) == has_gradient
    assert _gradient(CLIP, ratio, -1.0) != 0


@pytest.mark.parametrize(
    ("ratio", "advantage", "has_gradient"),
    [
        (math.exp(0.4) - NEAR, 1.0, True),
        (math.exp(0.4) + NEAR, 1.0, False),
        (math.exp(-0.4) + NEAR, -1.0, True),
        (math.exp(-0.4) - NEAR, -1.0, False),
        (math.exp(-0.5), 1.0, True),
        (math.exp(0.5), -1.0, True),
    ],
)
def test_gmpo_clips_in_log_units(ratio: float, advantage: float, has_gradient: bool) -> None:
    assert (_gradient(GMPO, ratio, advantage) != 0) == has_gradient


TV = loss.DPPOTVLossConfig(threshold_low=0.2, threshold_high=0.2)
IPO = loss.IPOLossConfig(threshold=0.1, kl_tau=0.0)


@pytest.mark.parametrize(
    ("old", "new", "advantage", "has_gradient"),
    [
        (0.3, 0.5 - NEAR, 1.0, True),
        (0.3, 0.5 + NEAR, 1.0, False),
        (0.3, 0.01, 1.0, True),
        (0.5, 0.3 + NEAR, -1.0, True),
        (0.5, 0.3 - NEAR, -1.0, False),
        (0.3, 0.9, -1.0, True),
    ],
)
def test_dppo_tv_ends_the_gradient_where_the_probability_has_moved_too_far(
    old: float, new: float, advantage: float, has_gradient: bool
) -> None:
    assert (_gradient(TV, _changes(old, new), advantage, probability=new) != 0) == has_gradient


@pytest.mark.parametrize(
    ("old", "new", "advantage", "has_gradient"),
    [(0.3, 0.32, 1.0, True), (0.3, 0.7, 1.0, False), (0.7, 0.3, -1.0, False), (0.3, 0.7, -1.0, True)],
)
def test_dppo_kl_ends_the_gradient_in_the_direction_of_the_advantage_only(
    old: float, new: float, advantage: float, has_gradient: bool
) -> None:
    config = loss.DPPOKLLossConfig(threshold_low=0.05, threshold_high=0.05)
    assert (_gradient(config, _changes(old, new), advantage, probability=new) != 0) == has_gradient


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(
    ("old", "new", "has_gradient"), [(0.3, 0.4 - NEAR, True), (0.3, 0.4 + NEAR, False), (0.3, 0.2 - NEAR, False)]
)
def test_the_trust_region_of_ipo_is_the_same_for_both_signs(
    old: float, new: float, has_gradient: bool, advantage: float
) -> None:
    assert (_gradient(IPO, _changes(old, new), advantage, probability=new) != 0) == has_gradient


def test_ipo_still_pulls_back_a_token_that_it_drops() -> None:
    config = loss.IPOLossConfig(threshold=0.1, kl_tau=0.5)
    assert _gradient(config, 3.0, 1.0, probability=0.9) == pytest.approx(2 * 0.5 * math.log(3), rel=1e-5)


def test_a_rare_token_stays_in_the_region_though_its_ratio_has_doubled() -> None:
    assert _gradient(TV, 2.0, 1.0, probability=1e-3) == pytest.approx(-2.0, rel=1e-5)


@pytest.mark.parametrize("ratio", [1e-3, 0.5, 1.0, 2.0, 8.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("config", [loss.CISPOLossConfig(), loss.TOPRLossConfig(), loss.SAPOLossConfig()])
def test_some_losses_bound_a_gradient_but_never_take_it_away(
    config: PolicyLossConfig, ratio: float, advantage: float
) -> None:
    gradient = _gradient(config, ratio, advantage)
    assert gradient * advantage < 0
    assert abs(gradient) <= 5.0


def test_cispo_bounds_the_weight_at_one_plus_its_upper_bound() -> None:
    assert _gradient(loss.CISPOLossConfig(clip_high=4.0), 50.0, 1.0) == pytest.approx(-5.0)
    assert _gradient(loss.CISPOLossConfig(clip_low=0.2, clip_high=0.2), 0.5, 1.0) == pytest.approx(-0.8)


def test_topr_holds_bad_tokens_by_the_ratio_and_good_ones_not_at_all() -> None:
    config = loss.TOPRLossConfig()
    assert _gradient(config, 50.0, 1.0) == pytest.approx(-1.0)
    assert _gradient(config, 0.25, 1.0) == pytest.approx(-1.0)
    assert _gradient(config, 50.0, -1.0) == pytest.approx(1.0)
    assert _gradient(config, 0.25, -1.0) == pytest.approx(0.25, rel=1e-5)


def test_sapo_has_the_policy_gradient_at_a_ratio_of_one_and_its_value_is_two_over_tau() -> None:
    config = loss.SAPOLossConfig(tau_positive=1.6)
    inputs = single(ratio=1.0, advantage=2.0)
    assert _run(config, inputs).loss.item() == pytest.approx(-2.0 * 2 / 1.6)
    assert inputs.logprobs.grad.item() == pytest.approx(-2.0)


@pytest.mark.parametrize("name", [name for name in SURROGATES if name not in ("kimi", "ipo")])
def test_an_advantage_of_zero_teaches_nothing(name: str) -> None:
    for ratio in (0.1, 1.0, 10.0):
        inputs = single(ratio=ratio, advantage=0.0)
        assert _run(SURROGATES[name], inputs).loss.item() == 0.0
        assert inputs.logprobs.grad.item() == 0.0


@pytest.mark.parametrize("name", list(SURROGATES))
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_on_policy_every_loss_raises_what_was_good_and_lowers_what_was_bad(name: str, sign: float) -> None:
    config = SURROGATES[name].model_copy(update={"anchor": "behaviour", "corrections": []})
    if config.aggregation == "constant":
        config = config.model_copy(update={"constant_length": 1})
    gradient = _gradient(config, 1.0, sign * 1.5)
    weight = {"topr": 0.7 if sign > 0 else 1.3}.get(name, 1.0)
    assert gradient == pytest.approx(-sign * 1.5 * weight, rel=1e-5)


@pytest.mark.parametrize("behaviour", [-1e4, -1e38])
@pytest.mark.parametrize("name", list(SURROGATES))
def test_a_huge_ratio_gives_finite_numbers(name: str, behaviour: float) -> None:
    inputs = single(ratio=1.0, advantage=-1.0)
    inputs.behaviour_logprobs = torch.full((1, 1), behaviour if name not in ("kimi", "ipo") else -1e4)
    inputs.proximal_logprobs = inputs.logprobs.detach() - 1e4
    output = _run(SURROGATES[name], inputs)
    assert math.isfinite(output.loss.item())
    assert math.isfinite(inputs.logprobs.grad.item())
    assert output.maxima["ratio"].item() == pytest.approx(math.exp(MAX_LOG_RATIO))


def test_one_token_of_ratio_50_weighs_no_more_than_the_cap() -> None:
    config = loss.ReinforceLossConfig.model_validate({"corrections": [{"name": "token_tis", "cap": 2.0}]})
    assert _gradient(config, 50.0, 1.0) == pytest.approx(-2.0)


@pytest.mark.parametrize("name", list(DIVERGENCES))
@pytest.mark.parametrize("x", [-60.0, -3.0, -1e-3, 0.0, 1e-3, 3.0, 60.0])
def test_divergences_stay_finite_and_their_gradients_are_as_documented(name: str, x: float) -> None:
    policy = torch.tensor([x - 1.0], requires_grad=True)
    value = DIVERGENCES[name](policy, torch.tensor([-1.0]), policy.detach())  # on policy: rho is 1
    value.backward()
    held = min(max(x, -MAX_LOG_RATIO), MAX_LOG_RATIO)
    k3 = math.expm1(-held) + held
    k3_gradient = 0.0 if abs(x) > MAX_LOG_RATIO else 1 - math.exp(-x)
    values = {"k1": x, "k2": x * x / 2, "k3": k3, "k3_unbiased": k3}
    slopes = {"k1": 1.0, "k2": x, "k3": k3_gradient, "k3_unbiased": k3 + k3_gradient}
    assert value.item() == pytest.approx(values[name], rel=1e-4, abs=2e-7)
    assert policy.grad.item() == pytest.approx(slopes[name], rel=1e-4, abs=2e-7)
    if name in ("k2", "k3", "k3_unbiased"):
        assert value.item() >= 0


@pytest.mark.parametrize("x", [-2.0, -0.1, 0.5, 3.0])
def test_the_gradient_of_unbiased_k3_is_the_log_ratio_itself(x: float) -> None:
    """rho k3 + rho (1 - exp(-x)) = rho x; with rho detached it would be 1 - exp(-x) again."""
    policy = torch.tensor([x - 1.0], requires_grad=True)
    DIVERGENCES["k3_unbiased"](policy, torch.tensor([-1.0]), policy.detach() + 0.3).backward()
    assert policy.grad.item() == pytest.approx(math.exp(-0.3) * x, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", [n for n in SURROGATES if n not in ("reinforce", "sapo", "kimi", "decoupled_ppo")])
def test_the_tokens_of_the_formula_tests_lie_on_both_sides_of_the_bounds(name: str) -> None:
    chosen = samples()
    output = make_loss(SURROGATES[name])(
        packed(chosen, one_each(chosen)), size=size_of(chosen), trainer_version=VERSION
    )
    assert 0 < output.sums["clipped"].item() < size_of(chosen).tokens
