"""The policy as the controller sees it: `await service.generate_group(request)`, whatever becomes of its replicas.

    generate_group ──► line ──route──► replica ──► result, once
                        ▲                 │
                        └─────────────────┘ the replica is lost: go on elsewhere, from the tokens it had reported

A request waits in the line for a place (`policy.max_open_requests`), for a replica of the version it needs, or for a
replica at all, in the order in which requests came and with its deadline running. It ends exactly once: it belongs to
one waiter, which listens to one replica at a time.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from forgelite.errors import GenerationFailed, RequestRejected, StationDied
from forgelite.policy.client import OnProgress, PolicyClient, only_member
from forgelite.policy.engine_protocol import DRAIN_TIMEOUT_S, EngineStats, UpdateMode, UpdateReport
from forgelite.policy.groups import GroupProgress, GroupResult
from forgelite.policy.partials import KnownTokens
from forgelite.policy.replica_set import ReplicaSet
from forgelite.policy.replicas import Replica, ReplicaSettings, StartReplica
from forgelite.policy.routing import Sessions, route
from forgelite.policy.served_version import Weights
from forgelite.types import Completion, Failure, GroupRequest, SamplingParams

_PROGRESS_S = 1.0  # at most so much of a request is sampled twice when its replica is lost
_MOST_LOSSES = 3  # a request that was there each time may be what breaks them, and is not given to another replica


@dataclass(kw_only=True, slots=True, eq=False)
class _OpenRequest:
    """A request between its coming and its one end."""

    request: GroupRequest
    known: KnownTokens
    deadline: float  # on the event loop's clock
    min_version: int
    on_progress: OnProgress | None
    place: asyncio.Future[Replica | None]  # None: it was aborted while it waited
    client: PolicyClient | None = None  # where it is sampled
    aborted: bool = False
    losses: int = 0  # replicas that were lost while they sampled it

    def oldest_allowed(self) -> int:
        """The oldest version that may sample it: versions never fall within a completion."""
        return max(self.min_version, self.known.newest_version)

    def take(self, progress: GroupProgress) -> None:
        """Keep what was sampled, and pass it on to who asked for it."""
        self.known.add(progress)
        if self.on_progress is not None:
            self.on_progress(progress)


class PolicyService:
    """Replicas of one policy behind one face. Belongs to one event loop.

    Example:

        service = PolicyService(start_replica, settings=ReplicaSettings(replicas=2))
        await service.start()
        completions = await service.generate_group(request)
        await service.update_weights(1, manifest)
        await service.close()
    """

    def __init__(
        self,
        start_replica: StartReplica,
        *,
        settings: ReplicaSettings,
        request_timeout_s: float = 300.0,
        max_open_requests: int | None = None,
        on_dead: Callable[[StationDied], None] = lambda error: None,
    ) -> None:
        """Nothing is started yet.

        Args:
            start_replica: starts the process of one replica, by its name.
            settings: how replicas are watched and restarted.
            request_timeout_s: deadline of a request that names none, in seconds (`policy.request_timeout_s`).
            max_open_requests: more are not given to one replica at a time (`policy.max_open_requests`); None: any.
            on_dead: called once, when the last replica is lost beyond its restarts.
        """
        self._request_timeout_s = request_timeout_s
        self._max_open_requests = max_open_requests
        self._open: dict[str, _OpenRequest] = {}
        self._line: deque[_OpenRequest] = deque()  # those without a replica
        self._sessions = Sessions()
        self._replicas = ReplicaSet(start_replica, settings=settings, on_change=self._serve_line, on_dead=on_dead)
        self.redispatched = 0  # requests that went on elsewhere

    async def start(self) -> None:
        """Start all replicas; returns when they serve. Raises what the first of them raised that could not start."""
        await self._replicas.start()

    # ---- requests ----

    async def generate_group(
        self, request: GroupRequest, *, timeout_s: float | None = None, min_version: int | None = None
    ) -> list[Completion | Failure]:
        """Sample the members of one group.

        When the caller is cancelled, or the deadline passes, the request is ended in the engine too.

        Args:
            request: its id must not be open already.
            timeout_s: deadline in seconds, waiting included; None: `policy.request_timeout_s`.
            min_version: wait for a replica with this version; None: any.

        Returns:
            For each of `request.n` members, in the order of their index, its completion or why it has none. An
            aborted request gives the tokens it has, with the finish reason "abort".

        Raises:
            RequestRejected: the policy refuses this request and lives on.
            GenerationFailed: the deadline passed, the request failed as a whole, or three replicas were lost with it.
            StationDied: the last replica is gone for good.
        """
        return await self._generate(request, timeout_s, min_version, None)

    async def generate(
        self,
        prompt_ids: Iterable[int],
        sampling: SamplingParams,
        request_id: str,
        session: str | None = None,
    ) -> Completion:
        """Sample one completion, whose id is `<request_id>/0`. Raises what `generate_group` raises."""
        request = GroupRequest(request_id=request_id, prompt_ids=tuple(prompt_ids), sampling=sampling, session=session)
        return only_member(await self.generate_group(request))

    async def stream(
        self, request: GroupRequest, *, timeout_s: float | None = None, min_version: int | None = None
    ) -> AsyncIterator[GroupProgress | GroupResult]:
        """The reports of a request as they come, each token once, and its result as the last item.

        Closing the iterator ends the request in the engine. A request whose `progress_s` is None reports every step.
        Arguments and errors are those of `generate_group`.
        """
        if request.progress_s is None:
            request = dataclasses.replace(request, progress_s=0.0)
        reports: asyncio.Queue[GroupProgress | None] = asyncio.Queue()
        work = asyncio.ensure_future(self._generate(request, timeout_s, min_version, reports.put_nowait))
        work.add_done_callback(lambda _: reports.put_nowait(None))
        work.add_done_callback(_retrieve)  # the iterator may have been closed before it raised
        try:
            while (report := await reports.get()) is not None:
                yield report
            yield GroupResult(request_id=request.request_id, outcome=work.result())
        finally:
            work.cancel()

    async def abort(self, request_id: str) -> None:
        """End a request; its waiter gets the tokens so far. Nothing happens when it has ended already."""
        entry = self._open.get(request_id)
        if entry is None:
            return
        entry.aborted = True
        if entry.client is not None:
            with suppress(StationDied):  # its waiter gets the same, and ends with what is known
                await entry.client.abort(request_id)
        elif not entry.place.done():
            entry.place.set_result(None)

    async def cancel(self, group_id: str) -> int:
        """Abort all open requests of a group (`<group>` and its later turns `<group>/<member>/<turn>`).

        Returns:
            How many there were.
        """
        ids = [name for name in self._open if name == group_id or name.startswith(f"{group_id}/")]
        await asyncio.gather(*(self.abort(name) for name in ids))
        return len(ids)

    async def _generate(
        self,
        request: GroupRequest,
        timeout_s: float | None,
        min_version: int | None,
        on_progress: OnProgress | None,
    ) -> list[Completion | Failure]:
        self._check_alive()
        name = request.request_id
        if name in self._open:
            raise RequestRejected(f"request {name}: a request of this id is open already")
        loop = asyncio.get_running_loop()
        seconds = self._request_timeout_s if timeout_s is None else timeout_s
        entry = _OpenRequest(
            request=request,
            known=KnownTokens(request),
            deadline=loop.time() + seconds,
            min_version=-1 if min_version is None else min_version,
            on_progress=on_progress,
            place=loop.create_future(),
        )
        self._open[name] = entry
        try:
            self._line.append(entry)
            return await self._sample(entry, seconds)
        finally:
            del self._open[name]

    async def _sample(self, entry: _OpenRequest, seconds: float) -> list[Completion | Failure]:
        """Give the request to one replica after the other, until one has finished it."""
        loop, name = asyncio.get_running_loop(), entry.request.request_id
        while True:
            replica = await self._wait_for_place(entry, seconds)
            if replica is None:
                return list(entry.known.completions())
            client = entry.client
            try:
                if entry.aborted:
                    return list(entry.known.completions())
                return await client.generate_group(
                    entry.known.request_to_go_on(progress_s=_PROGRESS_S),
                    timeout_s=max(0.0, entry.deadline - loop.time()),
                    on_progress=entry.take,
                )
            except StationDied as error:
                self._replicas.lose(replica, client, str(error))
                self._check_alive()
                if entry.aborted:
                    return list(entry.known.completions())
                entry.losses += 1
                if entry.losses == _MOST_LOSSES:
                    raise GenerationFailed(
                        f"request {name} was open on {entry.losses} replicas when they were lost, last: {error}"
                    ) from error
                self.redispatched += 1
                entry.place, entry.client = loop.create_future(), None
                self._line.appendleft(entry)  # it has waited before
            finally:
                replica.release(name)
                self._serve_line()

    async def _wait_for_place(self, entry: _OpenRequest, seconds: float) -> Replica | None:
        self._serve_line()
        try:
            left = entry.deadline - asyncio.get_running_loop().time()
            await asyncio.wait({entry.place}, timeout=max(0.0, left))
        except asyncio.CancelledError:
            self._leave_line(entry)
            raise
        if not entry.place.done():
            self._leave_line(entry)
            version = self._replicas.version
            raise GenerationFailed(
                f"request {entry.request.request_id} found no place within its {seconds:g} s "
                f"(policy.request_timeout_s): {len(self._line)} others wait, the service is at version {version}, "
                f"and the request needs {max(0, entry.oldest_allowed())}; {self._replicas.describe()}"
            )
        return entry.place.result()

    def _leave_line(self, entry: _OpenRequest) -> None:
        if entry in self._line:
            self._line.remove(entry)
        if entry.place.done() and not entry.place.cancelled() and entry.place.exception() is None:
            replica = entry.place.result()
            if replica is not None:
                replica.release(entry.request.request_id)
                self._serve_line()

    def _serve_line(self) -> None:
        """Give places to those who wait, in their order; who waits for a version is passed by."""
        if self._replicas.dead is not None:
            while self._line:
                entry = self._line.popleft()
                if not entry.place.done():
                    entry.place.set_exception(StationDied(self._replicas.dead))
            return
        serving = self._replicas.serving()
        if not serving:
            return
        passed: list[_OpenRequest] = []
        while self._line:
            entry = self._line.popleft()
            if entry.place.done():  # aborted
                continue
            chosen = route(
                [replica.load() for replica in serving],
                session_replica=self._sessions.replica_of(entry.request.session),
                min_version=entry.oldest_allowed(),
                max_open_requests=self._max_open_requests,
            )
            if chosen.replica is not None:
                self._give_place(entry, self._replicas.get(chosen.replica))
                continue
            passed.append(entry)
            if chosen.full:
                break
        self._line.extendleft(reversed(passed))

    def _give_place(self, entry: _OpenRequest, replica: Replica) -> None:
        replica.take(entry.request.request_id, entry.request.n)
        self._sessions.went_to(entry.request.session, replica.name)
        entry.client = replica.client
        entry.place.set_result(replica)

    # ---- weights ----

    async def update_weights(
        self,
        version: int,
        manifest: Any,
        *,
        mode: UpdateMode = "in_flight",
        keep_kv: bool = False,
        drain_timeout_s: float = DRAIN_TIMEOUT_S,
    ) -> UpdateReport:
        """Give every serving replica a published version; see `ServedVersion.update`.

        Args:
            version: of the new weights.
            manifest: of that version; None: each replica finds it.
            mode, keep_kv, drain_timeout_s: see `EngineLoop.update`.
        """
        weights = Weights(
            version=version, manifest=manifest, mode=mode, keep_kv=keep_kv, drain_timeout_s=drain_timeout_s
        )
        return await self._replicas.update_weights(weights)

    async def version(self) -> int:
        """The version that every serving replica has acknowledged."""
        self._check_alive()
        return self._replicas.version

    # ---- replicas ----

    async def add_replica(self) -> str:
        """Start one more replica; returns its name when it serves. Raises what starting it raised."""
        return await self._replicas.add()

    async def remove_replica(self, name: str, *, timeout_s: float = 30.0) -> None:
        """Take a replica away; see `ReplicaSet.remove`."""
        await self._replicas.remove(name, timeout_s=timeout_s)

    async def stats(self) -> EngineStats:
        """The counters of all replicas together; `busy_s` is the mean of a replica. Raises StationDied."""
        self._check_alive()
        return await self._replicas.stats()

    @property
    def replicas_serving(self) -> int:
        """How many replicas take requests."""
        return len(self._replicas.serving())

    @property
    def restarts(self) -> int:
        """How often a replica was restarted."""
        return self._replicas.restarts

    async def close(self) -> None:
        """Fail whoever waits and end every process. Safe to call again."""
        await self._replicas.close()

    def _check_alive(self) -> None:
        if self._replicas.dead is not None:
            raise StationDied(self._replicas.dead)


def _retrieve(work: asyncio.Future[Any]) -> None:
    if not work.cancelled():
        work.exception()
