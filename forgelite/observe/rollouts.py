"""`rollouts.jsonl`: what the policy wrote, with its reward, the versions behind it, and its age when it was trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from forgelite.types import Group


class RolloutLog:
    """Appends trained trajectories to `rollouts.jsonl`."""

    def __init__(self, folder: Path, *, per_step: int | None) -> None:
        """Args:
        folder: the run folder, which exists.
        per_step: at most so many trajectories of a step, spread over its groups; None for all.
        """
        self._path = folder / "rollouts.jsonl"
        self._file: TextIO | None = None  # opened with the first record: not every app has rollouts
        self._per_step = per_step

    def write(self, step: int, trainer_version: int, groups: Sequence[Group]) -> None:
        """Record the batch that step `step` trained at `trainer_version`."""
        if self._file is None:
            self._file = self._path.open("a", encoding="utf-8")
        members = [(group, t) for group in groups for t in group.trajectories]
        if self._per_step is not None and len(members) > self._per_step:
            stride = len(members) / self._per_step if self._per_step else 0
            members = [members[int(i * stride)] for i in range(self._per_step)]
        for group, trajectory in members:
            record = {
                "step": step,
                "trajectory": trajectory.trajectory_id,
                "prompt": group.prompt.text,
                "completion": trajectory.completion_text,
                "reward": trajectory.score.reward if trajectory.score else None,
                "rewards": dict(trajectory.score.parts) if trajectory.score else None,
                "advantage": trajectory.advantage,
                "finish_reason": trajectory.finish_reason,
                "versions": [[s.version, s.start, s.end] for s in trajectory.spans],
                "age": trajectory.age(trainer_version),
            }
            self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; twice is once."""
        if self._file is not None:
            self._file.close()
