"""Waits that end (law 6): every wait has a deadline and a name, and says at its end what it was waiting for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from forgelite.errors import DeadlineExceeded

T = TypeVar("T")


@dataclass(kw_only=True, slots=True, eq=False)
class _OpenGate:
    gate: str
    since: float  # the event loop's clock, in seconds
    diagnose: Callable[[], str]


class OpenGates:
    """The waits of a run that are open just now, so that a stall can be told by its name.

    Example: `with gates.at("a training step", lambda: "held by the trainer"): await trainer.train_step(batch)`.
    """

    def __init__(self) -> None:
        self._open: list[_OpenGate] = []

    @contextmanager
    def at(self, gate: str, diagnose: Callable[[], str]) -> Iterator[None]:
        """Wait inside the block. `diagnose` says, when it is asked, how full the gate is and who holds it."""
        entry = _OpenGate(gate=gate, since=asyncio.get_running_loop().time(), diagnose=diagnose)
        self._open.append(entry)
        try:
            yield
        finally:
            self._open.remove(entry)

    def stalled(self, seconds: float) -> list[str]:
        """One line for each wait that has been open for at least `seconds`: its gate, since when, and its diagnosis."""
        now = asyncio.get_running_loop().time()
        return [
            f"waiting for {entry.gate} for {now - entry.since:.3g} s: {entry.diagnose()}"
            for entry in self._open
            if now - entry.since >= seconds
        ]


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
