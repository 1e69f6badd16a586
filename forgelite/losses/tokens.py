"""The tokens of a microbatch as surrogates and corrections see them, and what these give back.

One of the user's own is a function like those here, named by its path in the configuration:

    # my_package/losses.py                                   # loss: {name: custom, path: my_package.losses:squared,
    def squared(tokens, *, tau):                             #        uses_ratio: true, arguments: {tau: 0.1}}
        loss = -tokens.advantages * tokens.logprobs + tau * tokens.log_ratio.square()
        return Surrogate(per_token=loss, clipped=torch.zeros_like(tokens.mask))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from forgelite.config.policy_loss import Anchor
from forgelite.losses.inputs import LossInputs, masked
from forgelite.losses.runs import Runs, sequence_runs, turn_runs

MAX_LOG_RATIO = 10.0
"""Bound on |log ratio| before `exp`, torchtitan's: e^10 = 22026. Beyond it a ratio says only "very
different", and further out it would overflow float32. A clamped token has no gradient."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PolicyTokens:
    """Every tensor is 0 (or False) where a token is not trained, so that nothing there can spread.

    Example, one trained token of probability 0.5 that was sampled with probability 0.4: `logprobs=[[-0.69]]`,
    `behaviour_logprobs=[[-0.92]]`, `log_ratio=[[0.22]]`, `gap=[[0.22]]`.
    """

    logprobs: torch.Tensor  # [R, L] float32, with gradient
    behaviour_logprobs: torch.Tensor  # [R, L] float32
    log_ratio: torch.Tensor  # [R, L] float32, with gradient: logprobs - those of the anchor
    gap: torch.Tensor  # [R, L] float32, without gradient: the policy when the step began - behaviour
    advantages: torch.Tensor  # [R, L] float32
    mask: torch.Tensor  # [R, L] bool
    sequence_ids: torch.Tensor  # [R, L] int32
    sequences: Runs

    @property
    def turns(self) -> Runs:
        """Unbroken runs of trained tokens within a sequence; computed anew, because few ask for them."""
        return turn_runs(self.sequence_ids, self.mask)

    @property
    def ratio(self) -> torch.Tensor:
        """[R, L] the importance ratio of each token, with gradient."""
        return bounded_exp(self.log_ratio)


@dataclass(kw_only=True, slots=True, frozen=True)
class Surrogate:
    """What a surrogate gives."""

    per_token: torch.Tensor  # [R, L] loss of each token, with gradient
    clipped: torch.Tensor  # [R, L] bool, where a bound of the surrogate holds


@dataclass(kw_only=True, slots=True, frozen=True)
class Correction:
    """What a correction gives. Both without gradient."""

    factor: torch.Tensor  # [R, L] float32, the loss of a token is multiplied by it; 0 leaves the token out
    truncated: torch.Tensor  # [R, L] bool, where the factor would be larger without its cap


class SurrogateFunction(Protocol):
    """A surrogate: pure, with its options as keyword arguments."""

    def __call__(self, tokens: PolicyTokens, **options: float) -> Surrogate: ...


class CorrectionFunction(Protocol):
    """A correction: pure, with its options as keyword arguments."""

    def __call__(self, tokens: PolicyTokens, **options: float) -> Correction: ...


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """`exp` of a log-ratio held within +-MAX_LOG_RATIO. Any shape.

    For the ratio of a sequence the sum (or the mean) is given, not its addends clamped one by one.
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def policy_tokens(inputs: LossInputs, anchor: Anchor) -> PolicyTokens:
    """Take masked places out of the inputs and form the differences that the losses are made of.

    Args:
        inputs: One microbatch.
        anchor: Whose log-probabilities the ratio is taken against.

    Raises:
        ValueError: the anchor is `proximal`, and the inputs do not hold its log-probabilities.
    """
    mask = inputs.mask
    logprobs = masked(inputs.logprobs.float(), mask)
    behaviour = masked(inputs.behaviour_logprobs.float(), mask)
    if anchor == "behaviour":
        old, start = behaviour, logprobs.detach()
    elif inputs.proximal_logprobs is None:
        raise ValueError("loss.anchor=proximal needs proximal_logprobs, and the inputs have none")
    else:
        old = start = masked(inputs.proximal_logprobs.float(), mask)
    return PolicyTokens(
        logprobs=logprobs,
        behaviour_logprobs=behaviour,
        log_ratio=logprobs - old,
        gap=start - behaviour,
        advantages=masked(inputs.advantages.float(), mask),
        mask=mask,
        sequence_ids=inputs.sequence_ids,
        sequences=sequence_runs(inputs.sequence_ids, mask),
    )
