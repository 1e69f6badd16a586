"""The connection to one replica of the policy. `PolicyService` has one for each.

    generate_group ─┐ same tick                       ┌─► engine
    generate_group ─┼──────────► one submit ──► actor ┤
    generate_group ─┘                                 └─ finished groups, reports of running ones
          ▲                                                    │
          └──── each waiter gets its group ◄── one collect ◄───┘   (one long poll is outstanding, never two)

A batch of groups costs one request and one or two replies, not one call per sample. No wait is without an
end: a request has a deadline, a poll has a bound, and when the replica dies every waiter gets the cause at
once, whoever noticed it first.

Knows no Monarch: an actor is reached through the few calls of `PolicyCalls`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol

from forgelite.errors import DeadlineExceeded, ForgeliteError, GenerationFailed, RequestRejected, StationDied
from forgelite.policy.admission import REJECTED
from forgelite.policy.engine_protocol import DRAIN_TIMEOUT_S, ENGINE_DEAD, EngineStats, UpdateMode, UpdateReport
from forgelite.policy.groups import GroupProgress, GroupResult
from forgelite.types import Completion, Failure, GroupRequest, SamplingParams

Outcome = list[Completion | Failure] | Failure
OnProgress = Callable[[GroupProgress], None]

_HELD_UP_S = 1.0  # a deadline that is noticed so much too late says that this process was held up, not the replica


class PolicyCalls(Protocol):
    """One policy process. Each call raises StationDied when the process is gone, and what the policy
    raised."""

    async def submit(self, requests: Sequence[GroupRequest]) -> Sequence[Failure | None]:
        """Hand over requests; for each, None or why it was refused."""

    async def collect(self, timeout_s: float) -> list[GroupResult | GroupProgress]:
        """Wait for finished requests and reports of running ones, `timeout_s` seconds at most."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; each still has its result."""

    async def update_weights(
        self, version: int, manifest: Any, mode: UpdateMode, keep_kv: bool, drain_timeout_s: float
    ) -> UpdateReport:
        """Take the weights of `version`, and answer when they are in use."""

    async def version(self) -> int:
        """The version in use."""

    async def stats(self) -> EngineStats:
        """What the engine has done so far."""


