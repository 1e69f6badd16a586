"""Process meshes: spawn a station, end it, and notice when it dies on its own.

One process mesh a station, since the mesh is the unit that lives and dies: after the death of one of its actors a mesh
takes no new ones (it has to be spawned again).
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import Actor, MeshFailure, default_bootstrap_cmd, this_host

from forgelite.errors import ForgeliteError, StationDied
from forgelite.observe.gates import within

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(kw_only=True, slots=True, frozen=True)
class Station:
    """An actor in processes of its own."""

    name: str
    processes: Any  # monarch ProcMesh
    actor: Any  # monarch ActorMesh

    async def call(self, endpoint: Awaitable[T], seconds: float, what: str) -> T:
        """Await a call to this station.

        Args:
            endpoint: the call, for example `station.actor.score.call_one(samples)`.
            seconds: its deadline.
            what: the name of the call in messages.

        Raises:
            StationDied: the process is gone.
            DeadlineExceeded: no answer in time.
            ForgeliteError: what the actor raised, with its own type.
            monarch.actor.ActorError: what else it raised, told with its traceback.
        """
        return await within(seconds, answer(self.name, endpoint), f"{self.name}.{what}")

    async def answer(self, endpoint: Awaitable[T]) -> T:
        """Await a call whose deadline the caller sets; raises what `call` raises otherwise."""
        return await answer(self.name, endpoint)

    async def stop(self, seconds: float) -> None:
        """End the processes. One that cannot be ended in time is left to die with the controller."""
        try:
            await within(seconds, _awaited(self.processes.stop()), f"the end of station {self.name}")
        except Exception as error:  # the station may be dead already: there is nothing left to do
            logger.warning("station %s did not stop cleanly: %s", self.name, error)


def spawn(name: str, actor: type[Actor], *, environment: Mapping[str, str], processes: int = 1) -> Station:
    """Spawn `processes` processes on this host with one actor in each. Returns at once; nothing is built yet.

    A process can be told from the others by the variable FORGELITE_STATION in its environment.
    """

    def command(point: Any) -> Any:
        return default_bootstrap_cmd().with_env({**environment, "FORGELITE_STATION": name})

    mesh = this_host().spawn_procs(
        per_host={"procs": processes}, bootstrap_command=command, bootstrap=_skip_teardown, name=name
    )
    return Station(name=name, processes=mesh, actor=mesh.spawn(name, actor))


def _skip_teardown() -> None:
    """Let a process end where its interpreter would begin to take itself apart: with torch loaded that takes seconds.

    It runs before any actor, so whatever registers for the exit later is still called first.
    """
    atexit.register(_exit)


def _exit() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


async def answer(name: str, endpoint: Awaitable[T]) -> T:
    """Await a Monarch call and give its errors back as what they are."""
    try:
        return await endpoint
    except SupervisionError as error:
        raise StationDied(f"station {name} died: {_first_cause(str(error))}") from error
    except monarch.actor.ActorError as error:
        cause = getattr(error, "exception", None)
        if isinstance(cause, ForgeliteError):
            raise cause from error
        raise


async def _awaited(future: Awaitable[T]) -> T:
    return await future


def _first_cause(report: str) -> str:
    """The line of a supervision report that says why: `Killed(sig=9)`, an exit code, an exception."""
    lines = [line.strip() for line in report.splitlines() if line.strip()]
    telling = [line for line in lines if any(word in line for word in ("Killed", "Stopped", "exit", "Error"))]
    return (telling or lines or ["no report"])[-1]


@contextmanager
def watch_faults(on_fault: Callable[[str, str], None]) -> Iterator[None]:
    """Report the death of any process mesh to `on_fault(mesh name, cause)`, on the running event loop.

    Without this, Monarch's default ends the controller by a KeyboardInterrupt at whatever it happens to await. A death
    is reported more than once (its logger, its actors): `on_fault` must not mind. Processes that ended with the block
    are reported up to a minute later still, so Monarch's default is not put back: from then on a fault is logged.
    """
    loop = asyncio.get_running_loop()

    def hook(failure: MeshFailure) -> None:
        with suppress(RuntimeError):  # the loop is closed: the run is over
            loop.call_soon_threadsafe(on_fault, failure.mesh_name, _first_cause(failure.report()))

    monarch.actor.unhandled_fault_hook = hook
    try:
        yield
    finally:
        monarch.actor.unhandled_fault_hook = _log_late


def _log_late(failure: MeshFailure) -> None:
    logger.info("%s: reported after its run: %s", failure.mesh_name, _first_cause(failure.report()))
