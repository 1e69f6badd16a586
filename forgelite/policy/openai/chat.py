"""Chat messages: checked, brought into one form, and rendered by the tokenizer's template.

The form is what templates expect and what two turns of a session are compared by: content is a text, the arguments of
a tool call are an object, and what a client adds with the value null is left out.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from forgelite.policy.openai.api_errors import ApiError
from forgelite.policy.openai.text import ChatTokenizer

Message = dict[str, Any]

_PASSED_ON = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"})
_HARMLESS = frozenset({"refusal", "annotations", "id", "status"})
_ANSWER = "forgelite answer"  # stands for an answer, to find what a template writes behind one


@dataclass(kw_only=True, slots=True, frozen=True)
class Conversation:
    """What a chat template renders.

    Example: `Conversation(messages=[{"role": "user", "content": "2 + 2?"}])`.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    template_options: Mapping[str, Any] | None = None  # chat_template_kwargs

    def extends(self, earlier: Conversation) -> bool:
        """Whether it begins with all of `earlier`, and has more."""
        size = len(earlier.messages)
        return (
            len(self.messages) > size
            and self.tools == earlier.tools
            and self.template_options == earlier.template_options
            and list(self.messages[:size]) == list(earlier.messages)
        )


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Bring messages of a client into one form.

    Raises:
        ApiError: 400, a message has no role, a part that is not text, or a field that would get lost.
    """
    return [_check_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _check_message(message: Mapping[str, Any], place: str) -> Message:
    if not isinstance(message.get("role"), str):
        raise ApiError(400, f"{place} has no role", param="messages")
    out: Message = {"role": message["role"], "content": _text(message.get("content"), place)}
    for name, value in message.items():
        if value is None or name in ("role", "content") or name in _HARMLESS:
            continue
        if name not in _PASSED_ON:
            if value in ([], {}, ""):
                continue
            raise ApiError(400, f"{place}.{name} is not supported by this endpoint", param="messages")
        if name == "tool_calls":
            if not isinstance(value, list):
                raise ApiError(400, f"{place}.tool_calls must be a list", param="messages")
            if value:
                out["tool_calls"] = [_check_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(value)]
        else:
            out[name] = value
    return out


def _text(content: Any, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content
        ]
        if all(isinstance(text, str) for text in texts):
            return "".join(texts)
    raise ApiError(400, f"{place}.content must be a text, or a list of parts of type text", param="messages")


def _check_call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"{place} names no function", param="messages")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # what a model wrote may be no JSON; the template gets it as it is
            arguments = json.loads(arguments)
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def render(tokenizer: ChatTokenizer, conversation: Conversation, *, add_generation_prompt: bool) -> str:
    """The text of a conversation.

    Raises:
        ApiError: 400, the tokenizer has no chat template, or the template refuses the conversation.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ApiError(
            400,
            "this model's tokenizer has no chat template: use /v1/completions, or add chat_template.jinja to the "
            "tokenizer's folder",
            code="no_chat_template",
        )
    options = conversation.template_options or {}
    # The tokenizer's own options are not the client's: a template of its own, or a limit that cuts the prompt.
    reserved = options.keys() & inspect.signature(tokenizer.apply_chat_template).parameters.keys()
    if reserved:
        raise ApiError(400, f"chat_template_kwargs may not hold {min(reserved)}", param="chat_template_kwargs")
    try:
        return tokenizer.apply_chat_template(
            list(conversation.messages),
            tools=list(conversation.tools) if conversation.tools else None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **options,
        )
    except Exception as error:  # the template is a program of the model's author, which may raise anything
        raise ApiError(400, f"the chat template refuses the conversation: {error}", param="messages") from error


def continuation(
    tokenizer: ChatTokenizer, earlier: Conversation, longer: Conversation, *, last_token: int | None
) -> str | None:
    """The text between the last sampled token of a conversation and the next answer.

    Args:
        tokenizer: renders.
        earlier: ends with a sampled answer.
        longer: extends it.
        last_token: the last sampled token; where it is the one with which the template closes an answer, it is not
            repeated. None: nothing was sampled.

    Returns:
        The end of the answer, the new messages and the generation prompt; None where the template writes the earlier
        messages in another way now that others follow (some leave out the reasoning of earlier turns).
    """
    history = render(tokenizer, earlier, add_generation_prompt=False)
    whole = render(tokenizer, longer, add_generation_prompt=True)
    if not whole.startswith(history):
        return None
    asked = Conversation(
        messages=[*earlier.messages[:-1], {"role": "assistant", "content": _ANSWER}],
        tools=earlier.tools,
        template_options=earlier.template_options,
    )
    _, found, closing = render(tokenizer, asked, add_generation_prompt=False).rpartition(_ANSWER)
    if not found or not history.endswith(closing):
        return None
    if last_token is not None:
        closing = closing.removeprefix(tokenizer.decode([last_token], skip_special_tokens=False))
    return closing + whole[len(history) :]
