"""What the trainer minimises: the keys below `loss.`.

One class a surrogate, chosen by `loss.name`, with only the options that it has besides those that all share. Its
function has the entry of the same name in `forgelite.losses.surrogates.SURROGATES` and takes the options as keyword
arguments. `grpo`, `dr_grpo`, `dapo`, `decoupled_ppo` and `reinforce_plus_plus` are presets: the clipped surrogate
with other defaults. Combinations that count the gap to the behaviour policy twice, or that cannot mean what their
names say, are refused here, with both keys named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from forgelite.config.corrections import CorrectionConfig, TokenTIS
from forgelite.config.policy_loss import (
    AGGREGATION,
    ANCHOR,
    CORRECTIONS,
    NAME,
    WHITEN,
    Aggregation,
    Anchor,
    PolicyLossConfig,
)
from forgelite.config.section import Section

_CLIP_LOW = "a ratio below 1 - clip_low gives no gradient where the advantage is negative"
_CLIP_HIGH = "a ratio above 1 + clip_high gives no gradient where the advantage is positive"


class ReinforceLossConfig(PolicyLossConfig):
    """The policy gradient without a ratio."""

    accounts_for_gap: ClassVar[bool] = False

    name: Literal["reinforce"] = Field(default="reinforce", description=NAME)


class ClipLossConfig(PolicyLossConfig):
    """PPO's clipped surrogate with two bounds."""

    may_use_proximal: ClassVar[bool] = True

    name: Literal["clip"] = Field(default="clip", description=NAME)
    clip_low: float = Field(default=0.2, ge=0, lt=1, description=_CLIP_LOW)
    clip_high: float = Field(default=0.28, ge=0, description=_CLIP_HIGH)


class GRPOLossConfig(ClipLossConfig):
    """GRPO: one bound for both sides, every sequence counts the same. Advantages: group_normalised."""

    name: Literal["grpo"] = Field(default="grpo", description=NAME)
    clip_high: float = Field(default=0.2, ge=0, description=_CLIP_HIGH)
    aggregation: Aggregation = Field(default="sequence_mean", description=AGGREGATION)


class DrGRPOLossConfig(ClipLossConfig):
    """Dr.GRPO: divided by a constant length, so that length gives no advantage. Advantages: group_centred."""

    name: Literal["dr_grpo"] = Field(default="dr_grpo", description=NAME)
    clip_high: float = Field(default=0.2, ge=0, description=_CLIP_HIGH)
    aggregation: Aggregation = Field(default="constant", description=AGGREGATION)


class DAPOLossConfig(ClipLossConfig):
    """DAPO: a higher upper bound, every token counts the same (with loop.filter_zero_variance=true)."""

    name: Literal["dapo"] = Field(default="dapo", description=NAME)


class DecoupledPPOLossConfig(ClipLossConfig):
    """Decoupled PPO: the ratio to the proximal policy is clipped, the gap to the behaviour policy a capped weight."""

    name: Literal["decoupled_ppo"] = Field(default="decoupled_ppo", description=NAME)
    anchor: Anchor = Field(default="proximal", description=ANCHOR)
    corrections: list[CorrectionConfig] = Field(
        default_factory=lambda: [TokenTIS(cap=5.0)],
        description=CORRECTIONS,
    )
    clip_high: float = Field(default=0.2, ge=0, description=_CLIP_HIGH)


class ReinforcePlusPlusLossConfig(ClipLossConfig):
    """REINFORCE++: advantages whitened over the batch. Advantages: reward, or group_centred for its variant."""

    name: Literal["reinforce_plus_plus"] = Field(default="reinforce_plus_plus", description=NAME)
    clip_high: float = Field(default=0.2, ge=0, description=_CLIP_HIGH)
    whiten_advantages: bool = Field(default=True, description=WHITEN)


class DualClipLossConfig(ClipLossConfig):
    """The clipped surrogate with a largest loss where the advantage is negative."""

    name: Literal["dual_clip"] = Field(default="dual_clip", description=NAME)
    clip_high: float = Field(default=0.2, ge=0, description=_CLIP_HIGH)
    dual_clip: float = Field(
        default=3.0, gt=1, description="a ratio above it gives no gradient where the advantage is negative"
    )


class CISPOLossConfig(PolicyLossConfig):
    """The policy gradient weighed by a clipped ratio: no token loses its gradient."""

    may_use_proximal: ClassVar[bool] = True

    name: Literal["cispo"] = Field(default="cispo", description=NAME)
    clip_low: float = Field(default=1.0, ge=0, le=1, description="the weight is at least 1 - clip_low; 1: no bound")
    clip_high: float = Field(default=4.0, ge=0, description="the weight is at most 1 + clip_high")


class GSPOLossConfig(PolicyLossConfig):
    """The clipped surrogate with one ratio a sequence, the geometric mean of its tokens' ratios."""

    may_use_proximal: ClassVar[bool] = True
    by_sequence: ClassVar[bool] = True

    name: Literal["gspo"] = Field(default="gspo", description=NAME)
    clip_low: float = Field(default=3e-4, ge=0, lt=1, description="as in clip, for the ratio of a sequence")
    clip_high: float = Field(default=4e-4, ge=0, description="as in clip, for the ratio of a sequence")
    aggregation: Aggregation = Field(default="sequence_mean", description=AGGREGATION)


class GMPOLossConfig(PolicyLossConfig):
    """The geometric mean of a sequence's ratios, each clipped on the side of the advantage."""

    may_use_proximal: ClassVar[bool] = True
    by_sequence: ClassVar[bool] = True

    name: Literal["gmpo"] = Field(default="gmpo", description=NAME)
    clip_low: float = Field(default=0.4, ge=0, description="the log-ratio is clipped at -clip_low: in log units")
    clip_high: float = Field(default=0.4, ge=0, description="the log-ratio is clipped at clip_high: in log units")
    aggregation: Aggregation = Field(default="sequence_mean", description=AGGREGATION)


