"""The trainer without actors: one optimizer step after the other, each of them a version.

batch -> [whiten] -> microbatches of rows -> log-probabilities -> loss share -> backward
      -> totals over ranks -> gradient norm -> [finite?] -> AdamW -> schedule -> version + 1
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from forgelite.config.loss import LossConfig
from forgelite.config.policy_loss import PolicyLossConfig
from forgelite.config.trainer import TrainerConfig
from forgelite.errors import ConfigError, TrainingDiverged
from forgelite.losses import BatchSize, LossInputs, cross_entropy_loss, make_loss, whitened
from forgelite.model.device import prepare_torchtitan
from forgelite.model.rows import microbatches
from forgelite.trainer.metrics import step_metrics
from forgelite.trainer.ranks import Rank, total
from forgelite.types import StepResult, TrainingBatch
from forgelite.weights.manifest import TensorInfo, describe

if TYPE_CHECKING:
    from forgelite.config.schema import ModelConfig
    from forgelite.losses import Loss, LossOutput
    from forgelite.trainer.assembly import Parts


class Trainer:
    """Model, optimizer and version of one trainer process. Made by `Trainer.build`.

    With several processes every method is a collective: all ranks call it, with the same arguments.
    """

    def __init__(
        self,
        parts: Parts,
        config: TrainerConfig,
        loss: LossConfig,
        *,
        rank: Rank | None,
        temperature: float,
    ) -> None:
        self._parts = parts
        self._config = config
        self._loss = make_loss(loss)
        self._whiten_advantages = isinstance(loss, PolicyLossConfig) and loss.whiten_advantages
        self._rank = rank
        self._temperature = temperature
        self._version = 0
        self._described: tuple[TensorInfo, ...] | None = None

    @classmethod
    def build(
        cls,
        model: ModelConfig,
        config: TrainerConfig,
        loss: LossConfig,
        *,
        steps: int,
        seed: int = 0,
        temperature: float = 1.0,
        rank: Rank | None = None,
    ) -> Trainer:
        """Load or initialise the model and build its optimizer.

        Args:
            model: Which model.
            config: `trainer.*`.
            loss: `loss.*`.
            steps: Optimizer steps of the run, for a learning-rate schedule that decays.
            seed: Of random starting weights.
            temperature: At which the policy samples; the logits are divided by it.
            rank: This process among several; None: it is the only one.

        Raises:
            ConfigError: something that was asked for is not supported or does not fit, or a loss of the user's cannot
                be imported.
        """
        device = prepare_torchtitan()
        # Imports torchtitan, which reads its device at that moment.
        from forgelite.trainer.assembly import assemble

        parts = assemble(model, config, steps=steps, seed=seed, device=device, rank=rank)
        return cls(parts, config, loss, rank=rank, temperature=temperature)

    @property
    def version(self) -> int:
        """Completed optimizer steps."""
        return self._version

    @property
    def is_first_rank(self) -> bool:
        """Whether this process is the one that writes."""
        return self._rank is None or self._rank.rank == 0

    def train_step(self, batch: TrainingBatch, *, before_change: Callable[[], None] = lambda: None) -> StepResult:
        """One optimizer step on a batch.

        Args:
            batch: Packed rows on the CPU, the whole batch on every rank.
            before_change: Called when the gradients are known, right before the weights change: whoever still reads
                the weights can hold the step back here.

        Raises:
            ValueError: the batch has no trained token, or rows longer than `trainer.training.seq_len`.
            ConfigError: the learning-rate schedule has ended.
            TrainingDiverged: the loss or the gradient norm is not finite. Weights, optimizer, schedule and
                version are as before.
        """
        started = time.perf_counter()
        parts = self._parts
        size = self._check(batch)
        if self._whiten_advantages:  # every rank has the whole batch, so all find the same mean and deviation
            batch = replace(batch, advantages=whitened(batch.advantages, batch.loss_mask))
        if parts.last_step is not None and self._version >= parts.last_step:
            raise ConfigError(
                f"the learning-rate schedule ended at step {parts.last_step}: raise "
                f"trainer.lr_scheduler.total_steps (or loop.steps)"
            )
        try:
            totals = self._accumulate(batch, self._loss, size, with_gradient=True)
            norm = parts.clip_gradients(self._config.training.max_norm)
            if not (math.isfinite(norm) and math.isfinite(totals["sum/loss"])):
                raise TrainingDiverged(
                    f"step {self._version + 1}: the loss is {totals['sum/loss']}, the gradient norm {norm}; "
                    f"the weights are still those of version {self._version}"
                )
            rate = parts.schedulers.schedulers[0].get_last_lr()[0]
            before_change()
            parts.optimizers.step()
        finally:
            parts.optimizers.zero_grad()  # a step that failed half-way must not add to the next one
        parts.schedulers.step()
        self._version += 1
        metrics = step_metrics(totals, size.tokens) | {
            "loss/grad_norm": norm,
            "trainer/lr": rate,
            "time/train_s": time.perf_counter() - started,
        }
        return StepResult(version=self._version, metrics=metrics)

    def evaluate(self, batch: TrainingBatch) -> float:
        """The mean negative log-probability of the trained tokens of a batch. Changes nothing.

        Raises:
            ValueError: as for `train_step`.
        """
        size = self._check(batch)
        with torch.no_grad():
            return self._accumulate(batch, cross_entropy_loss, size, with_gradient=False)["sum/loss"]

    def export_hf(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights by Hugging Face name, one whole tensor at a time.

        Every rank draws to the end. The tensors may share memory with the model: copy what outlives the next
        step.
        """
        from forgelite.model.hf import export_hf

        return export_hf(self._parts.model, self._parts.definition.spec)

    def export_shards(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights by Hugging Face name, of each tensor the part that this process holds.

        Every rank draws to the end. The tensors may share memory with the model.
        """
        from forgelite.model.hf import export_hf_shards

        return export_hf_shards(self._parts.model, self._parts.definition.spec)

    def describe_hf(self) -> tuple[TensorInfo, ...]:
        """Names, whole shapes and dtypes of what `export_hf` and `export_shards` give. A collective, the first time."""
        if self._described is None:
            from forgelite.model.hf import describe_hf

            self._described = describe(describe_hf(self._parts.model, self._parts.definition.spec))
        return self._described

    def save_hf(self, folder: str | Path) -> None:
        """Write a Hugging Face folder: weights, config.json, and the tokenizer of the starting model."""
        from forgelite.model.hf import write_hf_folder

        tensors = self.export_hf()
        if self.is_first_rank:
            write_hf_folder(Path(folder), self._parts.definition, tensors)
        else:
            for _ in tensors:  # takes part in gathering, keeps nothing
                pass

    def save(self, folder: str | Path) -> None:
        """Write the full state, from which `load` continues bit for bit."""
        from forgelite.trainer.checkpoint import save_state

        save_state(self._parts, self._version, Path(folder))

    def load(self, folder: str | Path) -> None:
        """Take over the state that `save` wrote.

        Raises:
            FileNotFoundError: there is none.
        """
        from forgelite.trainer.checkpoint import load_state

        self._version = load_state(self._parts, Path(folder))

    def close(self) -> None:
        """Leave the process group, if there is one. The trainer cannot be used afterwards."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def _check(self, batch: TrainingBatch) -> BatchSize:
        length, limit = batch.token_ids.shape[1], self._config.training.seq_len
        if length > limit:
            raise ValueError(f"the batch has rows of {length} tokens, trainer.training.seq_len={limit}")
        if batch.trained_tokens == 0:
            raise ValueError("the batch has no trained token: there is nothing to learn from it")
        return BatchSize.of(batch.loss_mask, batch.sequence_ids)

    def _accumulate(
        self, batch: TrainingBatch, loss: Loss, size: BatchSize, *, with_gradient: bool
    ) -> dict[str, float]:
        sums: dict[str, torch.Tensor] = {}
        maxima: dict[str, torch.Tensor] = {}
        share, rows = self._parts.share, self._config.training.local_batch_size
        for part in microbatches(batch, rows, index=share.index, count=share.count):
            output = self._loss_share(part, loss, size)
            if with_gradient:
                output.loss.backward()
            for name, value in {"loss": output.loss.detach(), **output.sums}.items():
                sums[name] = sums[name] + value if name in sums else value
            for name, value in output.maxima.items():
                maxima[name] = torch.maximum(maxima[name], value) if name in maxima else value
        return total(share, sums, maxima)

    def _loss_share(self, part: TrainingBatch, loss: Loss, size: BatchSize) -> LossOutput:
        device = self._parts.device
        scores = self._parts.score(part, self._temperature)
        reference = part.reference_logprobs
        inputs = LossInputs(
            logprobs=scores.logprobs,
            entropy=scores.entropy,
            behaviour_logprobs=part.logprobs.to(device),
            advantages=part.advantages.to(device),
            mask=part.loss_mask.to(device),
            versions=part.versions.to(device),
            sequence_ids=part.sequence_ids.to(device),
            # A batch is one optimizer step, so the policy at its beginning is the one of this very forward pass:
            # another pass before the step would give the same numbers again.
            proximal_logprobs=scores.logprobs.detach(),
            reference_logprobs=None if reference is None else reference.to(device),
        )
        output = loss(inputs, size=size, trainer_version=self._version)
        output.sums["entropy"] = scores.entropy.sum()
        return output
