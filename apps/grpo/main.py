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
    from forgelite.evaluation import evaluate
    from forgelite.launch import launch
    from forgelite.loop import Loop
    from forgelite.preparation import make_rollout, open_recorder, prepare
    from forgelite.scoring.group import score_group

    inputs = prepare(config)
    recorder = open_recorder(config.run.dir, config, config.metrics, steps=config.loop.steps)
    with recorder:
        async with launch(config, on_phase=recorder.on_phase) as stations:
            loop = Loop(
                config=config.loop,
                row_length=config.trainer.training.seq_len,
                prompts=inputs.prompts,
                roll_out=make_rollout(config, inputs, stations.policy).run,
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
                    rollout=make_rollout(config, inputs, stations.policy, greedy=True),
                    score=stations.rewards.score,
                    timeout_s=config.eval.timeout_s,
                )
                if inputs.held_out
                else None,
                evaluate_every=config.eval.every,
                station_died=stations.died,
            )
            await loop.run()
            await stations.trainer.save_hf(str(Path(config.run.dir, "checkpoints", "hf")))
    report(Path(config.run.dir))


if __name__ == "__main__":
    sys.exit(run_app(GRPOConfig, main, description=__doc__))
