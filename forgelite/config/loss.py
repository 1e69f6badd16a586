"""What the trainer minimises: the keys below `loss.`.

An option belongs to the losses that use it (`_OPTIONS`); set beside another loss it is an error, not ignored.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from forgelite.config.section import Section

_OPTIONS = {
    "clip": {"clip_low", "clip_high", "kl_coefficient", "kl_estimator"},
    "cross_entropy": set(),
}


class LossConfig(Section):
    """Which loss, and its options. The function of the same name is in `forgelite.losses.LOSSES`."""

    name: Literal["clip", "cross_entropy"] = Field(
        default="clip",
        description="clip: PPO's clipped surrogate against the behaviour logprobs, with an optional KL term; "
        "cross_entropy: supervised, the negative logprob of the demonstration",
    )
    clip_low: float = Field(
        default=0.2,
        ge=0,
        lt=1,
        description="a ratio below 1 - clip_low gives no gradient where the advantage is negative (clip)",
    )
    clip_high: float = Field(
        default=0.28,
        ge=0,
        description="a ratio above 1 + clip_high gives no gradient where the advantage is positive (clip)",
    )
    kl_coefficient: float = Field(
        default=0.0,
        ge=0,
        description="weight of the divergence from the reference; above 0 it needs a reference (clip)",
    )
    kl_estimator: Literal["k3"] = Field(
        default="k3", description="estimator of the divergence, token by token (clip)"
    )
    aggregation: Literal["token_mean"] = Field(
        default="token_mean",
        description="mean over the trained tokens of the whole batch, on all ranks together",
    )

    @model_validator(mode="after")
    def _has_only_its_own_options(self) -> Self:
        foreign = sorted(
            name
            for name in set().union(*_OPTIONS.values()) - _OPTIONS[self.name]
            if getattr(self, name) != type(self).model_fields[name].default
        )
        if foreign:
            raise ValueError(
                f"loss.name={self.name} has no option {', '.join('loss.' + name for name in foreign)}"
            )
        return self
