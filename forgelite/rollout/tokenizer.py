"""The tokenizer, and prompts as token ids. Loading needs transformers, which is imported when called."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from forgelite.errors import ConfigError
from forgelite.rollout.dataset import Row
from forgelite.types import Prompt

T = TypeVar("T")


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that forgelite uses."""

    eos_token_id: int | None

    def __len__(self) -> int: ...
    def get_vocab(self) -> dict[str, int]: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...
    def apply_chat_template(self, conversation: list[dict], **options: Any) -> Any: ...


def load_tokenizer(folder: str | Path, vocab_size: int | None = None) -> Tokenizer:
    """Load a tokenizer from a local folder.

    Args:
        folder: a Hugging Face folder.
        vocab_size: the model's; a tokenizer with more tokens is refused.

    Raises:
        ConfigError: the folder is missing or holds no tokenizer, or it has more tokens than the model.
    """
    if not Path(folder).is_dir():
        raise ConfigError(f"model.path: there is no folder {folder}")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.tokenizer: no tokenizer in {folder}: {str(error).splitlines()[0]}") from None
    if vocab_size is not None and len(tokenizer) > vocab_size:
        raise ConfigError(
            f"model.tokenizer: {folder} has {len(tokenizer)} tokens, but the model's vocabulary "
            f"(vocab_size in config.json) has {vocab_size}"
        )
    return tokenizer


def fingerprint(tokenizer: Tokenizer) -> str:
    """Equal for tokenizers that give every token the same number."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]


def read_vocab_size(folder: str | Path) -> int:
    """`vocab_size` of a Hugging Face model folder; raises ConfigError if it is not there."""
    return _read_config(folder, "vocab_size", int)


def read_model_type(folder: str | Path) -> str:
    """`model_type`, the model's family, of a Hugging Face model folder; raises ConfigError if it is not there."""
    return _read_config(folder, "model_type", str)


def _read_config(folder: str | Path, name: str, kind: Callable[[Any], T]) -> T:
    path = Path(folder) / "config.json"
    try:
        return kind(json.loads(path.read_text())[name])
    except OSError:
        raise ConfigError(f"model.path: there is no model in {folder} (no {path.name})") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"model.path: {path} does not give {name} ({error!r})") from None


def prompt_maker(tokenizer: Tokenizer, column: str, key: str = "data.prompt") -> Callable[[str, Row], Prompt]:
    """Make the function that turns a row into a prompt.

    The column holds a text, which is tokenized as it is, or a list of chat messages, which go through the
    tokenizer's chat template with the generation prompt added.

    Raises (the returned function):
        ConfigError: a row has no such column, or holds something else there.
    """

    def make(prompt_id: str, row: Row) -> Prompt:
        content = row.get(column)
        if isinstance(content, str):
            text, token_ids = content, tokenizer.encode(content, add_special_tokens=False)
        elif isinstance(content, list):
            text = tokenizer.apply_chat_template(content, tokenize=False, add_generation_prompt=True)
            token_ids = tokenizer.encode(text, add_special_tokens=False)
        else:
            raise ConfigError(
                f"{key}: row {prompt_id} has {type(content).__name__} in column {column!r}; "
                "it must be a text or a list of chat messages"
            )
        return Prompt(prompt_id=prompt_id, text=text, token_ids=tuple(token_ids), row=row)

    return make
