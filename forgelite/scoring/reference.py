"""The frozen starting model: log-probabilities that the policy is kept close to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forgelite.model.device import prepare_torchtitan
from forgelite.model.rows import microbatches
from forgelite.types import TrainingBatch

if TYPE_CHECKING:
    from torchtitan.models.common.decoder import Decoder

    from forgelite.config.schema import ModelConfig


class Reference:
    """A model that is only read. Made by `Reference.build`."""

    def __init__(self, model: Decoder, device: torch.device, temperature: float, rows: int) -> None:
        self._model = model.requires_grad_(False)
        self._device = device
        self._temperature = temperature
        self._rows = rows

    @classmethod
    def build(
        cls,
        model: ModelConfig,
        *,
        max_seq_len: int,
        seed: int = 0,
        temperature: float = 1.0,
        rows: int = 64,
    ) -> Reference:
        """Load the model that the trainer starts from.

        Args:
            model: Which model; the same as the trainer's.
            max_seq_len: Longest sequence that will be scored.
            seed: Of random weights; the trainer's seed gives the trainer's weights.
            temperature: At which the policy samples; the logits are divided by it, as in the trainer.
            rows: Rows computed at once. Changes memory only.

        Raises:
            ConfigError: the model is not supported.
        """
        device = prepare_torchtitan()
        # Imports torchtitan, which reads its device at that moment.
        from forgelite.model.build import build_model
        from forgelite.model.spec import define_model

        definition = define_model(model, device=device, max_seq_len=max_seq_len)
        return cls(build_model(definition, seed, device), device, temperature, rows)

    def logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        """Log-probability of each trained token of a batch, zero elsewhere.

        Args:
            batch: Packed rows on the CPU. Only token ids, positions, sequence ids and loss mask are read.

        Returns:
            [R, L] float32 on the CPU.
        """
        from forgelite.model.forward import score_tokens

        out = torch.zeros(batch.token_ids.shape)
        start = 0
        with torch.inference_mode():
            for part in microbatches(batch, self._rows):
                scores = score_tokens(self._model, part, temperature=self._temperature, device=self._device)
                rows, width = scores.logprobs.shape
                out[start : start + rows, :width] = scores.logprobs.cpu()
                start += rows
        return out
