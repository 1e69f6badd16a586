"""The policy as the controller sees it: `await client.generate_group(request)`.

    generate_group ─┐ same tick                       ┌─► engine
    generate_group ─┼──────────► one submit ──► actor ┤
    generate_group ─┘                                 └─ finished groups
          ▲                                                    │
          └──── each waiter gets its group ◄── one collect ◄───┘   (one long poll is outstanding, never two)

A batch of groups costs one request and one or two replies, not one call per sample. No wait is without an
end: a request has a deadline, a poll has a bound, and when the policy dies every waiter gets the cause at
once.

Knows no Monarch: an actor is reached through the few calls of `PolicyCalls`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Protocol

from forgelite.errors import DeadlineExceeded, ForgeliteError, GenerationFailed, RequestRejected, StationDied
from forgelite.observe.gates import within
from forgelite.policy.admission import REJECTED
from forgelite.policy.engine_protocol import ENGINE_DEAD, EngineStats, UpdateReport
from forgelite.policy.groups import GroupResult
from forgelite.types import Completion, Failure, GroupRequest, SamplingParams

Outcome = list[Completion] | Failure


class PolicyCalls(Protocol):
    """One policy process. Each call raises StationDied when the process is gone, and what the policy
    raised."""

    async def submit(self, requests: Sequence[GroupRequest]) -> Sequence[Failure | None]:
        """Hand over requests; for each, None or why it was refused."""

    async def collect(self, timeout_s: float) -> list[GroupResult]:
        """Wait for finished requests, `timeout_s` seconds at most."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; each still has its result."""

    async def update_weights(self, version: int, manifest: Any, keep_kv: bool) -> UpdateReport:
        """Take the weights of `version`, and answer when they are in use."""

    async def version(self) -> int:
        """The version in use."""

    async def stats(self) -> EngineStats:
        """What the engine has done so far."""


class PolicyClient:
    """Generates with one policy process. Belongs to the event loop that makes the first request."""

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
            update_timeout_s: deadline of a weight update, in seconds (`weights.timeout_s`).
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
        self._unsent: list[GroupRequest] = []
        self._tasks: set[asyncio.Task[None]] = set()  # submits and aborts under way, and the poll
        self._collector: asyncio.Task[None] | None = None
        self._dead: str | None = None

    async def generate_group(self, request: GroupRequest, *, timeout_s: float | None = None) -> list[Completion]:
        """Sample the members of one group.

        When the caller is cancelled, or the deadline passes, the request is ended in the engine too.

        Args:
            request: its id must not be waiting already.
            timeout_s: deadline in seconds; None: the client's.

        Returns:
            `request.n` completions in the order of their index. An aborted request gives the tokens it has.

        Raises:
            RequestRejected: the policy refuses this request and lives on.
            GenerationFailed: the deadline passed, or a member could not be sampled.
            StationDied: the policy is gone, broken or does not answer.
        """
        if self._dead is not None:
            raise StationDied(self._dead)
        if request.request_id in self._waiting:
            raise RequestRejected(f"request {request.request_id}: a request of this id is waiting already")
        seconds = self._request_timeout_s if timeout_s is None else timeout_s
        waiter: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = waiter
        self._send_soon(request)
        try:
            await asyncio.wait({waiter}, timeout=seconds)
        finally:
            self._waiting.pop(request.request_id, None)
            if not waiter.done() and self._dead is None:  # past its deadline, or its caller was cancelled
                self._start(self.abort(request.request_id))
        if not waiter.done():
            raise GenerationFailed(
                f"request {request.request_id} was not finished within its {seconds:g} s "
                "(policy.request_timeout_s) and has been aborted"
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
        (completion,) = await self.generate_group(request)
        return completion

    async def abort(self, request_id: str) -> None:
        """End a request; its waiter gets the tokens sampled so far. Nothing happens when it has ended
        already."""
        await self._ask(self._calls.abort([request_id]), self._answer_s, f"the policy to abort {request_id}")

    async def cancel(self, group_id: str) -> None:
        """End the requests of a group, whose ids are its own or begin with `<group_id>/`."""
        requests = [name for name in self._waiting if name == group_id or name.startswith(f"{group_id}/")]
        if requests:
            await self._ask(self._calls.abort(requests), self._answer_s, f"the policy to cancel {group_id}")

    async def update_weights(self, version: int, manifest: Any, *, keep_kv: bool = False) -> UpdateReport:
        """Give the policy new weights between two of its steps.

        Args:
            version: of the new weights.
            manifest: of the published version.
            keep_kv: see `EngineLoop.update`.

        Raises:
            WeightError: the policy could not take them and goes on with its old ones.
            StationDied: the policy is gone, or has not acknowledged in time. It may then compute with either
                version, and must not serve any more.
        """
        call = self._calls.update_weights(version, manifest, keep_kv)
        return await self._ask(call, self._update_timeout_s, f"the policy to take version {version}")

    async def version(self) -> int:
        """The version that the policy computes with."""
        return await self._ask(self._calls.version(), self._answer_s, "the policy's version")

    async def stats(self) -> EngineStats:
        """What the policy's engine has done so far."""
        return await self._ask(self._calls.stats(), self._answer_s, "the policy's statistics")

    async def close(self) -> None:
        """Fail whoever waits and end the client's own tasks. The policy itself is left alone."""
        self._die("the policy client was closed")
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
        batch, self._unsent = self._unsent, []
        if not batch or self._dead is not None:
            return
        self._start(self._submit(batch))
        if self._collector is None or self._collector.done():
            self._collector = self._start(self._collect())

    async def _submit(self, batch: list[GroupRequest]) -> None:
        gate = f"the policy to accept {len(batch)} requests"
        verdicts = await self._ask(self._calls.submit(batch), self._answer_s, gate)
        for request, refusal in zip(batch, verdicts, strict=True):
            if refusal is not None:
                self._settle(request.request_id, refusal)

    async def _collect(self) -> None:
        """Poll as long as somebody waits. The only task that does, so there is one poll at a time."""
        while self._waiting and self._dead is None:
            bound = self._poll_s + self._answer_s
            results = await self._ask(self._calls.collect(self._poll_s), bound, "the policy's poll for results")
            for result in results:
                self._settle(result.request_id, result.outcome)

    def _settle(self, request_id: str, outcome: Outcome) -> None:
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
            self._die(str(task.exception()))  # without this task nobody who waits would get an answer

    async def _ask(self, call: Coroutine[Any, Any, Any], seconds: float, gate: str) -> Any:
        """Await a call to the policy. Its death, or its silence, ends the client."""
        try:
            return await within(seconds, call, gate)
        except (StationDied, DeadlineExceeded) as error:
            self._die(str(error))
            raise StationDied(str(error)) from error

    def _die(self, cause: str) -> None:
        if self._dead is None:
            self._dead = cause
        for request_id in list(self._waiting):
            self._settle(request_id, Failure(reason=ENGINE_DEAD, message=self._dead))


def _as_error(failure: Failure) -> ForgeliteError:
    if failure.reason == REJECTED:
        return RequestRejected(failure.message)
    if failure.reason == ENGINE_DEAD:
        return StationDied(failure.message)
    return GenerationFailed(f"{failure.reason}: {failure.message}")
