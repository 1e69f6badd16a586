"""Demonstrations as trajectories, so that supervised fine-tuning shares packing and trainer with everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from forgelite.errors import ConfigError
from forgelite.rollout.tokenizer import Tokenizer
from forgelite.types import Prompt, Trajectory


class Demonstrations:
    """An endless stream of demonstrations. Those that do not fit are left out and counted in `skipped`."""

    def __init__(self, prompts: Iterator[Prompt], make: Callable[[Prompt], Trajectory | None], *, rows: int) -> None:
        """Args:
        prompts: the endless walk over the dataset.
        make: makes a demonstration, or None where it does not fit; see `demonstration`.
        rows: of the dataset: if so many in a row do not fit, none does.
        """
        self._prompts = prompts
        self._make = make
        self._rows = rows
        self.skipped = 0

    def __iter__(self) -> Demonstrations:
        return self

    def __next__(self) -> Trajectory:
        for _ in range(self._rows):
            made = self._make(next(self._prompts))
            if made is not None:
                return made
            self.skipped += 1
        raise ConfigError(
            f"data.train: not one of {self._rows} demonstrations fits trainer.training.seq_len with its prompt"
        )


def demonstration(prompt: Prompt, *, tokenizer: Tokenizer, column: str, max_tokens: int) -> Trajectory | None:
    """The prompt, masked out of the loss, followed by the answer and the end of the sequence.

    Args:
        prompt: with its row.
        tokenizer: its end-of-sequence token ends the answer.
        column: of the row, with the answer's text (`data.answer`).
        max_tokens: longest sequence that can be trained (`trainer.training.seq_len`).

    Returns:
        None where there is no prompt, or prompt and answer together are too long.
    """
    answer = prompt.row[column]
    token_ids = [*prompt.token_ids, *tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    if len(token_ids) > max_tokens or not prompt.token_ids:
        return None
    return Trajectory(
        trajectory_id=prompt.prompt_id,
        group_id=prompt.prompt_id,
        token_ids=token_ids,
        loss_mask=[i >= len(prompt.token_ids) for i in range(len(token_ids))],
        logprobs=[0.0] * len(token_ids),
        spans=[],
        finish_reason="stop",
        completion_text=answer,
    )
