"""Generate only: sample and score by the starting weights, and record it, without a trainer.

python -m apps.grpo.main --config configs/grpo/toy.yaml loop.generate_only=true loop.steps=10 run.dir=runs/sampled
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from apps.grpo.report import report
from forgelite.config import GRPOConfig
from forgelite.generation import BatchCounter, FrozenPolicy, untrained
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


async def generate(config: GRPOConfig) -> None:
    """Check the inputs, start the policy and the rewards, let the loop go round without a trainer, report."""
    inputs = prepare(config)
    with open_recorder(
        config,
        steps=config.loop.steps,
        rollouts_per_step=config.metrics.rollouts_per_step,
        record=record_header(config, inputs.tokenizer),
    ) as recorder:
        recorder.on_phase(f"{config.loop.steps} batches by the starting weights; no trainer, so no held-out evaluation")
        async with (
            launch(config, on_phase=recorder.on_phase) as stations,
            open_rollout_endpoint(config, inputs, stations) as endpoint,
        ):
            rollout = make_rollout(config, inputs, stations, endpoint=endpoint)
            await Loop(
                config=untrained(config.loop),
                row_length=config.trainer.training.seq_len,
                prompts=inputs.prompts,
                roll_out=rollout.run,
                score_group=make_scoring(config, stations),
                roll_out_member=rollout.run_member,
                score_member=partial(score_member, score=stations.rewards.score),
                trainer=BatchCounter(),
                policy=FrozenPolicy(stations.policy),
                observer=recorder,
                station_died=stations.died,
            ).run()
    report(Path(config.run.dir))
