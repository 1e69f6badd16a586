"""The JSON of answers: of chat and of completions, whole and in pieces.

Beside OpenAI's fields every choice has `weight_versions`, the version spans of its tokens, and, where the request says
`return_token_ids`, `prompt_token_ids` and `token_ids`. These hold every sampled token; the text ends before a stop
text and leaves special tokens out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from forgelite.policy.openai.answers import Answer
from forgelite.policy.openai.generation import Piece
from forgelite.policy.openai.jobs import Job
from forgelite.policy.openai.text import ChatTokenizer
from forgelite.types import Completion

Json = dict[str, Any]


@dataclass(kw_only=True, slots=True, frozen=True)
class AnswerFormat:
    """How one request is answered.

    Example: `AnswerFormat(chat=True, job=job, tokenizer=tokenizer, model="policy", logprobs=True, token_ids=False)`.
    """

    chat: bool
    job: Job
    tokenizer: ChatTokenizer
    model: str
    logprobs: bool  # of the sampled tokens
    token_ids: bool  # return_token_ids
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since the epoch

    @property
    def shows_tokens(self) -> bool:
        """Whether a piece without text has something to tell."""
        return self.logprobs or self.token_ids

    def whole(self, answered: Sequence[tuple[Completion, Answer]]) -> Json:
        """The body of an answer that is not streamed."""
        choices = []
        for index, (completion, answer) in enumerate(answered):
            choice = self._choice(index, completion.token_ids, completion.logprobs, 0)
            if self.chat:
                choice["message"] = answer.message(completion.request_id)
            else:
                choice["text"] = answer.text
            choices.append(choice | self._end(answer, completion) | self._prompt())
        body = self._head("" if self.chat else None) | {
            "choices": choices,
            "usage": self.usage([c for c, _ in answered]),
        }
        if self.chat and self.token_ids:  # where vLLM has it
            body |= self._prompt()
        return body

    def first(self, index: int) -> Json:
        """The chunk before the first piece of a member."""
        choice: Json = {"index": index, "logprobs": None, "finish_reason": None, **self._prompt()}
        choice |= {"delta": {"role": "assistant", "content": ""}} if self.chat else {"text": ""}
        return self._head(".chunk") | {"choices": [choice]}

    def piece(self, piece: Piece, offset: int) -> Json:
        """A chunk.

        Args:
            piece: what is new.
            offset: characters of the member's tokens before it, for `text_offset` of completions.
        """
        choice = self._choice(piece.index, piece.token_ids, piece.logprobs, offset)
        if not self.chat:
            choice["text"] = piece.text
        else:
            choice["delta"] = {"content": piece.text} if piece.text else {}
        if piece.answer is not None and piece.completion is not None:
            choice |= self._end(piece.answer, piece.completion)
            if piece.answer.tool_calls:
                calls = piece.answer.message(piece.completion.request_id)["tool_calls"]
                choice["delta"]["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        return self._head(".chunk") | {"choices": [choice]}

    def final_usage(self, completions: Sequence[Completion]) -> Json:
        """The chunk behind the last piece that `stream_options.include_usage` asks for."""
        return self._head(".chunk") | {"choices": [], "usage": self.usage(completions)}

    def usage(self, completions: Sequence[Completion]) -> Json:
        """Tokens of the prompt and of all members."""
        prompt = len(self.job.request.prompt_ids)
        sampled = sum(len(c.token_ids) for c in completions)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token by itself, special tokens included."""
        return [self.tokenizer.decode([i], skip_special_tokens=False) for i in token_ids]

    def _head(self, suffix: str | None) -> Json:
        kind, prefix = ("chat.completion", "chatcmpl") if self.chat else ("text_completion", "cmpl")
        return {
            "id": f"{prefix}-{self.job.request.request_id}",
            "object": kind + (suffix or "" if self.chat else ""),
            "created": self.created,
            "model": self.model,
        }

    def _choice(self, index: int, token_ids: Sequence[int], logprobs: Sequence[float], offset: int) -> Json:
        choice: Json = {"index": index, "finish_reason": None, "logprobs": None}
        if self.logprobs:
            choice["logprobs"] = self._logprobs(self.token_texts(token_ids), logprobs, offset)
        if self.token_ids:
            choice["token_ids"] = list(token_ids)
        return choice

    def _logprobs(self, texts: list[str], logprobs: Sequence[float], offset: int) -> Json:
        if self.chat:
            content = [
                {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                for text, logprob in zip(texts, logprobs, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets = list(accumulate(map(len, texts[:-1]), initial=offset)) if texts else []
        return {"tokens": texts, "token_logprobs": list(logprobs), "top_logprobs": None, "text_offset": offsets}

    def _end(self, answer: Answer, completion: Completion) -> Json:
        spans = [{"version": s.version, "start": s.start, "end": s.end} for s in completion.spans]
        return {"finish_reason": answer.finish_reason, "weight_versions": spans}

    def _prompt(self) -> Json:
        return {"prompt_token_ids": list(self.job.request.prompt_ids)} if self.token_ids else {}
