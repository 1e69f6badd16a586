"""The event loop on which simulations run."""

from __future__ import annotations

import asyncio
import time

import pytest

from benchmarks.virtual_clock import Deadlock, run_virtual


def test_an_hour_passes_at_once():
    async def wait() -> float:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await asyncio.sleep(3600)
        return loop.time() - begun

    started = time.monotonic()
    assert run_virtual(wait()) == pytest.approx(3600)
    assert time.monotonic() - started < 60


def test_timers_run_in_the_order_of_their_times_whatever_the_callbacks_cost():
    async def order() -> list[tuple[str, float]]:
        loop, seen = asyncio.get_running_loop(), []

        async def note(name: str, after: float) -> None:
            await asyncio.sleep(after)
            sum(range(10_000))  # real time that a real clock would count
            seen.append((name, loop.time()))

        await asyncio.gather(note("late", 2.0), note("early", 1.0), note("last", 2.5))
        return seen

    assert run_virtual(order()) == [("early", 1.0), ("late", 2.0), ("last", 2.5)]


def test_ready_callbacks_run_before_the_clock_moves():
    async def turns() -> float:
        for _ in range(100):
            await asyncio.sleep(0)
        return asyncio.get_running_loop().time()

    assert run_virtual(turns()) == 0.0


def test_timeouts_of_asyncio_count_simulated_time():
    async def give_up() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(give_up()) == pytest.approx(30)


def test_times_far_apart_stay_exact():
    async def wait() -> float:
        await asyncio.sleep(40 * 24 * 3600)  # longer than one wait of a selector may be
        await asyncio.sleep(1e-3)
        return asyncio.get_running_loop().time()

    assert run_virtual(wait()) == pytest.approx(40 * 24 * 3600 + 1e-3, abs=1e-8)


def test_a_time_that_a_float_cannot_resolve_is_an_error():
    with pytest.raises(OverflowError, match="simulated time"):
        run_virtual(asyncio.sleep(1e9))


def test_a_wait_that_nothing_can_end_is_an_error():
    async def hang() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="nothing is ready and no timer is set"):
        run_virtual(hang())


def test_threads_are_refused():
    async def use_a_thread() -> None:
        await asyncio.to_thread(time.sleep, 0)

    with pytest.raises(RuntimeError, match="does not wait for threads"):
        run_virtual(use_a_thread())
