"""Train only: from the record of an earlier run, with the trainer alone.

python -m apps.grpo.main --config configs/grpo/toy.yaml loop.record=true run.dir=runs/recorded
python -m apps.grpo.main --config configs/grpo/toy.yaml loop.replay=runs/recorded run.dir=runs/again
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from apps.grpo.report import report
from forgelite.checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint
from forgelite.config import GRPOConfig
from forgelite.launching import launch_trainer
from forgelite.preparation import open_recorder, prepare_replay
from forgelite.replay import train_from_record


async def replay(config: GRPOConfig) -> None:
    """One replay: check the record against the configuration, start the trainer, train, save the model, report."""
    record = prepare_replay(config)
    checkpoints = Path.cwd() / config.run.dir / "checkpoints"
    checkpoint = newest_checkpoint(checkpoints) if config.run.resume else None
    with open_recorder(
        config,
        steps=config.loop.steps,
        rollouts_per_step=config.metrics.rollouts_per_step,
        checkpoint=checkpoint,
    ) as recorder:
        recorder.on_phase(f"training from {record.folder}, {record.steps} steps; no policy, so no held-out evaluation")
        if record.torn is not None:
            recorder.on_note(f"{record.folder / record.torn} was cut short when its run died, and is left out")
        if record.oldest > config.loop.max_policy_age:
            recorder.on_note(
                f"the record holds samples that are {record.oldest} versions old in their turn: "
                f"loop.max_policy_age={config.loop.max_policy_age} rejects them"
            )
        async with launch_trainer(config, on_phase=recorder.on_phase) as trainer:
            await train_from_record(
                record,
                config=config.loop,
                row_length=config.trainer.training.seq_len,
                trainer=trainer,
                observer=recorder,
                save=partial(save_checkpoint, folder=checkpoints, trainer=trainer, keep=config.checkpoint.keep),
                save_every=config.checkpoint.every,
                resumed=None if checkpoint is None else await load_checkpoint(checkpoint, trainer),
            )
            await trainer.save_hf(str(checkpoints / "hf"))
    report(Path(config.run.dir))
