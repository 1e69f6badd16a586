"""Groups as plain data, for checkpoints. A prompt is saved by its id; the dataset gives it back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from forgelite.types import Group, Prompt, Score, Trajectory, VersionSpan


def group_to_data(group: Group) -> dict[str, Any]:
    """The group as JSON can hold it."""
    return {
        "group_id": group.group_id,
        "prompt_id": group.prompt.prompt_id,
        "trajectories": [dataclasses.asdict(t) for t in group.trajectories],
    }


def group_from_data(data: Mapping[str, Any], prompt: Callable[[str], Prompt]) -> Group:
    """The group that `group_to_data` wrote; `prompt` finds a prompt by its id."""
    return Group(
        group_id=data["group_id"],
        prompt=prompt(data["prompt_id"]),
        trajectories=[_trajectory(t) for t in data["trajectories"]],
    )


def _trajectory(data: Mapping[str, Any]) -> Trajectory:
    spans = [VersionSpan(**span) for span in data["spans"]]
    score = None if data["score"] is None else Score(**data["score"])
    return Trajectory(**{**data, "spans": spans, "score": score})
