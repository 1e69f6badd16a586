"""Asynchronous GRPO: a policy generates while a trainer trains, and takes the new weights between two of its steps.

python -m apps.grpo.main --config configs/grpo/toy.yaml loop.steps=20 run.dir=runs/mine

With loop.replay it trains from the record of an earlier run, without a policy; with loop.generate_only it only samples
and scores.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from forgelite.command import run_app
from forgelite.config import GRPOConfig


async def main(config: GRPOConfig) -> None:
    """A run, a replay of one, or samples without training."""
    if config.loop.replay is not None:
        from apps.grpo.replay import replay as run
    elif config.loop.generate_only:
        from apps.grpo.generate import generate as run
    else:
        run = train
    await run(config)


async def train(config: GRPOConfig) -> None:
    """One run: check the inputs, start the stations, connect them by the loop, save the model, report."""
    from apps.grpo.report import report
    from forgelite.checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint
    from forgelite.evaluation import evaluate
    from forgelite.launching import launch
    from forgelite.loop import Loop
    from forgelite.preparation import (
        make_rollout,
        make_scoring,
        open_recorder,
        open_rollout_endpoint,
        prepare,
        record_header,
    )
    from forgelite.scoring.group import score_member

    inputs = prepare(config)
    checkpoints = Path.cwd() / config.run.dir / "checkpoints"
    checkpoint = newest_checkpoint(checkpoints) if config.run.resume else None
    with open_recorder(
        config,
        steps=config.loop.steps,
        rollouts_per_step=config.metrics.rollouts_per_step,
        checkpoint=checkpoint,
        record=record_header(config, inputs.tokenizer) if config.loop.record else None,
    ) as recorder:
        async with (
            launch(config, on_phase=recorder.on_phase) as stations,
            open_rollout_endpoint(config, inputs, stations) as endpoint,
        ):
            rollout = make_rollout(config, inputs, stations, endpoint=endpoint)
            loop = Loop(
                config=config.loop,
                row_length=config.trainer.training.seq_len,
                prompts=inputs.prompts,
                roll_out=rollout.run,
                score_group=make_scoring(config, stations),
                roll_out_member=rollout.run_member,
                score_member=partial(score_member, score=stations.rewards.score),
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
                barrier=config.policy.update.mode == "barrier",
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
