"""Many small requests, one call: what is asked for in the same moment travels together.

A request waits for the end of the current event-loop tick, not for a timer, so a single one is not delayed. At
most `max_calls` calls are open; while they are, newcomers gather for the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Coalescer(Generic[Item, Result]):
    """Turns `call(items) -> results` into `await submit(items) -> results` for many callers."""

    def __init__(self, call: Callable[[list[Item]], Awaitable[Sequence[Result]]], *, max_calls: int = 2) -> None:
        self._call = call
        self._slots = asyncio.Semaphore(max_calls)
        self._waiting: list[tuple[Sequence[Item], asyncio.Future[Sequence[Result]]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(self, items: Sequence[Item]) -> Sequence[Result]:
        """Results of `items`, in order. Raises what the call raised, in every caller that shared it."""
        future: asyncio.Future[Sequence[Result]] = asyncio.get_running_loop().create_future()
        self._waiting.append((items, future))
        if len(self._waiting) == 1:
            task = asyncio.ensure_future(self._flush())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await future

    async def _flush(self) -> None:
        async with self._slots:
            shared, self._waiting = self._waiting, []
            try:
                results = await self._call([item for items, _ in shared for item in items])
            except Exception as error:
                for _, future in shared:
                    if not future.done():
                        future.set_exception(error)
                return
            at = 0
            for items, future in shared:
                if not future.done():  # its caller may have been cancelled
                    future.set_result(results[at : at + len(items)])
                at += len(items)
