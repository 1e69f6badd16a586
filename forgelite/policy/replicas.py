"""One replica of the policy: its process, where it stands, and what is open on it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from forgelite.policy.client import PolicyCalls, PolicyClient
from forgelite.policy.engine_protocol import EngineStats
from forgelite.policy.routing import Load


class ReplicaProcess(Protocol):
    """The process of one replica, with an engine that is ready."""

    calls: PolicyCalls

    async def ended(self) -> str:
        """Wait until it is gone, by itself or not; returns what a message says of that."""

    async def kill(self) -> None:
        """End it for good, also when it is stopped or hangs. It holds nothing when this returns. Safe to call again."""


StartReplica = Callable[[str], Awaitable[ReplicaProcess]]  # by its name; ends what it has started when it raises


class ReplicaState(Enum):
    """Where a replica stands; see the picture in `replica_set`."""

    STARTING = "starting"
    SERVING = "serving"
    LEAVING = "leaving"


@dataclass(kw_only=True, slots=True, frozen=True)
class ReplicaSettings:
    """How replicas are watched and restarted.

    Example: `ReplicaSettings(replicas=2)` is what the configuration's defaults and `policy.replicas=2` give.
    """

    replicas: int = 1  # policy.replicas
    max_restarts: int = 3  # of one replica within the window (policy.max_restarts)
    restart_window_s: float = 1800.0  # policy.restart_window_s
    heartbeat_s: float = 1.0  # between two heartbeats
    heartbeat_timeout_s: float = 5.0  # policy.heartbeat_timeout_s
    hang_timeout_s: float = 120.0  # policy.hang_timeout_s
    update_timeout_s: float = 120.0  # of one update, beside what it waits for sequences (weights.timeout_s)
    answer_s: float = 30.0  # of a short call (mesh.answer_timeout_s)


@dataclass(kw_only=True, slots=True, eq=False)
class Replica:
    """One replica. While it serves it has a process and a client.

    Example: `Replica(name="policy-0")` is being started.
    """

    name: str
    state: ReplicaState = ReplicaState.STARTING
    process: ReplicaProcess | None = None
    client: PolicyClient | None = None
    version: int = 0  # that it has acknowledged
    open: dict[str, int] = field(default_factory=dict)  # request id -> members
    open_members: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set while nothing is open
    restarts: deque[float] = field(default_factory=deque)  # when, on the event loop's clock
    stats: EngineStats | None = None  # the last that came from its process

    def load(self) -> Load:
        """What routing needs to know of it."""
        return Load(
            replica=self.name,
            version=self.version,
            open_requests=len(self.open),
            open_members=self.open_members,
        )

    def take(self, request_id: str, members: int) -> None:
        """Count a request that is sent to it."""
        self.open[request_id] = members
        self.open_members += members
        self.idle.clear()

    def release(self, request_id: str) -> None:
        """Give the place of a request back. Safe to call again."""
        self.open_members -= self.open.pop(request_id, 0)
        if not self.open:
            self.idle.set()
