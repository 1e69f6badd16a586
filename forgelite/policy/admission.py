"""Which requests may reach the engine.

One token id outside the vocabulary kills vLLM for everybody, and most of its other checks are bypassed on the
fast path, so a request is checked here, alone, before the engine sees it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from forgelite.types import Completion, Failure, GroupRequest, SamplingParams

REJECTED = "rejected"  # the reason of a failure that means: the request was refused and nothing was sampled

_MAX_TEMPERATURE = 2.0  # vLLM's own limit
_MIN_TEMPERATURE = 0.01  # below it vLLM silently samples at this temperature, or greedily


@dataclass(kw_only=True, slots=True, frozen=True)
class Limits:
    """What an engine can take.

    Example: `Limits(vocab_size=128, max_model_len=512)`.
    """

    vocab_size: int  # valid token ids are [0, vocab_size)
    max_model_len: int  # prompt and completion together, in tokens


def rejection(request: GroupRequest, limits: Limits) -> Failure | None:
    """Why a request cannot be served, or None when it can."""
    fault = _prompt_fault(request, limits) or _sampling_fault(request.sampling, limits)
    if fault is None and request.n < 1:
        fault = f"n={request.n}: a group has at least one member"
    if fault is None and request.partials is not None:
        fault = _partials_fault(request, request.partials, limits)
    if fault is None and request.progress_s is not None and not request.progress_s >= 0.0:
        fault = f"progress_s={request.progress_s} must be at least 0; None switches reports off"
    if fault is None:
        return None
    return Failure(reason=REJECTED, message=f"request {request.request_id}: {fault}")


def _prompt_fault(request: GroupRequest, limits: Limits) -> str | None:
    ids, max_tokens = request.prompt_ids, request.sampling.max_tokens
    if not ids:
        return "the prompt is empty"
    if (stranger := _stranger(ids, limits)) is not None:
        return f"prompt token {stranger} is outside the vocabulary of {limits.vocab_size}"
    if len(ids) + max_tokens > limits.max_model_len:
        return (
            f"{len(ids)} prompt tokens and max_tokens={max_tokens} exceed the engine's limit of "
            f"{limits.max_model_len}: shorten them or raise policy.engine.max_model_len"
        )
    return None


def _partials_fault(request: GroupRequest, partials: tuple[Completion, ...], limits: Limits) -> str | None:
    if len(partials) != request.n:
        return f"{len(partials)} partials for n={request.n} members: give one for each"
    for partial in partials:
        if tuple(partial.prompt_ids) != tuple(request.prompt_ids):
            return f"partial {partial.request_id} has another prompt"
        if len(partial.token_ids) > request.sampling.max_tokens:
            return (
                f"partial {partial.request_id} has {len(partial.token_ids)} tokens, more than "
                f"max_tokens={request.sampling.max_tokens}, which is the budget of the whole completion"
            )
        if (stranger := _stranger(partial.token_ids, limits)) is not None:
            return f"partial {partial.request_id}: token {stranger} is outside the vocabulary of {limits.vocab_size}"
        if not all(map(math.isfinite, partial.logprobs)):
            return f"partial {partial.request_id} has a logprob that is not a finite number"
    return None


def _stranger(ids: Sequence[int], limits: Limits) -> int | None:
    """The first id outside the vocabulary."""
    if not ids or (min(ids) >= 0 and max(ids) < limits.vocab_size):
        return None
    return next(i for i in ids if not 0 <= i < limits.vocab_size)


def _sampling_fault(sampling: SamplingParams, limits: Limits) -> str | None:
    if sampling.max_tokens < 1:
        return f"max_tokens={sampling.max_tokens} must be at least 1"
    if not 0.0 <= sampling.temperature <= _MAX_TEMPERATURE:
        return f"temperature={sampling.temperature} is outside [0, {_MAX_TEMPERATURE}]"
    if 0.0 < sampling.temperature < _MIN_TEMPERATURE:
        return f"temperature={sampling.temperature} is below {_MIN_TEMPERATURE}: use 0 for greedy sampling"
    if not 0.0 < sampling.top_p <= 1.0:
        return f"top_p={sampling.top_p} is outside (0, 1]"
    if sampling.top_k < 0:
        return f"top_k={sampling.top_k} is negative; 0 switches it off"
    if not 0.0 <= sampling.min_p <= 1.0:
        return f"min_p={sampling.min_p} is outside [0, 1]"
    if (stranger := _stranger(sampling.stop_token_ids, limits)) is not None:
        return f"stop token {stranger} is outside the vocabulary of {limits.vocab_size}"
    if not all(sampling.stop):
        return f"stop={sampling.stop!r} holds an empty text, which every completion begins with"
    return None
