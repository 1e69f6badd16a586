"""Value and gradient of every loss against its formula, written once more in float64."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from forgelite.config.corrections import TokenTIS
from forgelite.config.loss import ClipLossConfig, DecoupledPPOLossConfig, LossConfig, ReinforceLossConfig
from forgelite.config.policy_loss import PolicyLossConfig
from forgelite.losses import make_loss
from forgelite.losses.corrections import CORRECTIONS as CORRECTION_FUNCTIONS
from forgelite.losses.surrogates import SURROGATES as SURROGATE_FUNCTIONS
from tests.unit.losses_batches import VERSION, gradients, one_each, packed, samples, size_of
from tests.unit.losses_configs import ALL, CORRECTIONS, SURROGATES
from tests.unit.losses_reference import reference_loss


def _agrees(config: PolicyLossConfig, seed: int = 0, spread: float = 0.4) -> None:
    chosen = samples(seed=seed, spread=spread)
    inputs = packed(chosen, one_each(chosen))
    output = make_loss(config)(inputs, size=size_of(chosen), trainer_version=VERSION)
    output.loss.backward()
    value, expected = reference_loss(chosen, config)
    assert output.loss.item() == pytest.approx(value, rel=1e-5, abs=1e-6)
    for found, gradient in zip(gradients(inputs, len(chosen)), expected, strict=True):
        torch.testing.assert_close(found.double(), gradient, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", list(ALL))
def test_a_loss_and_its_gradient_are_those_of_the_formula(name: str, seed: int) -> None:
    _agrees(ALL[name], seed)


@pytest.mark.parametrize("spread", [0.01, 1.5])
@pytest.mark.parametrize("name", list(SURROGATES))
def test_a_loss_follows_its_formula_close_to_the_behaviour_policy_and_far_from_it(name: str, spread: float) -> None:
    _agrees(SURROGATES[name], spread=spread)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_every_aggregation_follows_its_formula(aggregation: str) -> None:
    length = 9 if aggregation == "constant" else None
    _agrees(ClipLossConfig(aggregation=aggregation, constant_length=length, kl_coefficient=0.1))


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_unbiased"])
def test_every_divergence_follows_its_formula(estimator: str) -> None:
    _agrees(ClipLossConfig(kl_coefficient=0.7, kl_estimator=estimator))


@pytest.mark.parametrize("name", [n for n, c in SURROGATES.items() if c.may_use_proximal])
def test_a_ratio_to_the_proximal_policy_is_weighed_by_the_rest_of_the_gap(name: str) -> None:
    weight = CORRECTIONS["sequence_tis" if SURROGATES[name].by_sequence else "token_tis"]
    _agrees(SURROGATES[name].model_copy(update={"anchor": "proximal", "corrections": [weight]}))


def test_decoupled_ppo_clips_the_proximal_ratio_and_caps_the_weight() -> None:
    """One token: log pi -1.0, proximal -1.3, behaviour -3.3: u = e^0.3 is clipped at 1.2, w = e^2 is capped at 5."""
    inputs = packed(samples(1), [[0]])
    inputs.mask[:] = False
    inputs.mask[0, 1] = True
    with torch.no_grad():
        inputs.logprobs[0, 1] = -1.0
    inputs.proximal_logprobs[0, 1], inputs.behaviour_logprobs[0, 1], inputs.advantages[0, 1] = -1.3, -3.3, 1.0
    size = size_of(samples(1))
    output = make_loss(DecoupledPPOLossConfig())(inputs, size=size, trainer_version=VERSION)
    output.loss.backward()
    assert output.loss.item() * size.tokens == pytest.approx(-5 * 1.2, rel=1e-6)
    assert inputs.logprobs.grad[0, 1].item() == 0.0


def test_decoupled_ppo_by_default_carries_its_weight() -> None:
    assert DecoupledPPOLossConfig().corrections == [TokenTIS(cap=5.0)]
    assert DecoupledPPOLossConfig().anchor == "proximal"


@pytest.mark.parametrize("name", [n for n, c in ALL.items() if c.corrects_gap])
def test_the_gradient_follows_the_behaviour_logprobs(name: str) -> None:
    """A ratio that is 1 whatever the tokens were sampled with would pass every other test on fresh samples."""
    chosen = samples()
    found = []
    for shift in (0.0, -0.5):
        inputs = packed(chosen, one_each(chosen))
        inputs.behaviour_logprobs = inputs.behaviour_logprobs + shift
        make_loss(ALL[name])(inputs, size=size_of(chosen), trainer_version=VERSION).loss.backward()
        found.append(inputs.logprobs.grad)
    assert not torch.allclose(*found)


def test_reinforce_alone_does_not_see_the_behaviour_logprobs() -> None:
    assert not ReinforceLossConfig().corrects_gap


def test_every_configured_loss_has_a_function_and_every_function_is_tested() -> None:
    tags = {variant.__metadata__[0].tag for variant in get_args(get_args(LossConfig)[0])}
    assert tags - {"custom", "cross_entropy"} == set(SURROGATE_FUNCTIONS) == set(SURROGATES)
    assert set(CORRECTION_FUNCTIONS) == set(CORRECTIONS)
