"""The replicas of a policy: which of them serve, and what happens to those that do not.

                 start, current weights taken
      STARTING ────────────────────────────────► SERVING ──remove()──► LEAVING ──► gone
          ▲                                         │                     │
          │        lost: dies, hangs, raises,       │                     │
          └────── cannot take a version ◄───────────┴─────────────────────┘
          │
          └──► gone, when it was restarted too often; the last one to go takes the service with it

A process is the unit of restart: one that is lost is killed (also one that only hangs), and another takes its name.
It begins with the weights of `model.path`, so it takes the current version before it serves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from forgelite.errors import ConfigError, StationDied
from forgelite.observe.gates import within
from forgelite.policy.client import PolicyClient
from forgelite.policy.counters import Counters
from forgelite.policy.engine_protocol import EngineStats, UpdateReport
from forgelite.policy.replicas import Replica, ReplicaProcess, ReplicaSettings, ReplicaState, StartReplica
from forgelite.policy.served_version import ServedVersion, Weights

logger = logging.getLogger(__name__)

_KILL_S = 15.0  # seconds that the end of a process that is killed may take


class ReplicaSet:
    """Starts, watches, updates and replaces the replicas of one policy. Belongs to one event loop."""

    def __init__(
        self,
        start: StartReplica,
        *,
        settings: ReplicaSettings,
        on_change: Callable[[], None],
        on_dead: Callable[[StationDied], None] = lambda error: None,
    ) -> None:
        """Nothing is started yet.

        Args:
            start: starts one replica by its name. It is called again for each restart.
            settings: see there.
            on_change: called when a replica begins or ends to serve, or has taken a version.
            on_dead: called once, when the last replica is lost beyond its restarts.
        """
        self._start_process = start
        self._settings = settings
        self._on_change = on_change
        self._on_dead = on_dead
        self._replicas: dict[str, Replica] = {}
        self._next_index = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._weights = ServedVersion(
            serving=self.serving,
            lose=self.lose,
            describe=self.describe,
            on_change=on_change,
            timeout_s=settings.update_timeout_s,
        )
        self._retired = Counters()
        self._started = False
        self.dead: str | None = None  # why nothing is served any more
        self.restarts = 0

    async def start(self) -> None:
        """Start `policy.replicas` replicas at the same time.

        Raises:
            Exception: what the first of them raised that could not be started.
        """
        starting = [asyncio.ensure_future(self._start_new()) for _ in range(self._settings.replicas)]
        try:
            await asyncio.gather(*starting)
        finally:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
        self._started = True

    async def add(self) -> str:
        """Start one more replica; returns its name when it serves. Raises what starting it raised."""
        self._check_alive()
        return await self._start_new()

    async def remove(self, name: str, *, timeout_s: float) -> None:
        """Take a replica away: nothing more is sent to it, and its process ends when its requests have.

        Args:
            name: of a replica that serves.
            timeout_s: requests that run longer are handed to the others, which go on from the tokens so far.

        Raises:
            ConfigError: there is no such replica, or it is the only one that serves.
        """
        replica = self._replicas.get(name)
        if replica is None or replica.state is not ReplicaState.SERVING:
            raise ConfigError(f"there is no serving replica {name!r} to remove: {self.describe()}")
        if len(self.serving()) == 1:
            raise ConfigError(f"{name} is the only replica that serves: add one before you remove it")
        replica.state = ReplicaState.LEAVING
        client, process = replica.client, replica.process
        self._on_change()
        try:
            await asyncio.wait_for(replica.idle.wait(), timeout_s)
        except TimeoutError:
            logger.warning("%s is removed with %d requests open; others take them over", name, len(replica.open))
        finally:
            if replica.client is client:  # else it was lost while it left
                cause = f"{name} was removed"
                self._retire(replica)
                replica.process = replica.client = None
                self._give_up(replica, cause)
                await self._end(client, process, cause)

    def serving(self) -> list[Replica]:
        """The replicas to which requests can be sent."""
        return [r for r in self._replicas.values() if r.state is ReplicaState.SERVING]

    def get(self, name: str) -> Replica:
        """A replica by its name."""
        return self._replicas[name]

    @property
    def version(self) -> int:
        """That every serving replica has acknowledged."""
        return self._weights.version

    def describe(self) -> str:
        """One line that says how each replica stands."""
        states = ", ".join(f"{r.name} {r.state.value} ({len(r.open)} open)" for r in self._replicas.values())
        return states or "there is no replica"

    async def update_weights(self, weights: Weights) -> UpdateReport:
        """Give all serving replicas a version at the same time; see `ServedVersion.update`. Raises StationDied too."""
        self._check_alive()
        return await self._weights.update(weights)

    def lose(self, replica: Replica, client: PolicyClient, cause: str) -> None:
        """Take a replica out of service and start another process in its place. Ignored for a client of the past."""
        if replica.client is not client or self.dead is not None:
            return
        if replica.state is ReplicaState.STARTING:
            client.fail(cause)  # which is an error of its start
            return
        process, replica.process, replica.client = replica.process, None, None
        leaving = replica.state is ReplicaState.LEAVING
        replica.state = ReplicaState.STARTING
        self._retire(replica)
        logger.warning("%s is out of service with %d requests open: %s", replica.name, len(replica.open), cause)
        client.fail(cause)
        for request_id in list(replica.open):
            replica.release(request_id)
        replica.idle.set()
        if leaving:
            self._give_up(replica, cause)
            self._spawn(self._end(client, process, cause))
        else:
            self._spawn(self._replace(replica, client, process, cause))
        self._on_change()

    async def stats(self) -> EngineStats:
        """The counters of all replicas together, those of lost ones included; `busy_s` is the mean of a replica."""
        serving = self.serving()
        answers = await asyncio.gather(*(self._ask_stats(r, r.client, None) for r in serving))
        known = [replica.stats for replica in serving if replica.stats is not None]
        return self._retired.with_running(known, version=self.version, current=[a for a in answers if a is not None])

    async def close(self) -> None:
        """End every process, at the same time and at once. Nothing is restarted any more."""
        self._die("the policy service was closed", closing=True)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        replicas, self._replicas = list(self._replicas.values()), {}
        await asyncio.gather(
            *(self._end(r.client, r.process, "the policy service was closed") for r in replicas),
            return_exceptions=True,
        )

    # ---- starting and replacing ----

    async def _start_new(self) -> str:
        replica = Replica(name=f"policy-{self._next_index}")
        self._next_index += 1
        self._replicas[replica.name] = replica
        try:
            await self._bring_up(replica)
        except BaseException as error:
            self._give_up(replica, str(error))
            raise
        return replica.name

    async def _bring_up(self, replica: Replica) -> None:
        process = await self._start_process(replica.name)
        client = PolicyClient(
            process.calls,
            request_timeout_s=float("inf"),  # the service sets each request's own
            update_timeout_s=self._settings.update_timeout_s,
            answer_s=self._settings.answer_s,
        )
        replica.process, replica.client, replica.stats = process, client, None
        self._spawn(self._watch(replica, client))  # from here on: one that hangs now would hold up every update
        self._spawn(self._watch_end(replica, client, process))
        try:
            self._check_alive()  # the service may have ended since the start began
            async with self._weights.taken_by(client) as version:
                replica.version = version
                replica.idle.set()
                replica.state = ReplicaState.SERVING
        except BaseException as error:
            replica.process = replica.client = replica.stats = None
            await self._end(client, process, f"{replica.name} could not begin to serve: {error}")
            raise
        self._on_change()

    async def _replace(
        self, replica: Replica, client: PolicyClient, process: ReplicaProcess | None, cause: str
    ) -> None:
        await self._end(client, process, cause)
        while self._may_restart(replica):
            self.restarts += 1
            try:
                await self._bring_up(replica)
            except Exception as error:  # whatever it is, another process may do better, and there is a limit
                cause = f"{type(error).__name__}: {error}"
                logger.warning("%s could not be restarted: %s", replica.name, cause)
            else:
                logger.warning("%s serves again, version %d", replica.name, replica.version)
                return
        logger.error("%s is given up after %d restarts: %s", replica.name, self._settings.max_restarts, cause)
        self._give_up(replica, cause)

    def _give_up(self, replica: Replica, cause: str) -> None:
        self._replicas.pop(replica.name, None)
        if self._started and not self._replicas:  # before that, whoever starts the service gets the error
            settings = self._settings
            self._die(
                f"the last replica of the policy is lost: {cause}; one is restarted {settings.max_restarts} times "
                f"within {settings.restart_window_s:g} s (policy.max_restarts)"
            )

    def _may_restart(self, replica: Replica) -> bool:
        now = asyncio.get_running_loop().time()
        while replica.restarts and replica.restarts[0] <= now - self._settings.restart_window_s:
            replica.restarts.popleft()
        if len(replica.restarts) >= self._settings.max_restarts:
            return False
        replica.restarts.append(now)
        return True

    async def _end(self, client: PolicyClient | None, process: ReplicaProcess | None, cause: str) -> None:
        if client is not None:
            client.fail(cause)
            await client.close()
        if process is not None:
            try:
                await within(_KILL_S, process.kill(), "the end of a killed replica")
            except Exception as error:  # its successor has a process of its own
                logger.warning("a replica's process did not end: %s", error)

    def _die(self, cause: str, *, closing: bool = False) -> None:
        if self.dead is not None:
            return
        self.dead = cause
        self._weights.fail(StationDied(cause))
        self._on_change()
        if not closing:
            self._on_dead(StationDied(cause))

    def _check_alive(self) -> None:
        if self.dead is not None:
            raise StationDied(self.dead)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- watching ----

    async def _watch(self, replica: Replica, client: PolicyClient) -> None:
        """Heartbeats: a process that does not answer, and an engine that does not get on, are lost."""
        limit = self._settings.hang_timeout_s
        while replica.client is client:
            await asyncio.sleep(self._settings.heartbeat_s)
            stats = await self._ask_stats(replica, client, self._settings.heartbeat_timeout_s)
            if stats is not None and stats.last_step_age_s > limit:
                cause = f"the engine has work and made no step for {stats.last_step_age_s:.0f} s"
                self.lose(replica, client, f"{cause} (policy.hang_timeout_s={limit:g})")

    async def _watch_end(self, replica: Replica, client: PolicyClient, process: ReplicaProcess) -> None:
        """The end of a process, known at once: heartbeats and Monarch's reports come later."""
        cause = await process.ended()
        if replica.client is client:
            self.lose(replica, client, cause)

    async def _ask_stats(self, replica: Replica, client: PolicyClient, timeout_s: float | None) -> EngineStats | None:
        try:
            stats = await client.stats(timeout_s=timeout_s)
        except StationDied as error:
            self.lose(replica, client, str(error))
            return None
        if replica.client is client:
            replica.stats = stats
        return stats

    def _retire(self, replica: Replica) -> None:
        """Keep what a process has counted beyond its end."""
        if replica.stats is not None:
            self._retired.add(replica.stats)
            replica.stats = None
