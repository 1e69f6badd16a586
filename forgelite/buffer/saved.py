"""Groups as plain data, for checkpoints. A prompt is saved by its id; the dataset gives it back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from forgelite.types import Group, Prompt, Score, Trajectory, VersionSpan

_FIELDS = tuple(field.name for field in dataclasses.fields(Trajectory))


def group_to_data(group: Group) -> dict[str, Any]:
    """The group as JSON can hold it."""
    return {
        "group_id": group.group_id,
        "prompt_id": group.prompt.prompt_id,
        "trajectories": [_to_data(t) for t in group.trajectories],
    }


def group_from_data(data: Mapping[str, Any], prompt: Callable[[str], Prompt]) -> Group:
    """The group that `group_to_data` wrote; `prompt` finds a prompt by its id."""
    return Group(
        group_id=data["group_id"],
        prompt=prompt(data["prompt_id"]),
        trajectories=[_trajectory(t) for t in data["trajectories"]],
    )


def _to_data(trajectory: Trajectory) -> dict[str, Any]:
    # dataclasses.asdict would copy every list, element by element
    data = {name: getattr(trajectory, name) for name in _FIELDS}
    data["spans"] = [dataclasses.asdict(span) for span in trajectory.spans]
    data["score"] = None if trajectory.score is None else dataclasses.asdict(trajectory.score)
    return data


def _trajectory(data: Mapping[str, Any]) -> Trajectory:
    spans = [VersionSpan(**span) for span in data["spans"]]
    score = None if data["score"] is None else Score(**data["score"])
    return Trajectory(**{**data, "spans": spans, "score": score})
