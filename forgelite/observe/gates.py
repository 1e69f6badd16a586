"""Waits that end (law 6): every wait has a deadline and a name, and says at its end what it was waiting for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from forgelite.errors import DeadlineExceeded

T = TypeVar("T")


async def within(seconds: float, awaitable: Awaitable[T], gate: str, diagnose: Callable[[], str] | None = None) -> T:
    """Await with a deadline.

    Args:
        seconds: the deadline.
        awaitable: what is waited for. It is cancelled at the deadline.
        gate: the name of the wait, as a user would say it ("a training batch").
        diagnose: called at the deadline; what it returns (fill level, holder, oldest item) joins the message.

    Raises:
        DeadlineExceeded: the deadline passed. Whatever the awaitable raises passes through.
    """
    task = asyncio.ensure_future(awaitable)
    done, _ = await _wait(task, seconds)
    if done:
        return task.result()
    detail = f": {diagnose()}" if diagnose else ""
    raise DeadlineExceeded(f"waited {seconds:g} s for {gate}{detail}")


async def _wait(task: asyncio.Future[T], seconds: float) -> tuple[set, set]:
    """`asyncio.wait` that also cancels the awaited task when the caller is cancelled or the time is up.

    `asyncio.wait_for` would do, but it turns a TimeoutError raised by the awaitable itself into "the deadline
    passed"; here the two stay apart.
    """
    try:
        done, pending = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    for late in pending:
        late.cancel()
    return done, pending
