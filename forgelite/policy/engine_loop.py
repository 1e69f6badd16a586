"""One thread owns the engine; everybody else leaves commands for it.

    submit ──┐                              ┌── step ◄─┐
    abort  ──┼──► inbox ──► [engine thread] ┤          │
    update ──┘    drained between two steps └── results ──► outbox ──► collect

A command runs between two steps and never beside one, so no lock guards the engine, and an update (weights,
version label and KV reset in one command) falls exactly on a token boundary: every token before it was
computed by the old weights, every token after it by the new ones. A lock around `step()` would starve the
callers instead, because the engine thread takes it again at once.

Knows neither vLLM nor torch: the engine behind it is the small protocol `Engine`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from forgelite.errors import StationDied, WeightError
from forgelite.policy.admission import REJECTED, rejection
from forgelite.policy.engine_protocol import ENGINE_DEAD, Engine, EngineStats, Sampled, UpdateReport
from forgelite.policy.groups import GroupResult, LiveGroup, Member, first_versions, sampling_fault
from forgelite.policy.seeds import MemberSeeds
from forgelite.types import Failure, GroupRequest

if TYPE_CHECKING:
    import torch

_JOIN_S = 30.0  # seconds that `close` waits for the step in progress


class EngineLoop:
    """Runs an engine in a thread of its own. Every method may be called from any thread.

    An exception in a step, or in the middle of writing weights, breaks the engine for good: everybody who
    waits gets a failure that holds the cause, newcomers are refused with it, and the process is to be
    replaced.
    """

    def __init__(self, engine: Engine, *, seed: int, version: int = 0) -> None:
        """Start the thread.

        Args:
            engine: owned by the loop from here on; closed by it.
            seed: requests without a seed derive theirs from it.
            version: that of the weights the engine was built with.
        """
        self._engine = engine
        self._limits = engine.limits
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

        # Shared with callers, under the lock.
        self._lock = threading.Condition()
        self._accepted: set[str] = set()  # request ids without a result yet
        self._outbox: list[GroupResult] = []
        self._dead: str | None = None  # why no request is served any more

        # Only touched by the engine thread. Other threads read numbers of it for statistics.
        self._version = version
        self._live: dict[str, LiveGroup] = {}
        self._sequences: dict[str, tuple[LiveGroup, Member]] = {}
        self._seeds = MemberSeeds(seed)
        self._finished: list[GroupResult] = []
        self._born, self._busy_s, self._steps, self._tokens = time.monotonic(), 0.0, 0, 0
        self._queue_lengths = (0, 0)
        self._stopped = False

        self._thread = threading.Thread(target=self._run, name="policy-engine", daemon=True)
        self._thread.start()

    # For callers.

    @property
    def version(self) -> int:
        """The version of the weights that the next token will be computed with."""
        return self._version

    def submit(self, requests: Sequence[GroupRequest]) -> list[Failure | None]:
        """Hand over requests, as one command, and return at once.

        Returns:
            For each request None when it was accepted, or why it was refused: rejected because of itself, or
            because the engine is broken or closed. An accepted request has exactly one result, a refused one
            has none.
        """
        verdicts: list[Failure | None] = []
        accepted: list[GroupRequest] = []
        with self._lock:
            for request in requests:
                verdict = self._refusal(request)
                verdicts.append(verdict)
                if verdict is None:
                    self._accepted.add(request.request_id)
                    accepted.append(request)
            if accepted:
                self._inbox.put(lambda: self._admit(accepted))
        return verdicts

    def collect(self, timeout_s: float) -> list[GroupResult]:
        """Wait until at least one request has a result and take all that are there; empty at the timeout.

        Raises:
            StationDied: the engine is broken or closed, and every result has been taken.
        """
        with self._lock:
            self._lock.wait_for(lambda: bool(self._outbox) or self._nothing_to_come(), timeout=timeout_s)
            results, self._outbox = self._outbox, []
            if not results and self._nothing_to_come():
                raise StationDied(self._dead)
        return results

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests at the next step boundary.

        Each still has its one result, with the tokens sampled so far. Ids that have theirs already, or that
        were never accepted, are ignored.
        """
        ids = list(request_ids)
        self._inbox.put(lambda: self._abort(ids))

    def update(
        self, version: int, load: Callable[[], Mapping[str, torch.Tensor]], *, keep_kv: bool = False
    ) -> UpdateReport:
        """Prepare new weights in this thread, take them between two steps, and return when they are in use.

        Args:
            version: of the new weights.
            load: gives the tensors by checkpoint name. They are only read, but by an engine that uses them in
                place (`weights.swap=zero_copy`) until the next update has returned.
            keep_kv: let running sequences go on with the keys and values of the old weights. Their further
                tokens are then sampled by neither version's own distribution; the recorded logprobs stay
                true.

        Raises:
            WeightMismatch: the tensors do not fit. Version and weights are what they were.
            WeightError: the version is older than the current one while sequences are running.
            StationDied: the engine is broken or closed, or broke because writing failed half-way.
            Exception: whatever `load` raised. Version and weights are what they were.
        """
        if self._dead is not None:
            raise StationDied(self._dead)
        put_in_use = self._engine.prepare_weights(load())
        asked = time.monotonic()
        return self._call(lambda: self._update(version, put_in_use, keep_kv, asked))

    def stats(self) -> EngineStats:
        """Counters of the engine thread; a step in progress is not in them yet."""
        running, waiting = self._queue_lengths
        return EngineStats(
            version=self._version,
            alive_s=time.monotonic() - self._born,
            busy_s=self._busy_s,
            steps=self._steps,
            generated_tokens=self._tokens,
            running=running,
            waiting=waiting,
            first_versions=first_versions(list(self._live.values())),
        )

    def close(self) -> None:
        """End all requests as aborted, free the engine and end the thread. Safe to call again.

        Raises:
            StationDied: the step in progress did not end in time.
        """
        self._inbox.put(self._stop)
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            raise StationDied(f"the policy engine is still inside a step after {_JOIN_S:g} s; end its process")

    # In the caller's thread.

    def _nothing_to_come(self) -> bool:
        return self._dead is not None and not self._accepted

    def _refusal(self, request: GroupRequest) -> Failure | None:
        if self._dead is not None:
            return Failure(reason=ENGINE_DEAD, message=self._dead)
        if request.request_id in self._accepted:
            message = f"request {request.request_id}: a request of this id is still being sampled"
            return Failure(reason=REJECTED, message=message)
        return rejection(request, self._limits)

    def _call(self, command: Callable[[], Any]) -> Any:
        """Run a command in the engine thread and wait for what it returns or raises."""
        outcome: Future[Any] = Future()

        def run() -> None:
            try:
                if self._dead is not None:
                    raise StationDied(self._dead)
                outcome.set_result(command())
            except Exception as error:  # travels to the caller
                outcome.set_exception(error)

        with self._lock:  # `_dead` is set under it, so a command is either refused here or run by the thread
            if self._stopped:
                raise StationDied(self._dead or "the policy engine was closed")
            self._inbox.put(run)
        return outcome.result()

    # In the engine thread.

    def _run(self) -> None:
        while not self._stopped:
            try:
                self._drain()
                if self._live:
                    self._step()
            except Exception as error:  # nothing that happens inside an engine leaves it in a known state
                self._break(error)
            self._deliver()
        while not self._inbox.empty():  # commands that came before the door closed; each is refused as dead
            self._inbox.get()()
        self._deliver()
        self._engine.close()

    def _drain(self) -> None:
        """Run the commands that are waiting; sleep until there is one when there is nothing to sample."""
        command = None if self._live else self._inbox.get()
        began = time.monotonic()
        try:
            while not self._stopped:
                if command is not None:
                    command()
                command = self._inbox.get_nowait()
        except queue.Empty:
            pass
        finally:
            self._busy_s += time.monotonic() - began

    def _step(self) -> None:
        began = time.monotonic()
        for sampled in self._engine.step():
            self._take(sampled)
        self._queue_lengths = self._engine.queue_lengths()
        self._steps += 1
        self._busy_s += time.monotonic() - began

    def _take(self, sampled: Sampled) -> None:
        known = self._sequences.get(sampled.sequence_id)
        if known is None:  # its group failed earlier in this step
            return
        group, member = known
        fault = sampling_fault(sampled.logprobs, sampled.token_ids, sampled.finish_reason)
        if fault is not None:
            message = f"request {member.sequence_id}, version {self._version}: {fault.message}"
            self._fail(group, Failure(reason=fault.reason, message=message))
            return
        member.extend(sampled.token_ids, sampled.logprobs, self._version)
        self._tokens += len(sampled.token_ids)
        if sampled.finish_reason is not None:
            del self._sequences[sampled.sequence_id]
            group.end(member, sampled.finish_reason)
            if group.unfinished == 0:
                self._finish(group, group.completions())

    def _admit(self, requests: Sequence[GroupRequest]) -> None:
        groups = [LiveGroup.of(request) for request in requests]
        if self._dead is not None:
            for group in groups:
                self._finish(group, Failure(reason=ENGINE_DEAD, message=self._dead))
            return
        self._live.update({group.request.request_id: group for group in groups})
        for group in groups:
            self._add(group)

    def _add(self, group: LiveGroup) -> None:
        request = group.request
        self._sequences.update({member.sequence_id: (group, member) for member in group.members})
        try:
            self._engine.add(
                [member.sequence_id for member in group.members],
                request.prompt_ids,
                request.sampling,
                self._seeds.of(request, self._version),
                # An update may keep the keys of an older version; only requests of that time shall find them.
                cache_salt=f"version {self._version}",
            )
        except ValueError as error:  # sampling parameters that vLLM refuses, before anything was queued
            self._fail(group, Failure(reason=REJECTED, message=f"request {request.request_id}: {error}"))

    def _abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            group = self._live.get(request_id)
            if group is None:
                continue
            self._drop_sequences(group)
            for member in list(group.running()):
                group.end(member, "abort")
            self._finish(group, group.completions())

    def _update(self, version: int, put_in_use: Callable[[], None], keep_kv: bool, asked: float) -> UpdateReport:
        began = time.monotonic()
        if self._live and version < self._version:
            raise WeightError(
                f"version {version} is older than {self._version}, and {len(self._live)} requests are being "
                "sampled, whose versions would fall: abort them first"
            )
        try:
            put_in_use()
        except Exception as error:
            raise self._break(error, f"writing version {version} failed half-way") from error
        recomputed = 0 if keep_kv else len(self._sequences)
        if not keep_kv:
            try:
                self._engine.drop_kv()
            except Exception as error:
                raise self._break(error, f"the KV cache from before version {version} stayed") from error
        self._version = version
        return UpdateReport(
            version=version,
            queued_s=began - asked,
            paused_s=time.monotonic() - began,
            recomputed=recomputed,
        )

    def _break(self, error: Exception, what: str = "an engine step failed") -> StationDied:
        """Give up the engine: fail everybody who waits. Returns the error for the caller of the command."""
        cause = f"the policy engine is broken: {what}: {type(error).__name__}: {error}"
        self._die(cause)
        for group in list(self._live.values()):
            self._finish(group, Failure(reason=ENGINE_DEAD, message=cause))
        self._sequences.clear()
        return StationDied(cause)

    def _stop(self) -> None:
        self._die("the policy engine was closed")
        with self._lock:
            self._stopped = True
        self._abort(list(self._live))

    def _die(self, cause: str) -> None:
        with self._lock:
            self._dead = self._dead or cause
            self._lock.notify_all()

    def _fail(self, group: LiveGroup, failure: Failure) -> None:
        """End a group because of one of its members; the others are dropped."""
        self._drop_sequences(group)
        self._finish(group, failure)

    def _drop_sequences(self, group: LiveGroup) -> None:
        running = [member.sequence_id for member in group.running()]
        for sequence_id in running:
            self._sequences.pop(sequence_id, None)
        self._engine.abort(running)

    def _finish(self, group: LiveGroup, outcome: Any) -> None:
        request_id = group.request.request_id
        self._live.pop(request_id, None)
        self._finished.append(GroupResult(request_id=request_id, outcome=outcome))

    def _deliver(self) -> None:
        """Put the step's results into the outbox, in one go."""
        if not self._finished:
            return
        with self._lock:
            self._accepted.difference_update(result.request_id for result in self._finished)
            self._outbox += self._finished
            self._finished = []
            self._lock.notify_all()