class PolicyClient:
    """Generates with one replica. Made and used in one event loop."""

    def __init__(
        self,
        calls: PolicyCalls,
        *,
        request_timeout_s: float = 300.0,
        update_timeout_s: float = 120.0,
        poll_s: float = 5.0,
        answer_s: float = 30.0,
    ) -> None:
        """Nothing is sent yet.

        Args:
            calls: how the process is reached.
            request_timeout_s: deadline of a request that names none, in seconds (`policy.request_timeout_s`).
            update_timeout_s: deadline of a weight update, in seconds (`weights.timeout_s`), besides what the
                update may wait for running sequences.
            poll_s: how long the policy may hold a poll when nothing is finished, in seconds.
            answer_s: how long the policy may take to answer beyond that, in seconds. It must cover the
                longest time its process can be busy with something else.
        """
        self._calls = calls
        self._request_timeout_s = request_timeout_s
        self._update_timeout_s = update_timeout_s
        self._poll_s = poll_s
        self._answer_s = answer_s
        self._waiting: dict[str, asyncio.Future[Outcome]] = {}
        self._listeners: dict[str, OnProgress] = {}
        self._unsent: list[GroupRequest] = []
        self._submits: dict[str, asyncio.Task[None]] = {}  # by the id of a request that is under way
        self._tasks: set[asyncio.Task[None]] = set()  # submits and aborts under way, and the poll
        self._collector: asyncio.Task[None] | None = None
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # its cause

    async def generate_group(
        self, request: GroupRequest, *, timeout_s: float | None = None, on_progress: OnProgress | None = None
    ) -> list[Completion | Failure]:
        """Sample the members of one group.

        When the caller is cancelled, or the deadline passes, the request is ended in the engine too.

        Args:
            request: its id must not be waiting already.
            timeout_s: deadline in seconds; None: the client's.
            on_progress: called with each report of the request (`GroupRequest.progress_s`).

        Returns:
            For each of `request.n` members, in the order of their index, its completion or why it has none. An
            aborted request gives the tokens it has.

        Raises:
            RequestRejected: the policy refuses this request and lives on.
            GenerationFailed: the deadline passed, or the request failed as a whole.
            StationDied: the policy is gone, broken or does not answer.
        """
        if self._death.done():
            raise StationDied(self._death.result())
        name = request.request_id
        if name in self._waiting:
            raise RequestRejected(f"request {name}: a request of this id is waiting already")
        seconds = self._request_timeout_s if timeout_s is None else timeout_s
        waiter: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting[name] = waiter
        if on_progress is not None:
            self._listeners[name] = on_progress
        self._send_soon(request)
        try:
            await asyncio.wait({waiter}, timeout=seconds)
        finally:
            self._waiting.pop(name, None)
            self._listeners.pop(name, None)
            if not waiter.done() and not self._death.done():  # past its deadline, or its caller was cancelled
                self._start(self.abort(name))
        if not waiter.done():
            raise GenerationFailed(
                f"request {name} was not finished by its deadline (policy.request_timeout_s), {seconds:.3g} s after it "
                "was sent to a replica, and has been aborted"
            )
        outcome = waiter.result()
        if isinstance(outcome, Failure):
            raise _as_error(outcome)
        return outcome

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

    async def abort(self, request_id: str) -> None:
        """End a request; its waiter gets the tokens sampled so far. Nothing happens when it has ended
        already."""
        self._send()
        if request_id in self._submits:
            await asyncio.wait({self._submits[request_id]})  # an abort that overtakes its request ends nothing
        await self._ask(self._calls.abort([request_id]), self._answer_s, f"the policy to abort {request_id}")

    async def update_weights(
        self,
        version: int,
        manifest: Any,
        *,
        mode: UpdateMode = "in_flight",
        keep_kv: bool = False,
        drain_timeout_s: float = DRAIN_TIMEOUT_S,
    ) -> UpdateReport:
        """Give the policy new weights between two of its steps.

        Args:
            version: of the new weights.
            manifest: of the published version.
            mode, keep_kv, drain_timeout_s: see `EngineLoop.update`.

        Raises:
            WeightError: the policy could not take them and goes on with its old ones.
            DeadlineExceeded: running sequences did not end in time (mode "drain"); it goes on with its old ones.
            StationDied: the policy is gone, or has not acknowledged in time. It may then compute with either
                version, and must not serve any more.
        """
        seconds = self._update_timeout_s + (drain_timeout_s if mode == "drain" else 0.0)
        call = self._calls.update_weights(version, manifest, mode, keep_kv, drain_timeout_s)
        return await self._ask(call, seconds, f"the policy to take version {version}")

    async def version(self) -> int:
        """The version that the policy computes with."""
        return await self._ask(self._calls.version(), self._answer_s, "the policy's version")

    async def stats(self, *, timeout_s: float | None = None) -> EngineStats:
        """What the policy's engine has done so far.

        Args:
            timeout_s: the policy is dead when it has not answered by then, in seconds; None: `answer_s`.
        """
        seconds = self._answer_s if timeout_s is None else timeout_s
        return await self._ask(self._calls.stats(), seconds, "the policy's statistics")

    def fail(self, cause: str) -> None:
        """Give up the replica: whoever waits, and whoever comes, gets StationDied with `cause`."""
        if not self._death.done():
            self._death.set_result(cause)
        for request_id in list(self._waiting):
            self._settle(request_id, Failure(reason=ENGINE_DEAD, message=self._death.result()))

    async def close(self) -> None:
        """Fail whoever waits and end the client's own tasks. The policy itself is left alone."""
        self.fail("the policy client was closed")
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _send_soon(self, request: GroupRequest) -> None:
        """Send with everything else that is asked for in this tick of the event loop."""
        self._unsent.append(request)
        if len(self._unsent) == 1:
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        # Not what was cancelled in the same tick: its abort would overtake it.
        batch = [request for request in self._unsent if request.request_id in self._waiting]
        self._unsent = []
        if not batch or self._death.done():
            return
        submit = self._start(self._submit(batch))
        self._submits |= {request.request_id: submit for request in batch}
        if self._collector is None or self._collector.done():
            self._collector = self._start(self._collect())

    async def _submit(self, batch: list[GroupRequest]) -> None:
        gate = f"the policy to accept {len(batch)} requests"
        try:
            verdicts = await self._ask(self._calls.submit(batch), self._answer_s, gate)
        finally:
            for request in batch:
                self._submits.pop(request.request_id, None)
        for request, refusal in zip(batch, verdicts, strict=True):
            if refusal is not None:
                self._settle(request.request_id, refusal)

    async def _collect(self) -> None:
        """Poll as long as somebody waits. The only task that does, so there is one poll at a time."""
        while self._waiting and not self._death.done():
            bound = self._poll_s + self._answer_s
            events = await self._ask(self._calls.collect(self._poll_s), bound, "the policy's poll for results")
            for event in events:
                if isinstance(event, GroupResult):
                    self._settle(event.request_id, event.outcome)
                elif event.request_id in self._listeners:
                    self._listeners[event.request_id](event)

    def _settle(self, request_id: str, outcome: Outcome) -> None:
        self._listeners.pop(request_id, None)
        waiter = self._waiting.pop(request_id, None)  # none: its deadline has passed, or its caller was cancelled
        if waiter is not None and not waiter.done():
            waiter.set_result(outcome)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.fail(str(task.exception()))  # without this task nobody who waits would get an answer

    async def _ask(self, call: Coroutine[Any, Any, Any], seconds: float, gate: str) -> Any:
        """Await a call to the policy. Its death, or its silence, ends the client and with it every other call."""
        task = asyncio.ensure_future(call)
        try:
            await self._answered_or_dead(task, seconds)
            if task.done():
                return task.result()
            if not self._death.done():
                self.fail(str(DeadlineExceeded(f"waited {seconds:g} s for {gate}")))
            raise StationDied(self._death.result())
        except StationDied as error:
            self.fail(str(error))
            raise
        finally:
            task.cancel()

    async def _answered_or_dead(self, task: asyncio.Future[Any], seconds: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        done, _ = await asyncio.wait({task, self._death}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not done and loop.time() > deadline + _HELD_UP_S:
            # This process could not look for so long (it was stopped, or computed): the answer may be there already.
            await asyncio.wait({task, self._death}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)


def only_member(outcome: Sequence[Completion | Failure]) -> Completion:
    """The completion of a request with one member. Raises GenerationFailed when it has none."""
    (member,) = outcome
    if isinstance(member, Failure):
        raise GenerationFailed(f"{member.reason}: {member.message}")
    return member


def _as_error(failure: Failure) -> ForgeliteError:
    if failure.reason == REJECTED:
        return RequestRejected(failure.message)
    if failure.reason == ENGINE_DEAD:
        return StationDied(failure.message)
    return GenerationFailed(f"{failure.reason}: {failure.message}")
