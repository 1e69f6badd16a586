"""A group that does not wait for its slowest members: complete at k of n, or at a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from forgelite.types import Failure, Trajectory

COMPARABLE = 2  # members that a group needs at least: one alone has nothing to be compared with


async def first_members(
    members: Sequence[Coroutine[Any, Any, Trajectory | Failure]], *, complete_at: int, deadline_s: float | None
) -> list[Trajectory | Failure | None]:
    """Run all members at once and cut those that are late.

    Args:
        members: each ends with a scored trajectory or with why there is none.
        complete_at: scored trajectories at which the group is complete. When so many cannot be had any more, the group
            is complete when every member has ended.
        deadline_s: seconds after which `COMPARABLE` of them are enough; None: no such deadline.

    Returns:
        Entry i is what member i ended with, or None: it was cancelled, and its work has ended.

    Raises:
        Whatever a member raises, after the others were cancelled.
    """
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(member) for member in members]
    deadline = None if deadline_s is None else loop.time() + deadline_s
    running, needed, scored = set(tasks), complete_at, 0
    try:
        while running and scored < needed:
            left = None if deadline is None else max(0.0, deadline - loop.time())
            ended, running = await asyncio.wait(running, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            scored += sum(isinstance(task.result(), Trajectory) for task in ended)
            if deadline is not None and loop.time() >= deadline:
                needed, deadline = min(needed, COMPARABLE), None
        return [task.result() if task.done() else None for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
