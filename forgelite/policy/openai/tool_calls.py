"""Tool calls in the form of Hermes and Qwen models: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

TOOL_CALL = "<tool_call>"
_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(kw_only=True, slots=True, frozen=True)
class ToolCall:
    """A call that the model asks for. Example: `ToolCall(name="add", arguments='{"a": 1, "b": 2}')`."""

    name: str
    arguments: str  # JSON text of an object, as OpenAI has it


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Split an answer into its text and its tool calls.

    Args:
        text: of the completion, special tokens left out.

    Returns:
        What stands before the first call, and the calls. Where a block is not closed, is no JSON or names no function,
        the whole text as it is, and no call.
    """
    at = text.find(TOOL_CALL)
    blocks = _BLOCK.findall(text, max(at, 0)) if at >= 0 else []
    if not blocks or len(blocks) != text.count(TOOL_CALL):
        return text, []
    calls = []
    for block in blocks:
        try:
            call = json.loads(block)
            arguments = call.get("arguments", {})
            name = call["name"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            (name + written).encode()  # half a character can be written in JSON, but not sent to the client
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return text, []
        if not isinstance(arguments, dict):
            return text, []
        calls.append(ToolCall(name=name, arguments=written))
    return text[:at], calls
