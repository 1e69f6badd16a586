"""A completion as a client reads it: text and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forgelite.policy.openai.chat import Message
from forgelite.policy.openai.jobs import Job
from forgelite.policy.openai.text import ChatTokenizer, TextStream, cut_at_stop
from forgelite.policy.openai.tool_calls import TOOL_CALL, ToolCall, parse_tool_calls
from forgelite.types import Completion


@dataclass(kw_only=True, slots=True, frozen=True)
class Answer:
    """A completion as a client reads it.

    Example: `Answer(text="", tool_calls=[ToolCall(name="add", arguments="{}")], finish_reason="tool_calls")`.
    """

    text: str
    tool_calls: Sequence[ToolCall]
    finish_reason: str

    def message(self, completion_id: str) -> Message:
        """As a chat message."""
        message: Message = {"role": "assistant", "content": self.text or (None if self.tool_calls else "")}
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{completion_id}/{i}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for i, call in enumerate(self.tool_calls)
            ]
        return message


def read_answer(tokenizer: ChatTokenizer, job: Job, completion: Completion) -> Answer:
    """What a client reads of a whole completion."""
    text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    return answer_of_text(job, cut_at_stop(text, job.request.sampling.stop), completion)


def answer_of_text(job: Job, text: str, completion: Completion) -> Answer:
    """What a client reads of a completion whose text, up to a stop text, is `text`."""
    text, calls = parse_tool_calls(text) if job.reads_tool_calls else (text, [])
    finish = completion.finish_reason
    return Answer(text=text, tool_calls=calls, finish_reason="tool_calls" if calls and finish == "stop" else finish)


def text_stream(tokenizer: ChatTokenizer, job: Job) -> TextStream:
    """The text of one member while it grows. Tool calls are read as a whole, so they are not part of it."""
    return TextStream(tokenizer, stop=job.request.sampling.stop, until=(TOOL_CALL,) if job.reads_tool_calls else ())
