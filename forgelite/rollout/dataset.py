"""Rows of a dataset, in an order that is known in advance and can be taken up again at any position."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forgelite.config import import_object
from forgelite.errors import ConfigError
from forgelite.types import Prompt

Row = Mapping[str, Any]


def load_rows(source: str, args: Mapping[str, Any], key: str) -> list[Row]:
    """Read rows from a .jsonl file, or from a function named as `package.module:function`.

    Args:
        source: what the config gives under `key`.
        args: arguments of the function.
        key: the config key, for messages.

    Raises:
        ConfigError: there is no such file or function, a line is not a JSON object, or there are no rows.
    """
    if ":" in source and not source.endswith(".jsonl"):
        rows = list(import_object(source, key)(**args))
    else:
        rows = _read_jsonl(Path(source), key)
    if not rows:
        raise ConfigError(f"{key}: {source} has no rows")
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ConfigError(f"{key}: row {number} of {source} is a {type(row).__name__}, not a mapping")
    return rows


def _read_jsonl(path: Path, key: str) -> list[Row]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{key}: line {number} of {path} is not JSON: {error.msg}") from None
    return rows


def check_column(rows: Sequence[Row], column: str, kinds: tuple[type, ...], key: str) -> None:
    """Raise ConfigError, naming the config key and the first row, unless every row has one of `kinds` in `column`."""
    for number, row in enumerate(rows):
        if not isinstance(row.get(column), kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise ConfigError(
                f"{key}: row {number} has {type(row.get(column)).__name__} in column {column!r}, not {wanted}"
            )


class PromptStream:
    """An endless walk over the rows, epoch after epoch, with a place in it that can be saved.

    Prompts that were given back (`give_back`) come first. The order depends on the seed alone.
    """

    def __init__(
        self, rows: Sequence[Row], *, to_prompt: Callable[[str, Row], Prompt], seed: int, shuffle: bool
    ) -> None:
        """Args:
        rows: the dataset, not empty.
        to_prompt: makes a prompt from an id and a row.
        seed: of the order; every epoch has an order of its own.
        shuffle: False walks in the order of the rows.
        """
        self._rows = rows
        self._to_prompt = to_prompt
        self._seed = seed
        self._shuffle = shuffle
        self._position = 0
        self._order: list[int] = []
        self._epoch = -1
        self._given_back: deque[int] = deque()

    def __iter__(self) -> PromptStream:
        return self

    def __next__(self) -> Prompt:
        if self._given_back:
            return self.prompt(str(self._given_back.popleft()))
        self._position += 1
        return self.prompt(str(self._index(self._position - 1)))

    def prompt(self, prompt_id: str) -> Prompt:
        """The prompt of this id, wherever the walk is."""
        return self._to_prompt(prompt_id, self._rows[int(prompt_id)])

    def give_back(self, prompt: Prompt) -> None:
        """Hand out `prompt` once more, before any new one."""
        self._given_back.append(int(prompt.prompt_id))

    def state_dict(self) -> dict[str, object]:
        """The place in the walk, as plain data."""
        return {"position": self._position, "given_back": list(self._given_back)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go to a place that `state_dict` described."""
        self._position = saved["position"]
        self._given_back = deque(saved["given_back"])

    def _index(self, position: int) -> int:
        epoch, place = divmod(position, len(self._rows))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = list(range(len(self._rows)))
            if self._shuffle:
                random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
        return self._order[place]
