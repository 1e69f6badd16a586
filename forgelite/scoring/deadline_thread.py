"""Calls of a user's sync function in a thread, one after the other, each with a deadline.

A thread cannot be ended from outside. One that hangs is left behind: it is a daemon, it stops at the end of the call it
hangs in, and `still_running` says whether that has happened.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from forgelite.types import Failure


class DeadlineThread:
    """One thread that applies `function` to `items` in order."""

    def __init__(self, function: Callable[[Any], Any], items: Sequence[Any]) -> None:
        self._results: list[Any] = []  # what the function returned, or a Failure if it raised, in order
        self._function = function
        self._items = items
        self._started_at = time.monotonic()  # of the current call
        self._left_behind = False
        self._loop = asyncio.get_running_loop()
        self._finished = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="reward", daemon=True)
        self._thread.start()

    async def wait(self, timeout_s: float) -> list[Any]:
        """Wait for the results of all items, or of those before the first call that takes longer than `timeout_s`.

        In the second case the thread is left behind.
        """
        while True:
            at = len(self._results)
            remaining = self._started_at + timeout_s - time.monotonic()
            try:
                await asyncio.wait_for(self._finished.wait(), max(remaining, 0.001))
                return self._results
            except TimeoutError:
                if len(self._results) == at:
                    self._left_behind = True
                    return self._results[:at]  # the call may return just now: it is late all the same

    @property
    def still_running(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        for item in self._items:
            self._started_at = time.monotonic()
            try:
                result = self._function(item)
            except Exception as error:
                result = Failure(reason="raised", message=f"{type(error).__name__}: {error}")
            if self._left_behind:
                return
            self._results.append(result)
        self._loop.call_soon_threadsafe(self._finished.set)
