"""The stations of one run as one thing that lives and dies: spawned together, watched together, ended together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from monarch.actor import Actor

from forgelite.errors import StationDied
from forgelite.mesh.processes import Station, spawn, watch_faults


class Fleet:
    """An async context manager. When its block ends, however it ends, every process of it is stopped.

    `died` raises StationDied as soon as a process is gone, also while nobody talks to it. Stations spawned as
    `expendable` are left out of that: somebody replaces them.
    """

    def __init__(self, *, stop_timeout_s: float) -> None:
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.died.add_done_callback(_retrieve)  # nobody need be waiting for it
        self._stop_timeout_s = stop_timeout_s
        self._stations: list[Station] = []
        self._expendable: set[str] = set()
        self._watch = ExitStack()

    def spawn(
        self,
        name: str,
        actor: type[Actor],
        *,
        environment: Mapping[str, str],
        processes: int = 1,
        expendable: bool = False,
    ) -> Station:
        """Spawn a station; see `mesh.processes.spawn`."""
        station = spawn(name, actor, environment=environment, processes=processes)
        self._stations.append(station)
        if expendable:
            self._expendable.add(name)
        return station

    def fail(self, error: StationDied) -> None:
        """End the run because of `error`, as if a station had died that nobody replaces."""
        if not self.died.done():
            self.died.set_exception(error)

    async def stop(self, station: Station) -> None:
        """End one station before the others. Nothing happens when it has ended already."""
        if station not in self._stations:
            return
        self._stations.remove(station)
        await station.stop(self._stop_timeout_s)

    async def together(self, *calls: Awaitable[Any]) -> list[Any]:
        """The results of all calls; the first error, or the death of a station, ends the others and is raised."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        work = asyncio.gather(*tasks)
        try:
            await asyncio.wait({work, self.died}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await asyncio.shield(self.died)  # raises
            return work.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(work, *tasks, return_exceptions=True)

    async def __aenter__(self) -> Fleet:
        self._watch.enter_context(watch_faults(self._on_fault))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stations, self._stations = self._stations, []
        try:
            await asyncio.gather(*(station.stop(self._stop_timeout_s) for station in stations))
        finally:
            self._watch.close()

    def _on_fault(self, mesh: str, cause: str) -> None:
        station = next((s for s in self._stations if mesh.startswith(s.name)), None)
        if station is None or station.name in self._expendable:
            return  # it is being stopped, or replaced, or is not ours
        self.fail(StationDied(f"station {station.name} died: {cause}"))


def _retrieve(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.exception()
