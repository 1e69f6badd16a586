"""Supervised fine-tuning: the trainer of the GRPO app on demonstrations, the prompt masked out of the loss.

    python -m apps.sft.main --config configs/sft/toy.yaml

Writes a Hugging Face folder, `<run.dir>/checkpoints/hf`, which apps.grpo, transformers and vLLM load.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from forgelite.command import run_app
from forgelite.config import SFTConfig


async def main(config: SFTConfig) -> None:
    """One run: check the inputs, start the trainer, train, evaluate on held-out rows, save."""
    from forgelite.buffer.packing import pack
    from forgelite.launching import launch_trainer
    from forgelite.preparation import open_recorder, prepare_demonstrations

    demonstrations, held_out = prepare_demonstrations(config)
    row_length, steps = config.trainer.training.seq_len, config.loop.steps
    held_out_batch = pack(held_out, row_length) if held_out else None
    with open_recorder(config, steps=steps) as recorder:
        async with launch_trainer(config, on_phase=recorder.on_phase) as trainer:

            async def held_out_loss() -> dict[str, float]:
                return {} if held_out_batch is None else {"eval/loss": await trainer.evaluate(held_out_batch)}

            await recorder.on_step(0, await held_out_loss(), [])
            for step in range(1, steps + 1):
                start = time.monotonic()
                batch = pack([next(demonstrations) for _ in range(config.loop.batch_size)], row_length)
                result = await trainer.train_step(batch)
                metrics = {
                    "version": result.version,
                    **result.metrics,
                    "time/step_s": time.monotonic() - start,
                }
                if step == steps or (config.eval.every and step % config.eval.every == 0):
                    metrics |= await held_out_loss()
                await recorder.on_step(step, metrics, [])
            if demonstrations.skipped:
                recorder.on_note(f"{demonstrations.skipped} demonstrations were too long for trainer.training.seq_len")
            await trainer.save_hf(str(Path.cwd() / config.run.dir / "checkpoints" / "hf"))


if __name__ == "__main__":
    sys.exit(run_app(SFTConfig, main, name="apps.sft.main", description=__doc__))
