"""A demonstration as a trajectory, so that supervised fine-tuning shares packing and trainer with everything else."""

from __future__ import annotations

from forgelite.errors import ConfigError
from forgelite.rollout.tokenizer import Tokenizer
from forgelite.types import Prompt, Trajectory


def demonstration(prompt: Prompt, *, tokenizer: Tokenizer, column: str, max_tokens: int) -> Trajectory:
    """The prompt, masked out of the loss, followed by the answer and the end of the sequence.

    Args:
        prompt: with its row.
        tokenizer: its end-of-sequence token ends the answer.
        column: of the row, with the answer's text (`data.answer`).
        max_tokens: longest sequence that can be trained (`trainer.training.seq_len`).

    Raises:
        ConfigError: there is no text in that column, or prompt and answer together are too long.
    """
    answer = prompt.row.get(column)
    if not isinstance(answer, str):
        raise ConfigError(
            f"data.answer: row {prompt.prompt_id} has {type(answer).__name__} in column {column!r}, not a text"
        )
    if tokenizer.eos_token_id is None:
        raise ConfigError("model.tokenizer: it has no end-of-sequence token to end a demonstration with")
    answer_ids = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    size = len(prompt.token_ids) + len(answer_ids)
    if size > max_tokens or not prompt.token_ids:
        raise ConfigError(
            f"data.train: row {prompt.prompt_id} has {len(prompt.token_ids)} tokens of prompt and {len(answer_ids)} of "
            f"answer; there must be a prompt, and trainer.training.seq_len={max_tokens} must hold both"
        )
    return Trajectory(
        trajectory_id=prompt.prompt_id,
        group_id=prompt.prompt_id,
        token_ids=[*prompt.token_ids, *answer_ids],
        loss_mask=[i >= len(prompt.token_ids) for i in range(size)],
        logprobs=[0.0] * size,
        spans=[],
        finish_reason="stop",
        completion_text=answer,
    )
