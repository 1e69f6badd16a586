"""The version that all serving replicas hold, and the one place where it moves.

It moves when every serving replica has acknowledged. Weights change under one lock, an update of all replicas and that
of a starting one alike; so no replica begins to serve what the others have left behind.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from forgelite.errors import DeadlineExceeded, StationDied, WeightError
from forgelite.policy.client import PolicyClient
from forgelite.policy.engine_protocol import DRAIN_TIMEOUT_S, UpdateMode, UpdateReport
from forgelite.policy.replicas import Replica


@dataclass(kw_only=True, slots=True, frozen=True)
class Weights:
    """A published version and how to take it.

    Example: `Weights(version=4, manifest=manifest, mode="in_flight", keep_kv=False)`.
    """

    version: int
    manifest: Any  # None: the replica finds it
    mode: UpdateMode = "in_flight"
    keep_kv: bool = False
    drain_timeout_s: float = DRAIN_TIMEOUT_S


@dataclass(kw_only=True, slots=True)
class _PendingUpdate:
    """An update that found no replica: the next one to start takes it, and answers for all."""

    weights: Weights
    report: asyncio.Future[UpdateReport]


class ServedVersion:
    """Updates the replicas of one policy. Belongs to one event loop."""

    def __init__(
        self,
        *,
        serving: Callable[[], list[Replica]],
        lose: Callable[[Replica, PolicyClient, str], None],
        describe: Callable[[], str],
        on_change: Callable[[], None],
        timeout_s: float,
    ) -> None:
        """Args:
        serving: the replicas that serve.
        lose: takes one of them out of service and has it restarted.
        describe: one line that says how each replica stands.
        on_change: called when the version has moved.
        timeout_s: how long an update waits for a replica to take it where none serves (`weights.timeout_s`).
        """
        self._serving = serving
        self._lose = lose
        self._describe = describe
        self._on_change = on_change
        self._timeout_s = timeout_s
        self._one_update = asyncio.Lock()  # from its beginning to its answer
        self._changing = asyncio.Lock()  # the weights of any replica
        self._served: Weights | None = None  # None: the version that the replicas are built with
        self._pending: _PendingUpdate | None = None
        self._failure: StationDied | None = None

    @property
    def version(self) -> int:
        """That every serving replica has acknowledged."""
        return 0 if self._served is None else self._served.version

    async def update(self, weights: Weights) -> UpdateReport:
        """Give all serving replicas a version at the same time.

        A replica that cannot take what another one took is lost: it is restarted, and the others go on. Where no
        replica serves, the first one to start takes the version and answers.

        Returns:
            The largest pause and wait of any replica, and the sums of what was recomputed and held.

        Raises:
            WeightError, DeadlineExceeded: no replica could take it. All go on with the version before.
            StationDied: the last replica is gone for good.
        """
        async with self._one_update:
            async with self._changing:
                report = await self._update_serving(weights)
                if report is not None:
                    return report
                if self._failure is not None:
                    raise self._failure
                pending = _PendingUpdate(weights=weights, report=asyncio.get_running_loop().create_future())
                self._pending = pending
            try:
                await asyncio.wait({pending.report}, timeout=self._timeout_s)
                async with self._changing:  # one that is taking it now is waited for
                    self._pending = None
            finally:
                self._pending = None
            if not pending.report.done():
                raise WeightError(
                    f"no replica could take version {weights.version} within {self._timeout_s:g} s "
                    f"(weights.timeout_s): {self._describe()}"
                )
            return pending.report.result()

    @asynccontextmanager
    async def taken_by(self, client: PolicyClient) -> AsyncIterator[int]:
        """Bring a replica that has just started to the version that counts; gives that version.

        Nothing moves before the end of the block, in which the replica begins to serve.

        Raises:
            WeightError, StationDied: it could not take it, and must not serve.
        """
        async with self._changing:
            taken = self._pending is not None and await self._take_pending(self._pending, client)
            if not taken and self._served is not None:
                await _give(client, self._served)
            yield self.version

    def fail(self, error: StationDied) -> None:
        """End an update that waits: no replica is left to take it."""
        self._failure = error
        if self._pending is not None and not self._pending.report.done():
            self._pending.report.set_exception(error)

    async def _take_pending(self, pending: _PendingUpdate, client: PolicyClient) -> bool:
        """Whether the replica holds the pending version now; if not, the update has its error."""
        if pending.report.done():
            return False
        try:
            report = await _give(client, pending.weights)
        except (WeightError, DeadlineExceeded) as error:
            if not pending.report.done():
                pending.report.set_exception(error)
            return False
        self._served = pending.weights
        if not pending.report.done():
            pending.report.set_result(report)
        return True

    async def _update_serving(self, weights: Weights) -> UpdateReport | None:
        """None: there was no replica to answer."""
        asked = [(replica, replica.client) for replica in self._serving()]
        answers = await asyncio.gather(*(_give(client, weights) for _, client in asked), return_exceptions=True)
        reports = [answer for answer in answers if isinstance(answer, UpdateReport)]
        refusals = [a for a in answers if isinstance(a, BaseException) and not isinstance(a, StationDied)]
        all_refuse = bool(refusals) and not reports  # those live, and go on with the version before
        for (replica, client), answer in zip(asked, answers, strict=True):
            if isinstance(answer, StationDied if all_refuse else BaseException):
                self._lose(replica, client, f"it could not take version {weights.version}: {answer}")
        if all_refuse:
            raise refusals[0]
        if not reports:
            return None
        self._served = weights
        for (replica, client), answer in zip(asked, answers, strict=True):
            if isinstance(answer, UpdateReport) and replica.client is client:
                replica.version = weights.version
        self._on_change()
        return _together(reports)


async def _give(client: PolicyClient, weights: Weights) -> UpdateReport:
    return await client.update_weights(
        weights.version,
        weights.manifest,
        mode=weights.mode,
        keep_kv=weights.keep_kv,
        drain_timeout_s=weights.drain_timeout_s,
    )


def _together(reports: list[UpdateReport]) -> UpdateReport:
    return dataclasses.replace(
        reports[0],
        queued_s=max(report.queued_s for report in reports),
        paused_s=max(report.paused_s for report in reports),
        recomputed=sum(report.recomputed for report in reports),
        held=sum(report.held for report in reports),
    )
