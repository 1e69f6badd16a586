"""Texts that end a completion, found while it is being sampled.

The engine knows token ids only, so the text of each sequence is put together here, token by token, with the
tokenizer of the model folder. A character may be spread over several tokens and a stop text over many, and either
may begin in a partial completion.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from forgelite.errors import ConfigError

_INVALID_PREFIX = "Invalid prefix encountered"  # the beginning of what tokenizers' DecodeStream raises


class StopTexts:
    """The tokenizer of one folder, loaded when the first request with stop texts comes."""

    def __init__(self, folder: str | Path) -> None:
        """Nothing is read yet."""
        self._folder = folder
        self._tokenizer: Any | None = None  # tokenizers.Tokenizer
        self._opening = threading.Lock()

    def open(self) -> None:
        """Load the tokenizer, once. Takes up to seconds; may be called from any thread.

        Raises:
            ConfigError: the folder holds none that can decode token by token.
        """
        with self._opening:
            if self._tokenizer is None:
                self._tokenizer = _load(self._folder)

    def watch(self, prompt_ids: Sequence[int], stop: Sequence[str]) -> StopWatch:
        """Watch one completion of a prompt. `open` must have been called."""
        if self._tokenizer is None:
            raise RuntimeError("StopTexts.watch before StopTexts.open")
        return StopWatch(self._tokenizer, prompt_ids, stop)


class StopWatch:
    """Reads the tokens of one completion until its text holds one of the stop texts.

    Text of the prompt never counts. Special tokens count as their text, so that "<|im_end|>" can be a stop text.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], stop: Sequence[str]) -> None:
        """Start before the first token.

        Args:
            tokenizer: a `tokenizers.Tokenizer`.
            prompt_ids: [P]; a tokenizer may write the first token differently after them (a leading space).
            stop: none of them empty.
        """
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._kept = max(map(len, stop)) - 1  # characters in which the beginning of a stop text can lie
        self._tail = ""
        self._stream = DecodeStream(ids=list(prompt_ids), skip_special_tokens=False)

    def feed(self, token_ids: Iterable[int]) -> int | None:
        """Read further tokens.

        Returns:
            How many of them there are up to the one that completes a stop text, itself included; None: none does.
        """
        for count, token_id in enumerate(token_ids, start=1):
            text = self._tail + self._decoded(token_id)
            if any(stop in text for stop in self._stop):
                return count
            self._tail = text[max(0, len(text) - self._kept) :]
        return None

    def _decoded(self, token_id: int) -> str:
        """The characters that the token completes; none while it leaves one unfinished."""
        from tokenizers.decoders import DecodeStream

        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception as error:  # tokenizers raises plain Exceptions
            if not str(error).startswith(_INVALID_PREFIX):
                raise
            # Sampled bytes need not be UTF-8, and some such sequences confuse the stream: it begins anew, as in vLLM.
            self._stream = DecodeStream(skip_special_tokens=False)
            return self._stream.step(self._tokenizer, token_id) or ""


def _load(folder: str | Path) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer in {folder}: {str(error).splitlines()[0]}") from None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(
            f"the tokenizer in {folder} is a {type(tokenizer).__name__}, which cannot decode token by token"
        )
    return backend
