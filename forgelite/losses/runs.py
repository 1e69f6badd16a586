"""Sums over the sequences, or the turns, of packed rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from forgelite.losses.inputs import masked


@dataclass(kw_only=True, slots=True, frozen=True)
class Runs:
    """Tokens that stand next to each other in a row and belong together. A sequence never crosses the end of a row.

    Example, a row with sequences of three and two tokens and one of padding: `index=[[0, 0, 0, 1, 1, 2]]`.
    """

    index: torch.Tensor  # [R, L] int64, rising along the rows; 0 to R * L - 1
    mask: torch.Tensor  # [R, L] bool, True for tokens that are trained
    trained: torch.Tensor  # [R, L] float32, trained tokens of the run that a token is in, at least 1

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """For each token the sum over the trained tokens of its run.

        Args:
            values: [R, L] of a float type.

        Returns:
            [R, L]; tokens of one run have the same number, also those that are not trained.
        """
        return _spread_sums(masked(values, self.mask), self.index)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """As `total`, divided by the number of trained tokens; 0 in a run without any."""
        return self.total(values) / self.trained


def sequence_runs(sequence_ids: torch.Tensor, mask: torch.Tensor) -> Runs:
    """The sequences of packed rows.

    Args:
        sequence_ids: [R, L] of an integer type; equal in neighbours that belong to one sequence.
        mask: [R, L] bool, True for tokens that are trained.
    """
    return _runs(_changes(sequence_ids), mask)


def turn_runs(sequence_ids: torch.Tensor, mask: torch.Tensor) -> Runs:
    """The turns of packed rows: unbroken runs of trained tokens within a sequence. Arguments as `sequence_runs`."""
    return _runs(_changes(sequence_ids) | _changes(mask), mask)


def _changes(labels: torch.Tensor) -> torch.Tensor:
    starts = torch.ones_like(labels, dtype=torch.bool)  # a row starts a run
    starts[:, 1:] = labels[:, 1:] != labels[:, :-1]
    return starts


def _runs(starts: torch.Tensor, mask: torch.Tensor) -> Runs:
    # Runs are numbered where they lie: to number the ids instead, one would have to know how many there are, for
    # which a GPU would have to be waited for.
    index = starts.flatten().cumsum(0).view(starts.shape) - 1
    return Runs(index=index, mask=mask, trained=_spread_sums(mask.float(), index).clamp(min=1.0))


def _spread_sums(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    sums = values.new_zeros(values.numel()).index_add(0, index.flatten(), values.flatten())
    return sums[index]
