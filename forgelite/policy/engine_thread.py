"""A thread that engine calls can be left in."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class EngineThread:
    """Runs calls one after the other. A call that never returns holds up this thread and nobody else.

    A step of several ranks ends inside a collective for ever when one of them is gone, and no exception can reach it
    there. `ThreadPoolExecutor` would do, but an interpreter that ends waits for its threads.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, call: Callable[[], T], done: Callable[[Future[T]], None] | None = None) -> Future[T]:
        """Run `call` after those before it; `done` is called in this thread when it has ended."""
        outcome: Future[T] = Future()
        if done is not None:
            outcome.add_done_callback(done)
        self._calls.put((outcome, call))
        return outcome

    def end(self) -> None:
        """End the thread after the calls so far, if they end."""
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            outcome, call = item
            try:
                result = call()
            except Exception as error:  # travels to whoever waits
                outcome.set_exception(error)
            else:
                outcome.set_result(result)
            del item, outcome, call  # nothing is kept alive while the thread waits
