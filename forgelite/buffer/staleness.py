"""How far generation may run ahead, and how old a sample may be when the loss takes it.

Both questions are asked in several places and answered only here, by two functions of plain numbers.

Pacing. Groups are numbered in the order in which they will be trained: group k belongs to batch k // B (B groups a
step), and batch b is trained by the trainer at version b. A group may start when

    k // B - served  <=  depth                      served: the version that the policy computes with

so a group that is trained in its turn was sampled by version b - depth or a newer one: its age is at most `depth`.
Groups are trained as they finish, not as they start. One that is overtaken may be trained in a later batch and be
older; that is what the bound on age is for.

Age. Judged on the oldest trained token, at the trainer's version, when the loss takes the sample. Nothing is taken
earlier and kept, so no queue or prefetch lies between the judgement and the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from forgelite.types import Trajectory

OnStale = Literal["drop_sample", "drop_group", "mask_tokens"]


def groups_to_start(*, number: int, groups_per_step: int, served_version: int, depth: int | None) -> int | None:
    """How many groups may start now.

    Args:
        number: the number of the next group: groups that were taken by the trainer, are queued or in flight.
        groups_per_step: groups in a batch.
        served_version: the version that every serving replica has acknowledged.
        depth: batches that generation may run ahead; None for no bound.

    Returns:
        A count, possibly 0; None for no bound.
    """
    if depth is None:
        return None
    return max(0, (served_version + depth + 1) * groups_per_step - number)


def drop_stale(
    trajectories: Sequence[Trajectory], *, trainer_version: int, max_policy_age: int, on_stale: OnStale
) -> tuple[list[Trajectory], list[Trajectory]]:
    """Split one group into what the loss may take and what is too old.

    With `mask_tokens`, tokens older than the bound leave the loss mask (in place) and the trajectory stays as long
    as one trained token is left.

    Returns:
        (kept, rejected), together the trajectories that were given.
    """
    stale = [t for t in trajectories if t.age(trainer_version) > max_policy_age]
    if not stale:
        return list(trajectories), []
    if on_stale == "drop_group":
        return [], list(trajectories)
    if on_stale == "mask_tokens":
        for trajectory in stale:
            for span in trajectory.spans:
                if trainer_version - span.version > max_policy_age:
                    trajectory.loss_mask[span.start : span.end] = [False] * (span.end - span.start)
        stale = [t for t in stale if not any(t.loss_mask)]
    dropped = {t.trajectory_id for t in stale}
    return [t for t in trajectories if t.trajectory_id not in dropped], stale
