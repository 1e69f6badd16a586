"""What the trainer minimises: the keys below `loss.`.

One class a loss, chosen by `loss.name`, with only the options that this loss has. A new loss adds a class
here and a function in `forgelite/losses/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from forgelite.config.section import Section


class ClipLossConfig(Section):
    """PPO's clipped surrogate against the behaviour log-probabilities, with an optional KL term."""

    name: Literal["clip"] = Field(default="clip", description="which loss: clip, cross_entropy")
    clip_low: float = Field(
        default=0.2,
        ge=0,
        lt=1,
        description="a ratio below 1 - clip_low gives no gradient where the advantage is negative",
    )
    clip_high: float = Field(
        default=0.28,
        ge=0,
        description="a ratio above 1 + clip_high gives no gradient where the advantage is positive",
    )
    kl_coefficient: float = Field(
        default=0.0,
        ge=0,
        description="weight of the divergence from the reference; above 0 it needs a reference",
    )
    kl_estimator: Literal["k3"] = Field(default="k3", description="estimator of the divergence of a token")
    aggregation: Literal["token_mean"] = Field(
        default="token_mean",
        description="mean over the trained tokens of the whole batch, on all ranks together",
    )


class CrossEntropyLossConfig(Section):
    """Supervised fine-tuning: the mean negative log-probability of the trained tokens."""

    name: Literal["cross_entropy"] = Field(default="cross_entropy", description="which loss: clip, cross_entropy")
    aggregation: Literal["token_mean"] = Field(
        default="token_mean",
        description="mean over the trained tokens of the whole batch, on all ranks together",
    )


def _loss_name(value: Any) -> Any:  # pydantic hands over whatever the user wrote, or a finished config
    if isinstance(value, Mapping):
        return value.get("name", "clip")
    return getattr(value, "name", None)


LossConfig = Annotated[
    Annotated[ClipLossConfig, Tag("clip")] | Annotated[CrossEntropyLossConfig, Tag("cross_entropy")],
    Discriminator(_loss_name),
]
"""The type of a config's field `loss`. Without a `name` it is the clipped surrogate."""
