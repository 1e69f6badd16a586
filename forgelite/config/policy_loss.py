"""The keys below `loss.` that all losses of reinforcement learning share, and which of them contradict each other."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from forgelite.config.corrections import CorrectionConfig
from forgelite.config.section import Section

Aggregation = Literal["token_mean", "sequence_mean", "constant"]
Anchor = Literal["behaviour", "proximal"]
KLEstimator = Literal["k1", "k2", "k3", "k3_unbiased"]

NAME = (
    "which loss: reinforce, clip, grpo, dr_grpo, dapo, decoupled_ppo, reinforce_plus_plus, dual_clip, cispo, gspo, "
    "gmpo, sapo, topr, kimi, dppo_tv, dppo_kl, ipo, custom; cross_entropy for demonstrations"
)
AGGREGATION = (
    "token_mean: over the trained tokens of the whole batch, on all ranks together; sequence_mean: of each "
    "sequence, then over sequences; constant: the sum, divided by sequences times loss.constant_length"
)
ANCHOR = (
    "whose probabilities the ratio is taken against: behaviour, the policy that sampled; proximal, the policy as it "
    "is when the step begins, as in decoupled PPO"
)
CORRECTIONS = "importance weights and masks for samples that another policy drew"
WHITEN = "shift and scale the advantages of the batch's tokens to mean 0 and deviation 1"


class PolicyLossConfig(Section):
    """What all losses of reinforcement learning have in common."""

    accounts_for_gap: ClassVar[bool] = True  # by itself, when it is anchored at the behaviour policy
    may_use_proximal: ClassVar[bool] = False
    by_sequence: ClassVar[bool] = False  # one loss for all tokens of a sequence

    name: str = Field(description=NAME)
    anchor: Anchor = Field(default="behaviour", description=ANCHOR)
    corrections: list[CorrectionConfig] = Field(default_factory=list, description=CORRECTIONS)
    aggregation: Aggregation = Field(default="token_mean", description=AGGREGATION)
    constant_length: int | None = Field(
        default=None, ge=1, description="tokens that every sequence counts as, for loss.aggregation=constant"
    )
    kl_coefficient: float = Field(
        default=0.0, ge=0, description="weight of the divergence from the reference; above 0 it needs a reference"
    )
    kl_estimator: KLEstimator = Field(
        default="k3", description="estimator of the divergence from the reference, in the loss and in loss/kl_ref"
    )
    whiten_advantages: bool = Field(default=False, description=WHITEN)

    @property
    def corrects_gap(self) -> bool:
        """Whether samples of another policy are accounted for: by a ratio to it, a trust region or a correction."""
        if self.anchor == "proximal":
            return any(c.weighs for c in self.corrections)
        return self.accounts_for_gap or bool(self.corrections)

    def options(self) -> dict[str, Any]:
        """The keyword arguments of the surrogate's function."""
        return {key: getattr(self, key) for key in type(self).model_fields if key not in PolicyLossConfig.model_fields}

    @model_validator(mode="after")
    def _aggregation_has_its_length(self) -> Self:
        if self.aggregation == "constant" and self.constant_length is None:
            raise ValueError(
                f"loss.aggregation=constant (loss.name={self.name}) needs loss.constant_length, "
                "for example the value of policy.sampling.max_tokens"
            )
        if self.aggregation != "constant" and self.constant_length is not None:
            raise ValueError(
                f"loss.constant_length={self.constant_length} has no effect with loss.aggregation={self.aggregation}"
            )
        if self.by_sequence and self.aggregation != "sequence_mean":
            raise ValueError(
                f"loss.name={self.name} has one loss for a whole sequence, which loss.aggregation={self.aggregation} "
                "would weigh by its length: set loss.aggregation=sequence_mean"
            )
        return self

    @model_validator(mode="after")
    def _divergence_has_a_gradient(self) -> Self:
        if self.kl_coefficient > 0 and self.kl_estimator == "k1":
            raise ValueError(
                f"loss.kl_coefficient={self.kl_coefficient} with loss.kl_estimator=k1: its expected gradient is zero; "
                "set loss.kl_estimator=k2, k3 or k3_unbiased, or put k1 into the reward with advantage.kl_coefficient"
            )
        return self

    @model_validator(mode="after")
    def _gap_is_counted_once(self) -> Self:
        if self.anchor == "proximal" and not self.may_use_proximal:
            raise ValueError(
                f"loss.anchor=proximal does not apply to loss.name={self.name}, "
                "which compares with the behaviour policy alone"
            )
        weights = [f"loss.corrections.{i}.name={c.name}" for i, c in enumerate(self.corrections) if c.weighs]
        if len(weights) > 1:
            raise ValueError(f"{weights[0]} and {weights[1]} are both importance weights of the same gap: take one")
        if weights and self.anchor == "behaviour" and self.accounts_for_gap:
            way_out = "take it out" + (" or set loss.anchor=proximal" if self.may_use_proximal else "")
            raise ValueError(
                f"{weights[0]} would count the gap to the behaviour policy twice, because loss.name={self.name} with "
                f"loss.anchor=behaviour already accounts for it: {way_out}"
            )
        return self

    @model_validator(mode="after")
    def _corrections_fit(self) -> Self:
        labels = [c.label for c in self.corrections]
        if twice := [label for label in labels if labels.count(label) > 1]:
            raise ValueError(f"loss.corrections: {twice[0]} is there twice")
        for i, correction in enumerate(self.corrections):
            if self.by_sequence and not correction.by_sequence:
                raise ValueError(
                    f"loss.corrections.{i}.name={correction.name} has a factor for each token, loss.name={self.name} "
                    "one loss for a whole sequence: take a correction of sequences, such as sequence_tis"
                )
        return self
