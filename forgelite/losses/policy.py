"""The loss of reinforcement learning, put together from its parts:

    aggregate( surrogate x corrections )  +  kl_coefficient x aggregate( divergence from the reference )

A correction multiplies the loss of a token, after the surrogate has been clipped. It touches neither the denominator
nor the divergence term.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from forgelite.config.corrections import CorrectionConfig
from forgelite.config.functions import load_function
from forgelite.config.policy_loss import PolicyLossConfig
from forgelite.losses.aggregation import aggregate
from forgelite.losses.corrections import CORRECTIONS
from forgelite.losses.divergence import DIVERGENCES
from forgelite.losses.inputs import BatchSize, Loss, LossInputs, LossOutput, masked
from forgelite.losses.statistics import Parts, correction_parts, gap_by_age, mismatch_parts, ratio_parts
from forgelite.losses.surrogates import SURROGATES
from forgelite.losses.tokens import CorrectionFunction, PolicyTokens, SurrogateFunction, policy_tokens


def make_policy_loss(config: PolicyLossConfig) -> Loss:
    """The loss of `config`, its functions found and their options bound.

    Raises:
        ConfigError: a function of the user's cannot be imported, or does not take the arguments given.
    """
    options = config.options()
    surrogate = load_function(config.path, options, "loss") if config.name == "custom" else SURROGATES[config.name]
    corrections = {c.label: _bound(c, f"loss.corrections.{i}") for i, c in enumerate(config.corrections)}
    return partial(policy_loss, config=config, surrogate=partial(surrogate, **options), corrections=corrections)


def policy_loss(
    inputs: LossInputs,
    *,
    config: PolicyLossConfig,
    surrogate: SurrogateFunction,
    corrections: Mapping[str, CorrectionFunction],
    size: BatchSize,
    trainer_version: int,
) -> LossOutput:
    """A share of the loss of a batch, from one microbatch.

    Args:
        inputs: One microbatch of whole sequences.
        config: Anchor, aggregation and divergence; the rest of it is in the two functions.
        surrogate: With its options bound.
        corrections: By their names in metrics, with their options bound.
        size: Of the whole batch, on all ranks.
        trainer_version: Version of the weights that `inputs.logprobs` come from.

    Raises:
        ValueError: a KL weight above 0 without reference log-probabilities, or an anchor without its.
    """
    tokens = policy_tokens(inputs, config.anchor)
    average = partial(
        aggregate,
        sequences=tokens.sequences,
        size=size,
        how=config.aggregation,
        constant_length=config.constant_length,
    )
    term = surrogate(tokens)
    per_token, corrected = _corrected(term.per_token, tokens, corrections)
    loss = average(per_token)
    sums = {"policy": loss.detach()}

    if inputs.reference_logprobs is not None:
        reference = masked(inputs.reference_logprobs.float(), inputs.mask)
        estimate = DIVERGENCES[config.kl_estimator]
        divergence = average(estimate(tokens.logprobs, reference, tokens.behaviour_logprobs))
        sums["kl_ref"] = divergence.detach()
        if config.kl_coefficient:
            loss = loss + config.kl_coefficient * divergence
    elif config.kl_coefficient:
        raise ValueError(
            f"loss.kl_coefficient={config.kl_coefficient} needs reference logprobs, and the batch has none"
        )

    parts = [
        ratio_parts(tokens, term.clipped),
        mismatch_parts(inputs, trainer_version),
        gap_by_age(tokens, inputs.versions, trainer_version),
        corrected,
    ]
    return LossOutput(
        loss=loss,
        sums={k: v for some, _ in parts for k, v in some.items()} | sums,
        maxima={k: v for _, some in parts for k, v in some.items()},
    )


def _bound(correction: CorrectionConfig, key: str) -> CorrectionFunction:
    options = correction.options()
    if correction.name == "custom":
        return partial(load_function(correction.path, options, key), **options)
    return partial(CORRECTIONS[correction.name], **options)


def _corrected(
    per_token: torch.Tensor, tokens: PolicyTokens, corrections: Mapping[str, CorrectionFunction]
) -> tuple[torch.Tensor, Parts]:
    if not corrections:
        return per_token, ({}, {})
    made = {name: correct(tokens) for name, correct in corrections.items()}
    factor = torch.ones_like(tokens.gap)
    for correction in made.values():
        factor = factor * correction.factor.detach()
    # A factor of 0 leaves the token out, whatever its loss: an infinite one times 0 would be NaN.
    return torch.where(factor == 0, 0.0, per_token) * factor, correction_parts(made, factor, tokens.mask)
