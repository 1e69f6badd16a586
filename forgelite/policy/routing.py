"""Which replica takes a request. A pure function, and the memory of where sessions went."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(kw_only=True, slots=True, frozen=True)
class Load:
    """What routing knows of a replica that serves.

    Example: `Load(replica="policy-1", version=7, open_requests=3, open_members=24)`.
    """

    replica: str
    version: int  # of the weights that it has acknowledged
    open_requests: int
    open_members: int  # sequences of those requests


@dataclass(kw_only=True, slots=True, frozen=True)
class Route:
    """Where a request goes.

    Example: `Route(replica=None, full=True)`: every replica that could serve it is full, so it waits for its turn.
    """

    replica: str | None
    full: bool = False  # without a replica: it lacks room, not a replica of its version


def route(
    loads: Sequence[Load], *, session_replica: str | None, min_version: int, max_open_requests: int | None
) -> Route:
    """The replica of the request's session if it can take the request, else the one with the fewest open members.

    A session leaves a replica that is full rather than wait for it: its prefix is cheaper than the wait. Of equally
    loaded replicas the first one takes the request.

    Args:
        loads: of the replicas that serve.
        session_replica: where the last request of the same session went.
        min_version: the request may only be sampled by this version or a newer one.
        max_open_requests: more are not given to one replica (`policy.max_open_requests`); None: there is no limit.
    """
    able = [load for load in loads if load.version >= min_version]
    free = [load for load in able if max_open_requests is None or load.open_requests < max_open_requests]
    if not free:
        return Route(replica=None, full=bool(able))
    if any(load.replica == session_replica for load in free):
        return Route(replica=session_replica)
    return Route(replica=min(free, key=lambda load: load.open_members).replica)


class Sessions:
    """Where the last request of each session went; of too many sessions the least recently used is forgotten."""

    def __init__(self, *, most: int = 65_536) -> None:
        self._most = most
        self._replicas: OrderedDict[str, str] = OrderedDict()

    def replica_of(self, session: str | None) -> str | None:
        """The replica of a session; None for no session, or one that is not known."""
        return None if session is None else self._replicas.get(session)

    def went_to(self, session: str | None, replica: str) -> None:
        """Note where a request of `session` was sent."""
        if session is None:
            return
        self._replicas[session] = replica
        self._replicas.move_to_end(session)
        if len(self._replicas) > self._most:
            self._replicas.popitem(last=False)
