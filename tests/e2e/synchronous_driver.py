"""Synchronous GRPO written out by hand on the stations of `apps.grpo`: no loop, no queue, no ledger.

python -m tests.e2e.synchronous_driver takes the arguments of apps.grpo.main. It writes `driver.json`, an object a step,
and `checkpoints/hf` to the run folder.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from forgelite.command import run_app
from forgelite.config import GRPOConfig


async def main(config: GRPOConfig) -> None:
    """Every step: one batch of groups sampled and scored together, one optimizer step, the new weights."""
    from forgelite.buffer.packing import pack
    from forgelite.launching import launch
    from forgelite.preparation import make_rollout, make_scoring, prepare

    inputs, folder, steps, number = prepare(config), Path.cwd() / config.run.dir, [], 0
    folder.mkdir(parents=True)
    async with launch(config) as stations:
        rollout, score_group = make_rollout(config, inputs, stations), make_scoring(config, stations)
        for _ in range(config.loop.steps):
            wave = [(f"g{number + i}", next(inputs.prompts)) for i in range(config.loop.groups_per_step)]
            number += len(wave)
            members = await asyncio.gather(*(rollout.run(*group, config.loop.group_size) for group in wave))
            scored = [await score_group(*group, rolled) for group, rolled in zip(wave, members, strict=True)]
            trajectories = [t for each in scored for t in each.group.trajectories]
            result = await stations.trainer.train_step(pack(trajectories, config.trainer.training.seq_len))
            await stations.trainer.publish()
            await stations.policy.update_weights(result.version)
            rewards = [score.reward for each in scored for score in each.scores]
            steps.append({"version": result.version, "rewards": rewards, **result.metrics})
        await stations.trainer.save_hf(str(folder / "checkpoints" / "hf"))
    (folder / "driver.json").write_text(json.dumps(steps))


if __name__ == "__main__":
    sys.exit(run_app(GRPOConfig, main, name="tests.e2e.synchronous_driver", description=__doc__))