class SAPOLossConfig(PolicyLossConfig):
    """A soft gate instead of clipping: the gradient fades as the ratio leaves 1."""

    may_use_proximal: ClassVar[bool] = True

    name: Literal["sapo"] = Field(default="sapo", description=NAME)
    tau_positive: float = Field(default=1.0, gt=0, description="how fast it fades where the advantage is positive")
    tau_negative: float = Field(default=1.05, gt=0, description="how fast it fades elsewhere")


class TOPRLossConfig(PolicyLossConfig):
    """Tapered off-policy REINFORCE: only what was worse than the baseline is weighed by the ratio, at most 1."""

    name: Literal["topr"] = Field(default="topr", description=NAME)
    weight_positive: float = Field(default=1.0, ge=0, description="weight of tokens with positive advantage")
    weight_negative: float = Field(default=1.0, ge=0, description="weight of all other tokens")


class KimiLossConfig(PolicyLossConfig):
    """Kimi-1.5 (also called DRO): the policy gradient with a squared pull towards the behaviour policy."""

    name: Literal["kimi"] = Field(default="kimi", description=NAME)
    tau: float = Field(default=0.1, gt=0, description="strength of the pull: tau / 2 times the squared log-ratio")


class DPPOTVLossConfig(PolicyLossConfig):
    """The ratio times the advantage inside a trust region of the token's probability (total variation)."""

    name: Literal["dppo_tv"] = Field(default="dppo_tv", description=NAME)
    threshold_low: float = Field(
        default=0.2, ge=0, le=1, description="most fall of a probability that still gives a gradient downwards"
    )
    threshold_high: float = Field(
        default=0.2, ge=0, le=1, description="most rise of a probability that still gives a gradient upwards"
    )


class DPPOKLLossConfig(PolicyLossConfig):
    """As dppo_tv, with the divergence of the two-way choice between this token and all others."""

    name: Literal["dppo_kl"] = Field(default="dppo_kl", description=NAME)
    threshold_low: float = Field(
        default=0.05, ge=0, description="most divergence, in nats, that still gives a gradient downwards"
    )
    threshold_high: float = Field(
        default=0.05, ge=0, description="most divergence, in nats, that still gives a gradient upwards"
    )


class IPOLossConfig(PolicyLossConfig):
    """A trust region of the token's probability for both signs, with a squared pull on all tokens."""

    name: Literal["ipo"] = Field(default="ipo", description=NAME)
    threshold: float = Field(
        default=0.1, ge=0, le=1, description="most change of a probability, up or down, that still gives a gradient"
    )
    kl_tau: float = Field(default=1e-3, ge=0, description="weight of the squared log-ratio")


class CustomLossConfig(PolicyLossConfig):
    """A surrogate of the user's; `forgelite.losses.tokens` says what it takes and gives."""

    may_use_proximal: ClassVar[bool] = True

    name: Literal["custom"] = Field(default="custom", description=NAME)
    path: str = Field(description="module:function of a surrogate of one's own")
    arguments: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of that function")
    uses_ratio: bool = Field(
        description="whether it accounts for the gap to the behaviour policy, by a ratio or a trust region"
    )

    @property
    def accounts_for_gap(self) -> bool:
        """Only the author of the function can know."""
        return self.uses_ratio

    def options(self) -> dict[str, Any]:
        """The keyword arguments of the surrogate's function."""
        return dict(self.arguments)


class CrossEntropyLossConfig(Section):
    """Supervised fine-tuning: the mean negative log-probability of the trained tokens."""

    name: Literal["cross_entropy"] = Field(default="cross_entropy", description=NAME)
    aggregation: Literal["token_mean"] = Field(
        default="token_mean",
        description="mean over the trained tokens of the whole batch, on all ranks together",
    )


def _loss_name(value: Any) -> Any:  # pydantic hands over whatever the user wrote, or a finished config
    if isinstance(value, Mapping):
        return value.get("name", "clip")
    return getattr(value, "name", None)


LossConfig = Annotated[
    Annotated[ClipLossConfig, Tag("clip")]
    | Annotated[GRPOLossConfig, Tag("grpo")]
    | Annotated[DrGRPOLossConfig, Tag("dr_grpo")]
    | Annotated[DAPOLossConfig, Tag("dapo")]
    | Annotated[DecoupledPPOLossConfig, Tag("decoupled_ppo")]
    | Annotated[ReinforcePlusPlusLossConfig, Tag("reinforce_plus_plus")]
    | Annotated[ReinforceLossConfig, Tag("reinforce")]
    | Annotated[DualClipLossConfig, Tag("dual_clip")]
    | Annotated[CISPOLossConfig, Tag("cispo")]
    | Annotated[GSPOLossConfig, Tag("gspo")]
    | Annotated[GMPOLossConfig, Tag("gmpo")]
    | Annotated[SAPOLossConfig, Tag("sapo")]
    | Annotated[TOPRLossConfig, Tag("topr")]
    | Annotated[KimiLossConfig, Tag("kimi")]
    | Annotated[DPPOTVLossConfig, Tag("dppo_tv")]
    | Annotated[DPPOKLLossConfig, Tag("dppo_kl")]
    | Annotated[IPOLossConfig, Tag("ipo")]
    | Annotated[CustomLossConfig, Tag("custom")]
    | Annotated[CrossEntropyLossConfig, Tag("cross_entropy")],
    Discriminator(_loss_name),
]
"""The type of a config's field `loss`. Without a `name` it is the clipped surrogate."""
