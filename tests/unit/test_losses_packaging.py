"""Law 9: how the batch is padded, packed, split and dealt, and what stands at masked places, does not reach a loss."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forgelite.config.loss import CrossEntropyLossConfig
from forgelite.losses import BatchSize, LossInputs, LossOutput, make_loss
from tests.unit.losses_batches import VERSION, gradients, one_each, packed, samples, size_of
from tests.unit.losses_configs import ALL

CONFIGS = {**ALL, "cross_entropy": CrossEntropyLossConfig()}
CHOSEN = samples(6)
SIZE = size_of(CHOSEN)


def _run(name: str, inputs: LossInputs, size: BatchSize = SIZE) -> LossOutput:
    output = make_loss(CONFIGS[name])(inputs, size=size, trainer_version=VERSION)
    output.loss.backward()
    return output


def _numbers(parts: Sequence[LossOutput]) -> dict[str, float]:
    """Loss, sums and maxima of a whole batch from those of its parts."""
    found = {"loss": sum(p.loss.item() for p in parts)}
    found |= {f"sum/{k}": sum(p.sums[k].item() for p in parts) for k in parts[0].sums}
    return found | {f"max/{k}": max(p.maxima[k].item() for p in parts) for k in parts[0].maxima}


def _is_the_same(name: str, microbatches: Sequence[LossInputs], **tolerance: float) -> None:
    """The batch in these microbatches gives what it gives in one, with every sequence in a row of its own."""
    plain = packed(CHOSEN, one_each(CHOSEN))
    expected = _numbers([_run(name, plain)])
    found = _numbers([_run(name, inputs) for inputs in microbatches])
    assert found == pytest.approx(expected, **({"rel": 1e-5, "abs": 1e-6} | tolerance))
    wanted = gradients(plain, len(CHOSEN))
    for inputs in microbatches:
        for i, gradient in enumerate(gradients(inputs, len(CHOSEN))):
            if len(gradient):
                torch.testing.assert_close(gradient, wanted[i], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf"), -1e4, 1e30])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_numbers_at_masked_places_change_nothing(name: str, garbage: float) -> None:
    rows = [[0, 1], [2, 3, 4], [5]]
    clean, dirty = packed(CHOSEN, rows), packed(CHOSEN, rows, garbage=garbage)
    a, b = _run(name, clean), _run(name, dirty)
    assert _numbers([a]) == _numbers([b])
    assert torch.equal(clean.logprobs.grad, dirty.logprobs.grad)


@pytest.mark.parametrize("padding", [0, 7, 100])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_padding_changes_nothing(name: str, padding: int) -> None:
    _is_the_same(name, [packed(CHOSEN, one_each(CHOSEN), padding=padding, garbage=3.0)])


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(CONFIGS)),
    st.permutations(range(6)),
    st.lists(st.booleans(), min_size=5, max_size=5),
    st.lists(st.integers(0, 2), min_size=6, max_size=6),
)
def test_order_packing_and_split_change_nothing(
    name: str, order: list[int], new_row: list[bool], microbatch: list[int]
) -> None:
    rows = [[order[0]]]
    for i, starts_row in zip(order[1:], new_row, strict=True):
        if starts_row:
            rows.append([])
        rows[-1].append(i)
    parts = [[row for r, row in enumerate(rows) if microbatch[r] == part] for part in range(3)]
    _is_the_same(name, [packed(CHOSEN, part) for part in parts if part])


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_rank_with_nothing_to_train_adds_nothing_and_takes_part(name: str) -> None:
    empty = packed(CHOSEN, [[3], [0]])
    empty.mask[:] = False
    empty.sequence_ids += 100
    _is_the_same(name, [packed(CHOSEN, one_each(CHOSEN)), empty])
    assert torch.equal(empty.logprobs.grad, torch.zeros_like(empty.logprobs))


@pytest.mark.parametrize("name", list(CONFIGS))
def test_leaving_tokens_out_does_not_make_the_others_weigh_more(name: str) -> None:
    """The denominator counts the tokens and sequences before any correction, and is given from outside."""
    inputs = packed(CHOSEN, one_each(CHOSEN))
    whole = _run(name, inputs)
    half = packed(CHOSEN, one_each(CHOSEN))
    twice = _run(name, half, BatchSize(tokens=2 * SIZE.tokens, sequences=2 * SIZE.sequences))
    assert 2 * twice.loss.item() == pytest.approx(whole.loss.item(), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(2 * half.logprobs.grad, inputs.logprobs.grad)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_sequences_as_many_as_tokens_do_not_mix(name: str) -> None:
    """A number for each sequence that broadcasts against tokens instead goes unnoticed unless B equals T."""
    square = [s for s in samples(60, seed=5) if len(s.mask) == 6][:6]
    assert len(square) == 6
    together, alone = packed(square, one_each(square)), [packed([s], [[0]]) for s in square]
    size = size_of(square)
    _run(name, together, size)
    for row, inputs in enumerate(alone):
        _run(name, inputs, size)
        torch.testing.assert_close(together.logprobs.grad[row], inputs.logprobs.grad[0], rtol=1e-5, atol=1e-7)


def test_a_batch_without_any_trained_token_has_no_mean() -> None:
    with pytest.raises(ValueError, match="the batch has none: BatchSize\\(tokens=0"):
        BatchSize.of(torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2, 3, dtype=torch.int32))


def test_sequences_without_a_trained_token_are_not_counted() -> None:
    inputs = packed(CHOSEN, [[0, 1], [2, 3, 4], [5]])
    assert BatchSize.of(inputs.mask, inputs.sequence_ids) == SIZE
    assert SIZE.sequences == 5  # the fourth of six has none


def test_tensors_of_different_shapes_are_refused() -> None:
    inputs = packed(CHOSEN, one_each(CHOSEN))
    with pytest.raises(ValueError, match="advantages is"):
        LossInputs(
            logprobs=inputs.logprobs,
            behaviour_logprobs=inputs.behaviour_logprobs,
            advantages=inputs.advantages[:, :1],
            mask=inputs.mask,
            versions=inputs.versions,
            sequence_ids=inputs.sequence_ids,
        )
