"""Losses: pure functions of tensors, put together by `make_loss` from the configuration.

    inputs ── tokens ──> surrogate ── x corrections ──> aggregation ──(+)──> loss
                └──────> divergence from the reference ──> aggregation ──┘

`docs/losses.md` lists all of them with their formulas and their keys.
"""

from __future__ import annotations

from forgelite.config.loss import CrossEntropyLossConfig, LossConfig
from forgelite.losses.cross_entropy import cross_entropy_loss
from forgelite.losses.inputs import BatchSize, Loss, LossInputs, LossOutput
from forgelite.losses.policy import make_policy_loss
from forgelite.losses.tokens import Correction, PolicyTokens, Surrogate
from forgelite.losses.whitening import whitened


def make_loss(config: LossConfig) -> Loss:
    """The loss of a configuration.

    Raises:
        ConfigError: a function of the user's cannot be imported, or does not take the arguments given.
    """
    return cross_entropy_loss if isinstance(config, CrossEntropyLossConfig) else make_policy_loss(config)


__all__ = [
    "BatchSize",
    "Correction",
    "Loss",
    "LossInputs",
    "LossOutput",
    "PolicyTokens",
    "Surrogate",
    "cross_entropy_loss",
    "make_loss",
    "whitened",
]
