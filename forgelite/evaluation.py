"""Held-out evaluation: every held-out prompt is answered once, greedily, by the version that the policy serves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from forgelite.observe.gates import within
from forgelite.observe.metrics import Rate
from forgelite.rollout.episode import Rollout
from forgelite.rollout.harness import HarnessRollout
from forgelite.scoring.group import ScoreSamples, reward_sample
from forgelite.scoring.reward import PROCESS, RewardSample
from forgelite.types import Failure, Prompt, Score, Trajectory


async def evaluate(
    prompts: Sequence[Prompt], *, rollout: Rollout | HarnessRollout, score: ScoreSamples, timeout_s: float
) -> dict[str, Any]:
    """Answer and score `prompts`.

    Args:
        prompts: the held-out rows.
        rollout: with greedy sampling.
        score: the rewards.
        timeout_s: deadline of the whole evaluation, in seconds (`eval.timeout_s`).

    Returns:
        `eval/reward` (mean over the answers that were scored), `eval/failed`, `time/eval_s`, and
        `eval/<name>` for each reward if there is more than one. Where not one answer could be scored, there is no
        `eval/reward`.

    Raises:
        DeadlineExceeded: it took too long.
    """
    return await within(timeout_s, _evaluate(prompts, rollout, score), "the held-out evaluation (eval.timeout_s)")


async def _evaluate(
    prompts: Sequence[Prompt], rollout: Rollout | HarnessRollout, score: ScoreSamples
) -> dict[str, Any]:
    start = time.monotonic()
    # "eval" keeps the request ids apart from those of training groups.
    rolled_out = await asyncio.gather(*(rollout.run(f"eval{p.prompt_id}", p, 1) for p in prompts))
    answered = [
        (prompt, member)
        for prompt, (member,) in zip(prompts, rolled_out, strict=True)
        if isinstance(member, Trajectory)
    ]
    results = await _score(score, [reward_sample(prompt, t) for prompt, t in answered])
    scores = [r for r in results if not isinstance(r, Failure)]
    metrics: dict[str, Any] = {"eval/failed": len(prompts) - len(scores), "time/eval_s": time.monotonic() - start}
    if scores:
        metrics["eval/reward"] = Rate(numerator=sum(s.reward for s in scores), denominator=len(scores))
        if len(scores[0].parts) > 1:
            for name in scores[0].parts:
                metrics[f"eval/{name}"] = Rate(numerator=sum(s.parts[name] for s in scores), denominator=len(scores))
    return metrics


async def _score(score: ScoreSamples, samples: Sequence[RewardSample]) -> list[Score | Failure]:
    """Score; what failed because the reward process died is scored once more, by the new process."""
    results = list(await score(samples)) if samples else []
    again = [i for i, r in enumerate(results) if isinstance(r, Failure) and r.reason == PROCESS]
    if again:
        for i, result in zip(again, await score([samples[i] for i in again]), strict=True):
            results[i] = result
    return results
