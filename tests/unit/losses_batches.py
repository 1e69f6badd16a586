"""Sequences for the tests of losses, and the ways to pack them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from forgelite.losses import BatchSize, LossInputs

VERSION = 7  # of the trainer


@dataclass(kw_only=True, slots=True)
class Sample:
    """One sequence. Numbers are float32, so that packing them loses nothing."""

    mask: torch.Tensor  # [T] bool
    logprobs: torch.Tensor  # [T]
    behaviour: torch.Tensor  # [T]
    proximal: torch.Tensor  # [T]
    reference: torch.Tensor  # [T]
    versions: torch.Tensor  # [T] int32
    advantage: float


def samples(count: int = 6, *, seed: int = 0, spread: float = 0.4) -> list[Sample]:
    """Sequences of 3 to 12 tokens in one to three turns. One has nothing to train, one an advantage of zero."""
    generator = torch.Generator().manual_seed(seed)

    def noise(length: int) -> torch.Tensor:
        return spread * torch.randn(length, generator=generator)

    made = []
    for i in range(count):
        length = int(torch.randint(3, 13, (), generator=generator))
        mask = torch.rand(length, generator=generator) > 0.35
        mask[0], mask[1] = False, True
        if i == 3:
            mask[:] = False
        base = (-2.5 + noise(length)).clamp(max=-0.5)
        logprobs = (base + noise(length)).clamp(max=-0.01)
        made.append(
            Sample(
                mask=mask,
                logprobs=logprobs,
                behaviour=base,
                proximal=logprobs + 0.1 * noise(length),
                reference=base + noise(length),
                versions=torch.randint(VERSION - 3, VERSION + 1, (length,), generator=generator, dtype=torch.int32),
                advantage=0.0 if i == 4 else float(torch.randn((), generator=generator)),
            )
        )
    return made


def size_of(chosen: Sequence[Sample]) -> BatchSize:
    """What the loss of these sequences is divided by."""
    return BatchSize(tokens=sum(int(s.mask.sum()) for s in chosen), sequences=sum(bool(s.mask.any()) for s in chosen))


def packed(
    chosen: Sequence[Sample], rows: Sequence[Sequence[int]], *, padding: int = 0, garbage: float = 0.0
) -> LossInputs:
    """Rows of whole sequences. Numbers at masked places and in the padding are `garbage`."""
    width = padding + max(sum(len(chosen[i].mask) for i in row) for row in rows)
    shape = (len(rows), width)
    columns = {name: torch.full(shape, garbage) for name in ("logprobs", "behaviour", "proximal", "reference")}
    advantages, mask = torch.full(shape, garbage), torch.zeros(shape, dtype=torch.bool)
    versions, ids = torch.full(shape, -1, dtype=torch.int32), torch.full(shape, -1, dtype=torch.int32)
    for r, row in enumerate(rows):
        start = 0
        for i in row:
            sample = chosen[i]
            place = slice(start, start + len(sample.mask))
            for name, column in columns.items():
                column[r, place] = getattr(sample, name).masked_fill(~sample.mask, garbage)
            advantages[r, place] = torch.where(sample.mask, sample.advantage, garbage)
            mask[r, place], versions[r, place], ids[r, place] = sample.mask, sample.versions, i
            start = place.stop
    return LossInputs(
        logprobs=columns["logprobs"].requires_grad_(),
        behaviour_logprobs=columns["behaviour"],
        proximal_logprobs=columns["proximal"],
        reference_logprobs=columns["reference"],
        advantages=advantages,
        mask=mask,
        versions=versions,
        sequence_ids=ids,
    )


def one_each(chosen: Sequence[Sample]) -> list[list[int]]:
    """Every sequence in a row of its own."""
    return [[i] for i in range(len(chosen))]


def gradients(inputs: LossInputs, count: int) -> list[torch.Tensor]:
    """For each sequence the gradient of its log-probabilities, [T]; empty if it is not in these rows."""
    return [inputs.logprobs.grad[inputs.sequence_ids == i] for i in range(count)]


def single(*, ratio: float, advantage: float, probability: float = 0.3, reference: float | None = None) -> LossInputs:
    """One token, sampled with a probability such that its ratio is `ratio`."""
    logprob = torch.tensor([[probability]], dtype=torch.float64).log()
    old = (logprob - torch.tensor(ratio, dtype=torch.float64).log()).float()
    one = torch.ones(1, 1)
    return LossInputs(
        logprobs=logprob.float().requires_grad_(),
        behaviour_logprobs=old,
        proximal_logprobs=old,
        advantages=advantage * one,
        mask=one.bool(),
        versions=VERSION * one.int(),
        sequence_ids=0 * one.int(),
        reference_logprobs=None if reference is None else reference * one,
    )
