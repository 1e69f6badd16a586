"""What a client may ask for: the fields of OpenAI's two requests that are supported, and vLLM's names beside them.

A field that would change the answer and is not supported is refused by name, never ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from forgelite.policy.openai.api_errors import ApiError
from forgelite.types import SamplingParams

B = TypeVar("B", bound="GenerationBody")

# Fields without a bearing on what is sampled or answered.
_HARMLESS = frozenset(
    {"user", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"}
)
# Fields that are not supported, with the values that ask for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
}

StopText = Annotated[str, Field(min_length=1)]


class StreamOptions(BaseModel):
    """OpenAI's `stream_options`."""

    model_config = ConfigDict(strict=True)

    include_usage: bool = False


class GenerationBody(BaseModel):
    """What both routes share. A field that is null counts as not given."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)  # -1 and 0: off, as in vLLM
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = None
    stop: StopText | list[StopText] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    return_token_ids: bool = False  # vLLM's name: prompt_token_ids and token_ids in the answer

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_given(cls, values: Any) -> Any:
        return {k: v for k, v in values.items() if v is not None} if isinstance(values, dict) else values


class ChatBody(GenerationBody):
    """A body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] = "auto"
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: int = Field(0, le=0, ge=0)


class CompletionBody(GenerationBody):
    """A body of `/v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, le=0, ge=0)

    def single_prompt(self) -> str | list[int]:
        """The prompt; a list that holds one prompt counts as that. Raises ApiError for several."""
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise ApiError(400, f"prompt holds {len(prompt)} prompts: send one request for each", param="prompt")
            return prompt[0]
        return prompt


_HINTS = {
    "top_logprobs": "only the logprob of the sampled token is recorded: set top_logprobs to 0",
    "tool_choice": "decoding is not constrained: only 'auto' and 'none' are supported",
}


def parse_body(kind: type[B], data: Any) -> B:
    """Check what a client sent.

    Args:
        kind: `ChatBody` or `CompletionBody`.
        data: parsed JSON.

    Raises:
        ApiError: 400, with the field in `param`.
    """
    if not isinstance(data, dict):
        raise ApiError(400, f"the body must be a JSON object, not {type(data).__name__}")
    try:
        body = kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = str(first["loc"][0]) if first["loc"] else None
        hint = _HINTS.get(field or "")
        if field == "logprobs" and kind is CompletionBody:
            hint = "only the logprob of the sampled token is recorded: set logprobs to 0"
        detail = f" ({hint})" if hint else ""
        raise ApiError(400, f"{field}: {first['msg']}{detail}", param=field) from None
    for name, value in (body.model_extra or {}).items():
        neutral = _NEUTRAL.get(name)
        if name not in _HARMLESS and not (neutral and any(_same(value, allowed) for allowed in neutral)):
            raise ApiError(
                400,
                f"{name}={value!r} is not supported by this endpoint: leave it out",
                code="unsupported_parameter",
                param=name,
            )
    return body


def _same(value: Any, allowed: Any) -> bool:
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def sampling_params(body: GenerationBody, *, defaults: SamplingParams, fixed: bool, room: int) -> SamplingParams:
    """How the tokens of a request are drawn.

    Args:
        body: of the request. Its stop texts and tokens come on top of those of `defaults`.
        defaults: for what the request does not say.
        fixed: the rollout's sampling holds, because its tokens will be trained: a request that asks for another
            distribution is refused, and `defaults.max_tokens` is the most it gets. An evaluation, which is greedy,
            overrules the temperature that is asked for.
        room: tokens that fit behind the prompt; asking for more gives so many, as in vLLM.

    Raises:
        ApiError: 400, a request of a rollout asks for another distribution.
    """
    given: dict[str, Any] = {"temperature": body.temperature, "top_p": body.top_p, "min_p": body.min_p}
    given |= {"top_k": None if body.top_k is None else max(0, body.top_k), "seed": body.seed}
    asked = {name: value for name, value in given.items() if value is not None}
    if fixed:
        if defaults.temperature == 0:  # an evaluation, which is greedy for a harness that names its temperature too
            asked.pop("temperature", None)
        for name, value in asked.items():
            if value != getattr(defaults, name):
                raise ApiError(
                    400,
                    f"{name}={value:g} in a rollout that is sampled with {name}={getattr(defaults, name)}: its tokens "
                    f"will be trained as drawn with the run's policy.sampling; leave {name} out",
                    param=name,
                )
        asked = {}
    wanted = getattr(body, "max_completion_tokens", None) or body.max_tokens or defaults.max_tokens
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return dataclasses.replace(
        defaults,
        **asked,
        max_tokens=min(wanted, room, *([defaults.max_tokens] if fixed else [])),
        stop=tuple(dict.fromkeys([*defaults.stop, *stop])),
        stop_token_ids=tuple(dict.fromkeys([*defaults.stop_token_ids, *(body.stop_token_ids or [])])),
        ignore_eos=body.ignore_eos or defaults.ignore_eos,
    )
