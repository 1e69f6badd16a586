"""An asyncio event loop whose clock jumps: when nothing is ready, its time is that of the next timer.

    ready callbacks ──run──> none left ──> clock := time of the next timer ──> that timer's callback is ready ──> ...

Code that takes its time from the event loop (`loop.time()`, `asyncio.sleep`, `call_later`, `asyncio.timeout`) runs
unchanged, in the order in which it would run on an infinitely fast machine, and every run is the same. An hour with
a thousand events takes as long as the thousand callbacks.

Real time does not exist here, so what needs it is refused: threads (`run_in_executor`), and a wait that no timer and
no ready callback can end (`Deadlock`), which on a real clock would hang for ever.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

# 46 days. From twice that on, floats are further apart than the nanosecond that asyncio takes for the clock's
# resolution: a timer might never be due.
LATEST_S = 4_000_000.0


class Deadlock(RuntimeError):
    """Every task waits, and nothing is left that could wake one."""


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """The event loop. Example: `with asyncio.Runner(loop_factory=VirtualClockLoop) as runner: runner.run(main())`."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Simulated seconds since the loop was made."""
        return self._jumping.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> NoReturn:
        """Refused: the clock would not wait for the thread."""
        raise RuntimeError(f"{func} was given to a thread: a virtual clock does not wait for threads")


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a virtual clock that starts at 0.

    Raises:
        Deadlock: the tasks wait for one another, or for something outside of the loop.
    """
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)


class _JumpingSelector(selectors.BaseSelector):
    """Tells the loop that its timeout has passed, at once. Files are watched only while nothing else is to do."""

    def __init__(self) -> None:
        self.now = 0.0
        self._files = selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout == 0:
            return []  # callbacks are ready: no look at the files, which costs a system call
        events = self._files.select(0)
        if events:
            return events
        if timeout is None:
            raise Deadlock("nothing is ready and no timer is set: every task waits for something that cannot come")
        self.now += timeout
        if self.now > LATEST_S:
            raise OverflowError(f"the simulated time passed {LATEST_S:g} s")
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._files.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._files.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._files.modify(fileobj, events, data)

    def get_map(self) -> Any:
        return self._files.get_map()

    def close(self) -> None:
        self._files.close()
