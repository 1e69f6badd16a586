"""Asynchronous GRPO: a policy generates while a trainer trains, and takes the new weights between two of its steps.

python -m apps.grpo.main --config configs/grpo/toy.yaml loop.steps=20 run.dir=runs/mine
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from forgelite.command import run_app
from forgelite.config import GRPOConfig


async def main(config: GRPOConfig) -> None:
    """One run: check the inputs, start the stations, connect them by the loop, save the model, report."""
    from apps.grpo.report import report
    from forgelite.checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint
    from forgelite.evaluation import evaluate
    from forgelite.launching import launch
    from forgelite.loop import Loop
    from forgelite.preparation import make_rollout, open_recorder, open_rollout_endpoint, prepare
    from forgelite.scoring.group import score_group

    inputs = prepare(config)
    checkpoints = Path.cwd() / config.run.dir / "checkpoints"
    checkpoint = newest_checkpoint(checkpoints) if config.run.resume else None
    with open_recorder(
        config,
        steps=config.loop.steps,
        rollouts_per_step=config.metrics.rollouts_per_step,
        checkpoint=checkpoint,
    ) as recorder:
        async with (
            launch(config, on_phase=recorder.on_phase) as stations,
            open_rollout_endpoint(config, inputs, stations) as endpoint,
        ):
            loop = Loop(
                config=config.loop,
                row_length=config.trainer.training.seq_len,
                prompts=inputs.prompts,
                roll_out=make_rollout(config, inputs, stations, endpoint=endpoint).run,
                score_group=partial(
                    score_group,
                    score=stations.rewards.score,
                    reference=stations.reference.logprobs if stations.reference else None,
                    advantage=config.advantage,
                    filter_zero_variance=config.loop.filter_zero_variance,
                    drop_group_on_failure=config.reward.on_failure == "drop_group",
                ),
                trainer=stations.trainer,
                policy=stations.policy,
                observer=recorder,
                evaluate=partial(
                    evaluate,
                    inputs.held_out,
                    rollout=make_rollout(config, inputs, stations, greedy=True, endpoint=endpoint),
                    score=stations.rewards.score,
                    timeout_s=config.eval.timeout_s,
                )
                if inputs.held_out
                else None,
                evaluate_every=config.eval.every,
                save=partial(
                    save_checkpoint, folder=checkpoints, trainer=stations.trainer, keep=config.checkpoint.keep
                ),
                save_every=config.checkpoint.every,
                station_died=stations.died,
            )
            if checkpoint is not None:
                loop.load_state_dict(await load_checkpoint(checkpoint, stations.trainer))
                await stations.trainer.publish()
                await stations.policy.update_weights(loop.version)
            await loop.run()
            await stations.trainer.save_hf(str(checkpoints / "hf"))
    report(Path(config.run.dir))


if __name__ == "__main__":
    sys.exit(run_app(GRPOConfig, main, name="apps.grpo.main", description=__doc__))
