"""Small trajectories for tests."""

from __future__ import annotations

from collections.abc import Sequence

from forgelite.types import Group, Prompt, Trajectory, VersionSpan


def make_trajectory(
    name: str = "g0/0", *, prompt: int = 2, versions: Sequence[int] = (0, 0, 0), advantage: float | None = 1.0
) -> Trajectory:
    """A trajectory with one sampled token for each entry of `versions`, sampled by that version."""
    spans: list[VersionSpan] = []
    for at, version in enumerate(versions, prompt):
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version=version, start=spans[-1].start, end=at + 1)
        else:
            spans.append(VersionSpan(version=version, start=at, end=at + 1))
    size = prompt + len(versions)
    return Trajectory(
        trajectory_id=name,
        group_id=name.partition("/")[0],
        token_ids=[(7 * i) % 40 + 2 for i in range(size)],
        loss_mask=[i >= prompt for i in range(size)],
        logprobs=[-0.1 * (i - prompt + 1) if i >= prompt else 0.0 for i in range(size)],
        spans=spans,
        finish_reason="stop",
        advantage=advantage,
    )


def make_group(name: str = "g0", *, members: int = 2, versions: Sequence[int] = (0, 0, 0)) -> Group:
    """A group whose members were all sampled by the same versions."""
    return Group(
        group_id=name,
        prompt=Prompt(prompt_id=name.removeprefix("g"), text="ab>", token_ids=(2, 3)),
        trajectories=[make_trajectory(f"{name}/{i}", versions=versions) for i in range(members)],
    )
