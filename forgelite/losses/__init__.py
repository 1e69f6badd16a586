"""Losses: pure functions of tensors.

A new loss is one function with the signature of `Loss`, one entry in `LOSSES`, and its name and options in
`forgelite.config.loss`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from forgelite.config.loss import LossConfig
from forgelite.losses.clip import clip_loss
from forgelite.losses.cross_entropy import cross_entropy_loss
from forgelite.losses.inputs import LossInputs, LossOutput


class Loss(Protocol):
    """A share of the loss of a batch, from one microbatch of it."""

    def __call__(
        self, inputs: LossInputs, config: LossConfig, *, denominator: float, trainer_version: int
    ) -> LossOutput: ...


LOSSES: Mapping[str, Loss] = {"clip": clip_loss, "cross_entropy": cross_entropy_loss}

__all__ = ["LOSSES", "Loss", "LossInputs", "LossOutput", "clip_loss", "cross_entropy_loss"]
