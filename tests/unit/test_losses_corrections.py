"""Corrections: which gap each looks at, how they combine, and what is counted."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from forgelite.config import corrections as c
from forgelite.config.loss import ClipLossConfig, ReinforceLossConfig
from forgelite.losses import LossInputs, LossOutput, make_loss
from forgelite.losses.corrections import CORRECTIONS
from forgelite.losses.tokens import MAX_LOG_RATIO, Correction, policy_tokens
from forgelite.trainer.metrics import step_metrics
from tests.unit.losses_batches import VERSION, one_each, packed, samples, size_of

CHOSEN = samples(6)
SIZE = size_of(CHOSEN)


def _row(gaps: list[float], mask: list[bool] | None = None, advantage: float = 1.0) -> LossInputs:
    """One sequence with the given gaps. The first token is not trained."""
    length = len(gaps) + 1
    trained = torch.tensor([[False, *(mask or [True] * len(gaps))]])
    behaviour = torch.full((1, length), -2.0)
    return LossInputs(
        logprobs=behaviour + torch.tensor([[0.0, *gaps]]),
        behaviour_logprobs=behaviour,
        advantages=torch.full((1, length), advantage),
        mask=trained,
        versions=torch.zeros((1, length), dtype=torch.int32),
        sequence_ids=torch.zeros((1, length), dtype=torch.int32),
    )


def _factors(name: str, inputs: LossInputs, **options: float) -> list[float]:
    correction = CORRECTIONS[name](policy_tokens(inputs, "behaviour"), **options)
    return correction.factor[inputs.mask].tolist()


def _run(*corrections: c.CorrectionConfig, inputs: LossInputs | None = None) -> tuple[LossOutput, LossInputs]:
    inputs = inputs or packed(CHOSEN, one_each(CHOSEN))
    output = make_loss(ReinforceLossConfig(corrections=list(corrections)))(inputs, size=SIZE, trainer_version=VERSION)
    output.loss.backward()
    return output, inputs


def test_a_product_of_ratios_is_not_their_geometric_mean() -> None:
    inputs = _row([0.095] * 100)
    assert _factors("geometric_tis", inputs, cap=1e4) == pytest.approx([1.0997] * 100, rel=1e-3)
    assert _factors("sequence_tis", inputs, cap=2e4) == pytest.approx([math.exp(9.5)] * 100, rel=1e-3)
    assert _factors("token_tis", inputs, cap=1e4) == pytest.approx([1.0997] * 100, rel=1e-3)


def test_turns_token_and_sequence_each_give_their_own_number() -> None:
    """Two turns with opposite gaps: over the whole sequence they cancel, within a turn they do not."""
    inputs = _row([0.3, 0.5, 0.0, -0.4, -0.4], mask=[True, True, False, True, True])
    up, down = math.exp(0.4), math.exp(-0.4)
    assert _factors("segment_tis", inputs, cap=5) == pytest.approx([up, up, down, down])
    assert _factors("geometric_tis", inputs, cap=5) == pytest.approx([1.0] * 4)
    assert _factors("token_tis", inputs, cap=5) == pytest.approx([math.exp(g) for g in (0.3, 0.5, -0.4, -0.4)])


def test_turns_of_neighbouring_sequences_are_not_one_turn() -> None:
    inputs = _row([0.4, 0.4, -0.4, -0.4])
    inputs.sequence_ids[0, 3:] = 1
    up, down = math.exp(0.4), math.exp(-0.4)
    assert _factors("segment_tis", inputs, cap=5) == pytest.approx([up, up, down, down])


@pytest.mark.parametrize(("gap", "factor"), [(math.log(2.0), 2.0), (math.log(2.0) + 1e-3, 2.0), (-3.0, math.exp(-3))])
def test_truncation_holds_a_weight_at_its_cap(gap: float, factor: float) -> None:
    assert _factors("token_tis", _row([gap]), cap=2.0) == pytest.approx([factor])


@pytest.mark.parametrize(("ratio", "factor"), [(0.49, 0.0), (0.51, 0.51), (4.99, 4.99), (5.01, 0.0)])
def test_icepop_leaves_a_token_out_of_bounds_out_and_weighs_the_others(ratio: float, factor: float) -> None:
    assert _factors("icepop", _row([math.log(ratio)]), low=0.5, high=5.0) == pytest.approx([factor], rel=1e-5)


def test_geometric_rejection_leaves_out_the_whole_sequence_and_weighs_nothing() -> None:
    assert _factors("geometric_rejection", _row([0.5, -0.5]), low=0.99, high=1.01) == [1.0, 1.0]
    assert _factors("geometric_rejection", _row([0.05, 0.05]), low=0.99, high=1.01) == [0.0, 0.0]


def test_one_hopeless_token_vetoes_its_sequence() -> None:
    assert _factors("veto", _row([0.0, -9.3, 0.0]), lowest=1e-4) == [0.0] * 3
    assert _factors("veto", _row([0.0, -9.1, 0.0]), lowest=1e-4) == [1.0] * 3
    assert _factors("veto", _row([0.0, -9.3, 0.0], mask=[True, False, True]), lowest=1e-4) == [1.0] * 2


@pytest.mark.parametrize(
    ("advantage", "drift", "kept"), [(-1.0, 0.09, 1.0), (-1.0, 0.11, 0.0), (0.0, 0.11, 1.0), (1.0, 5.0, 1.0)]
)
def test_opsm_leaves_out_bad_sequences_that_the_policy_has_left_behind(
    advantage: float, drift: float, kept: float
) -> None:
    assert _factors("opsm", _row([-drift] * 3, advantage=advantage), threshold=0.1) == [kept] * 3


def test_opsm_judges_a_sequence_by_the_mean_of_its_advantages() -> None:
    inputs = _row([-0.5] * 3)
    inputs.advantages = torch.tensor([[100.0, -3.0, 1.0, 1.0]])  # the first is not trained
    assert _factors("opsm", inputs, threshold=0.1) == [0.0] * 3


def test_opsm_looks_at_the_policy_now_also_where_the_loss_is_anchored_at_the_proximal_one() -> None:
    inputs = _row([-0.5] * 3, advantage=-1.0)
    inputs.proximal_logprobs = inputs.behaviour_logprobs.clone()  # no gap, but the policy has moved since
    correction = CORRECTIONS["opsm"](policy_tokens(inputs, "proximal"), threshold=0.1)
    assert correction.factor[inputs.mask].tolist() == [0.0] * 3


def test_no_cap_or_bound_lies_where_ratios_do_not_reach() -> None:
    assert c.LARGEST_WEIGHT < math.exp(MAX_LOG_RATIO) < c.LARGEST_WEIGHT + 1


def test_the_order_of_corrections_does_not_matter() -> None:
    chosen = (c.TokenTIS(cap=1.2), c.GeometricRejection(low=0.9, high=1.1), c.OPSM(threshold=0.05), c.Veto(lowest=0.4))
    results = [_run(*order) for order in itertools.permutations(chosen)]
    first, inputs = results[0]
    for output, other in results[1:]:
        assert output.loss.item() == pytest.approx(first.loss.item(), rel=1e-6)
        torch.testing.assert_close(other.logprobs.grad, inputs.logprobs.grad)


def test_a_correction_has_no_gradient() -> None:
    """d(w L) = w dL, although w is made of the same log-probabilities."""
    _, plain = _run()
    _, weighed = _run(c.TokenTIS(cap=1.2))
    gap = (plain.logprobs - plain.behaviour_logprobs).detach()
    expected = plain.logprobs.grad * gap.exp().clamp(max=1.2)
    torch.testing.assert_close(weighed.logprobs.grad, torch.where(plain.mask, expected, 0.0))


def test_a_token_that_is_left_out_does_not_change_the_gradient_of_the_others() -> None:
    _, plain = _run()
    output, masked = _run(c.GeometricRejection(low=0.9, high=1.1))
    kept = (masked.logprobs.grad != 0) & masked.mask
    assert 0 < output.sums["correction/geometric_rejection/masked"].item() < SIZE.tokens
    assert torch.equal(masked.logprobs.grad[kept], plain.logprobs.grad[kept])


def test_when_everything_is_left_out_the_loss_is_zero_and_it_is_counted() -> None:
    output, inputs = _run(c.GeometricRejection(low=1.0, high=1.0))
    assert output.loss.item() == 0.0
    assert torch.equal(inputs.logprobs.grad, torch.zeros_like(inputs.logprobs))
    metrics = step_metrics(_totals(output), SIZE.tokens)
    assert metrics["correction/geometric_rejection/masked_fraction"] == 1.0
    assert metrics["correction/ess"] == metrics["correction/weight_mean"] == 0.0


def test_a_token_that_is_left_out_may_have_an_infinite_loss() -> None:
    inputs = packed(CHOSEN, one_each(CHOSEN))
    inputs.behaviour_logprobs[0, 1] = 0.0
    with torch.no_grad():
        inputs.logprobs[0, 1] = float("-inf")
    output, _ = _run(c.IcePop(low=0.5, high=2.0), inputs=inputs)
    assert math.isfinite(output.loss.item())


def test_corrections_do_not_touch_the_divergence_from_the_reference() -> None:
    def divergence(*corrections: c.CorrectionConfig) -> float:
        config = ClipLossConfig(kl_coefficient=0.5, corrections=list(corrections))
        inputs = packed(CHOSEN, one_each(CHOSEN))
        return make_loss(config)(inputs, size=SIZE, trainer_version=VERSION).sums["kl_ref"].item()

    assert divergence(c.GeometricRejection(low=1.0, high=1.0)) == divergence()


def _totals(output: LossOutput) -> dict[str, float]:
    sums = {f"sum/{k}": v.item() for k, v in output.sums.items()}
    return sums | {f"max/{k}": v.item() for k, v in output.maxima.items()}


def test_the_metrics_of_corrections_are_those_of_their_weights() -> None:
    output, inputs = _run(c.TokenTIS(cap=1.2), c.Veto(lowest=0.6))
    gap = (inputs.logprobs.detach() - inputs.behaviour_logprobs).double()
    weights, vetoed, truncated = [], 0, 0
    for row, mask in zip(gap, inputs.mask, strict=True):
        ratios = row[mask].exp().tolist()
        lost = any(r < 0.6 for r in ratios)
        weights += [0.0 if lost else min(r, 1.2) for r in ratios]
        vetoed += len(ratios) if lost else 0
        truncated += sum(r > 1.2 for r in ratios)
    n = SIZE.tokens
    metrics = step_metrics(_totals(output), n)
    assert 0 < vetoed < n
    assert 0 < truncated < n
    assert metrics["correction/veto/masked_tokens"] == vetoed
    assert metrics["correction/veto/masked_fraction"] == pytest.approx(vetoed / n)
    assert metrics["correction/token_tis/truncated_tokens"] == truncated
    assert metrics["correction/weight_mean"] == pytest.approx(sum(weights) / n, rel=1e-5)
    assert metrics["correction/weight_max"] == pytest.approx(max(weights), rel=1e-6)
    assert metrics["correction/ess"] == pytest.approx(sum(weights) ** 2 / (n * sum(w * w for w in weights)), rel=1e-5)


def test_without_corrections_there_are_no_metrics_of_them() -> None:
    output, _ = _run()
    assert not [name for name in step_metrics(_totals(output), SIZE.tokens) if name.startswith("correction/")]


def halve(tokens, *, share: float) -> Correction:  # named by its path below
    return Correction(factor=torch.full_like(tokens.gap, share), truncated=torch.zeros_like(tokens.mask))


def test_a_correction_of_the_user_s_is_found_by_its_path() -> None:
    path = f"{__name__}:halve"
    custom = c.CustomCorrection(path=path, arguments={"share": 0.5}, weighs=True)
    output, _ = _run(custom)
    assert output.loss.item() == pytest.approx(0.5 * _run()[0].loss.item(), rel=1e-6)
    assert output.maxima["correction/weight"].item() == 0.5
    assert "correction/halve/masked" in output.sums
