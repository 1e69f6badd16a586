"""What one step cost. A pure function of clock readings and of the policy's running totals."""

from __future__ import annotations

from typing import Any

from forgelite.loop.stations import Usage
from forgelite.observe.metrics import Rate


def time_metrics(*, step_s: float, waited_s: float, trained_s: float, used: Usage, before: Usage) -> dict[str, Any]:
    """Times, idle shares and generated tokens of one step.

    Args:
        step_s: from the end of the step before to the end of this one, in seconds.
        waited_s: of that, waiting for the batch.
        trained_s: of that, in the trainer's call.
        used, before: the policy's totals at both ends.
    """
    generated = used.generated_tokens - before.generated_tokens
    return {
        "time/step_s": step_s,
        "time/wait_batch_s": waited_s,
        "time/train_call_s": trained_s,
        "idle/trainer": Rate(numerator=step_s - trained_s, denominator=step_s),
        "idle/policy": Rate(numerator=max(0.0, step_s - (used.busy_s - before.busy_s)), denominator=step_s),
        "time/engine_step_s": Rate(numerator=used.busy_s - before.busy_s, denominator=used.steps - before.steps),
        "tokens/generated": generated,
        "tokens_per_s/generated": Rate(numerator=generated, denominator=step_s),
    }
