"""From rewards to advantages: the keys below `advantage.`."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from forgelite.config.section import Section


class AdvantageConfig(Section):
    """From the rewards of a group to its advantages."""

    name: Literal["group_normalised", "group_centred", "leave_one_out", "reward", "custom"] = Field(
        "group_normalised",
        description="group_normalised: (r - mean) / (std + eps), as in GRPO; group_centred: r - mean, as in Dr.GRPO; "
        "leave_one_out: r - the mean of the others, as in RLOO; reward: r itself, as in REINFORCE++; custom: a "
        "function of the user",
    )
    eps: float = Field(1e-4, gt=0, description="added to the standard deviation, for advantage.name=group_normalised")
    path: str | None = Field(None, description="module:function from rewards to advantages, for advantage.name=custom")
    arguments: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of that function")
    kl_coefficient: float = Field(
        0.0, ge=0, description="the divergence from the reference that is taken off the reward; needs a reference"
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k1", description="estimator of that divergence, a token")

    @model_validator(mode="after")
    def _path_belongs_to_custom(self) -> Self:
        if self.name == "custom" and self.path is None:
            raise ValueError("advantage.name=custom needs advantage.path=module:function")
        if self.name != "custom" and (self.path is not None or self.arguments):
            raise ValueError(
                f"advantage.path={self.path} and advantage.arguments have no effect with advantage.name={self.name}: "
                "set advantage.name=custom"
            )
        return self
