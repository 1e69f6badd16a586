"""Tokens become text: all at once, or piece by piece while they are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

_UNFINISHED = "\ufffd"  # what a decoder makes of bytes that are not yet a character


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the endpoint uses."""

    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...
    def apply_chat_template(self, conversation: list[dict], **options: Any) -> Any: ...


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """`text` up to the first of the stop texts. Its tokens stay in the completion; only the text is cut."""
    found = [at for at in (text.find(s) for s in stop) if at >= 0]
    return text[: min(found)] if found else text


class TextStream:
    """The text of a completion that is still growing.

    Holds back what may yet turn out to be a stop text, or half a character, and everything from a text in `until` on.

    Example: with `stop=("END",)`, pushing the tokens of `"to the EN"` gives `"to the "`, and then of `"T"`, `"ENT"`.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, stop: Sequence[str] = (), until: Sequence[str] = ()) -> None:
        """Args:
        tokenizer: decodes.
        stop: texts at which the completion ends; they are not shown.
        until: texts from which on the rest is given by `finish` only, because it must be read as a whole.
        """
        self._tokenizer = tokenizer
        self._stop = stop
        self._until = until
        self._token_ids: list[int] = []
        self._context = 0  # first token that is decoded together with the next ones, so that spaces come out right
        self._read = 0  # tokens whose text is in self._text
        self._text = ""
        self._given = 0  # characters handed out

    def push(self, token_ids: Sequence[int]) -> str:
        """Append tokens; returns the text that can be shown now."""
        self._token_ids += token_ids
        self._decode(final=False)
        shown = cut_at_stop(self._text, (*self._stop, *self._until))
        if len(shown) == len(self._text):  # nothing is cut, but something may have begun
            shown = shown[: len(shown) - self._begun()]
        piece = shown[self._given :]
        self._given += len(piece)
        return piece

    def finish(self) -> tuple[str, str]:
        """The whole text, cut at a stop text, and the part of it that `push` has not given out."""
        self._decode(final=True)
        text = cut_at_stop(self._text, self._stop)
        return text, text[self._given :]

    def _decode(self, *, final: bool) -> None:
        before = self._tokenizer.decode(self._token_ids[self._context : self._read], skip_special_tokens=True)
        after = self._tokenizer.decode(self._token_ids[self._context :], skip_special_tokens=True)
        if final or not after.endswith(_UNFINISHED):
            self._text += after[len(before) :]
            self._context, self._read = self._read, len(self._token_ids)

    def _begun(self) -> int:
        """Characters at the end of the text with which a stop text, or one of `until`, may begin."""
        marks = (*self._stop, *self._until)
        longest = min(len(self._text) - self._given, max((len(m) for m in marks), default=1) - 1)
        sizes = range(longest, 0, -1)
        return next((k for k in sizes if any(m.startswith(self._text[-k:]) for m in marks)), 0)
