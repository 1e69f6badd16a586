"""One thread owns the engine; everybody else leaves commands for it.

    submit ──┐                              ┌── step ◄─┐
    abort  ──┼──► inbox ──► [engine thread] ┤          │
    update ──┘    drained between two steps └── news ──► outbox ──► collect

A command runs between two steps and never beside one, so no lock guards the engine, and an update (weights,
version label and KV reset in one command) falls exactly on a token boundary: every token before it was
computed by the old weights, every token after it by the new ones. A lock around `step()` would starve the
callers instead, because the engine thread takes it again at once.

What is sampled is in `batch.py`, how weights change in `updates.py`. Knows neither vLLM nor torch: the engine behind
it is the small protocol `Engine`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from forgelite.errors import ConfigError, StationDied, WeightError
from forgelite.policy.admission import REJECTED, rejection
from forgelite.policy.batch import Batch
from forgelite.policy.engine_protocol import (
    DRAIN_TIMEOUT_S,
    ENGINE_DEAD,
    UPDATE_MODES,
    Engine,
    EngineStats,
    UpdateMode,
    UpdateReport,
)
from forgelite.policy.groups import GroupProgress, GroupResult, first_versions
from forgelite.policy.stop_texts import StopTexts
from forgelite.policy.updates import SwapFailed, Update, WeightUpdates, unchanged
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

    def __init__(self, engine: Engine, *, seed: int, version: int = 0, stop_texts: StopTexts | None = None) -> None:
        """Start the thread.

        Args:
            engine: owned by the loop from here on; closed by it.
            seed: requests without a seed derive theirs from it.
            version: that of the weights the engine was built with.
            stop_texts: finds `SamplingParams.stop`; None: requests with stop texts are refused.
        """
        self._engine = engine
        self._limits = engine.limits
        self._stop_texts = stop_texts
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._one_update = threading.Lock()

        # Shared with callers, under the lock.
        self._lock = threading.Condition()
        self._accepted: set[str] = set()  # request ids without a result yet
        self._outbox: list[GroupResult | GroupProgress] = []
        self._dead: str | None = None  # why no request is served any more
        self._stopped = False

        # Only touched by the engine thread. Other threads read numbers of it for statistics.
        self._batch = Batch(engine, seed=seed, version=version, stop_texts=stop_texts)
        self._updates = WeightUpdates(engine, self._batch)
        self._updated_to: int | None = None  # None: the weights are still those it was built with
        self._born, self._busy_s, self._steps = time.monotonic(), 0.0, 0
        self._queue_lengths = (0, 0)
        self._last_done: float | None = None  # when a step or command ended; None while there is nothing to do

        self._thread = threading.Thread(target=self._run, name="policy-engine", daemon=True)
        self._thread.start()

    # For callers.

    @property
    def version(self) -> int:
        """The version of the weights that the next token will be computed with."""
        return self._batch.version

    def holds(self, version: int) -> bool:
        """Whether an update to `version` would change nothing, because one has put it in use already.

        A version that the engine was built with does not count: its folder may hold other weights than those
        that were published under its number.
        """
        return self._updated_to == version

    def submit(self, requests: Sequence[GroupRequest]) -> list[Failure | None]:
        """Hand over requests, as one command, and return at once.

        The first request with stop texts loads the tokenizer here, which takes up to seconds.

        Returns:
            For each request None when it was accepted, or why it was refused: rejected because of itself, or
            because the engine is broken or closed. An accepted request has exactly one result, a refused one
            has none.
        """
        stop_fault = self._stop_fault() if any(request.sampling.stop for request in requests) else None
        verdicts: list[Failure | None] = []
        accepted: list[GroupRequest] = []
        with self._lock:
            for request in requests:
                verdict = self._refusal(request, stop_fault)
                verdicts.append(verdict)
                if verdict is None:
                    self._accepted.add(request.request_id)
                    accepted.append(request)
            if accepted:
                self._inbox.put(partial(self._admit, accepted))
        return verdicts

    def collect(self, timeout_s: float) -> list[GroupResult | GroupProgress]:
        """Wait until there is a result or a report and take all that are there; empty at the timeout.

        The reports of a request (`GroupRequest.progress_s`) are in order and come before its result.

        Raises:
            StationDied: the engine is broken or closed, and every result has been taken.
        """
        with self._lock:
            self._lock.wait_for(lambda: bool(self._outbox) or self._nothing_to_come(), timeout=timeout_s)
            news, self._outbox = self._outbox, []
            if not news and self._nothing_to_come():
                raise StationDied(self._dead)
        return news

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests at the next step boundary, also those that an update holds back.

        Each still has its one result, with the tokens sampled so far. Ids that have theirs already, or that
        were never accepted, are ignored.
        """
        self._inbox.put(partial(self._batch.abort, list(request_ids)))

    def update(
        self,
        version: int,
        load: Callable[[], Mapping[str, torch.Tensor]],
        *,
        mode: UpdateMode = "in_flight",
        keep_kv: bool = False,
        drain_timeout_s: float = DRAIN_TIMEOUT_S,
    ) -> UpdateReport:
        """Prepare new weights in this thread, take them between two steps, and return when they are in use.

        One update is made at a time; a second caller waits for the first. Nothing is loaded where `holds(version)`.

        Args:
            version: of the new weights.
            load: gives the tensors by checkpoint name. They are only read, but by an engine that uses them in
                place (`weights.swap=zero_copy`) until the next update has returned.
            mode: what happens to running sequences; `updates.py` shows it.
            keep_kv: let running sequences go on with the keys and values of the old weights (in_flight only).
                Their further tokens are then sampled by neither version's own distribution; the recorded
                logprobs stay true.
            drain_timeout_s: how long running sequences may take to end, in seconds (drain only).

        Raises:
            WeightMismatch: the tensors do not fit. Version and weights are what they were.
            WeightError: the version is older than the current one while sequences are running, there is no such
                mode, or `keep_kv` is asked for with another one than in_flight.
            DeadlineExceeded: sequences were still running after `drain_timeout_s`. Version and weights are what
                they were, and held requests go on.
            StationDied: the engine is broken or closed, or broke because writing failed half-way.
            Exception: whatever `load` raised. Version and weights are what they were.
        """
        if mode not in UPDATE_MODES:
            raise WeightError(f"update mode {mode!r} is none of {', '.join(UPDATE_MODES)}")
        if keep_kv and mode != "in_flight":
            raise WeightError(f"policy.update.kv=keep with mode {mode!r}: no sequence keeps its KV cache in that mode")
        with self._one_update:
            if self._dead is not None:
                raise StationDied(self._dead)
            if self.holds(version):
                return unchanged(version, mode)
            update = Update(
                version=version,
                put_in_use=self._engine.prepare_weights(load()),
                mode=mode,
                keep_kv=keep_kv,
                drain_timeout_s=drain_timeout_s,
            )
            with self._lock:  # under it, so that a command is either refused here or run by the thread
                if self._stopped:
                    raise StationDied(self._dead or "the policy engine was closed")
                self._inbox.put(partial(self._begin_update, update))
            report = update.outcome.result()
            self._updated_to = version
            return report

    def stats(self) -> EngineStats:
        """Counters of the engine thread; a step in progress is not in them yet."""
        running, waiting = self._queue_lengths
        now, last_done = time.monotonic(), self._last_done
        return EngineStats(
            version=self._batch.version,
            alive_s=now - self._born,
            busy_s=self._busy_s,
            steps=self._steps,
            generated_tokens=self._batch.sampled_tokens,
            running=running,
            waiting=waiting,
            last_step_age_s=0.0 if last_done is None else now - last_done,
            first_versions=first_versions(self._batch.live.copy().values()),
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

    def _stop_fault(self) -> str | None:
        """Why stop texts cannot be found; None when they can."""
        if self._stop_texts is None:
            return "stop texts need a tokenizer, and this policy has none"
        try:
            self._stop_texts.open()
        except ConfigError as error:
            return f"stop texts need a tokenizer: {error}; use stop_token_ids"
        return None

    def _refusal(self, request: GroupRequest, stop_fault: str | None) -> Failure | None:
        if self._dead is not None:
            return Failure(reason=ENGINE_DEAD, message=self._dead)
        fault = None
        if request.request_id in self._accepted:
            fault = "a request of this id is still being sampled"
        elif request.sampling.stop and stop_fault is not None:
            fault = stop_fault
        if fault is not None:
            return Failure(reason=REJECTED, message=f"request {request.request_id}: {fault}")
        return rejection(request, self._limits)

    # In the engine thread.

    def _run(self) -> None:
        while not self._stopped:
            try:
                self._run_commands()
                if self._batch.live:
                    self._step()
                self._updates.advance()
            except Exception as error:  # nothing that happens inside an engine leaves it in a known state
                self._break(error)
            self._deliver()
        while not self._inbox.empty():  # commands that came before the door closed; each is refused as dead
            self._inbox.get()()
        self._deliver()
        self._engine.close()

    def _run_commands(self) -> None:
        """Run the commands that are waiting; sleep until there is one when there is nothing to sample."""
        command = None
        if not self._batch.live:  # then no update is draining either
            self._last_done = None
            command = self._inbox.get()
        began = self._last_done = time.monotonic()
        try:
            while not self._stopped:
                if command is not None:
                    command()
                command = self._inbox.get_nowait()
        except queue.Empty:
            pass
        finally:
            self._last_done = time.monotonic()
            self._busy_s += self._last_done - began

    def _step(self) -> None:
        began = time.monotonic()
        self._batch.step()
        self._queue_lengths = self._engine.queue_lengths()
        self._steps += 1
        self._last_done = time.monotonic()
        self._busy_s += self._last_done - began

    def _admit(self, requests: Sequence[GroupRequest]) -> None:
        if self._dead is not None:
            self._batch.refuse(requests, Failure(reason=ENGINE_DEAD, message=self._dead))
        else:
            self._batch.admit(requests)

    def _begin_update(self, update: Update) -> None:
        if self._dead is not None:
            update.outcome.set_exception(StationDied(self._dead))
        else:
            self._updates.begin(update)

    def _break(self, error: Exception) -> None:
        """Give up the engine: fail everybody who waits."""
        what, why = (str(error), error.__cause__) if isinstance(error, SwapFailed) else ("an engine step failed", error)
        cause = f"the policy engine is broken: {what}: {type(why).__name__}: {why}"
        self._die(cause)
        self._batch.fail_all(Failure(reason=ENGINE_DEAD, message=cause))
        self._updates.cancel(StationDied(cause))

    def _stop(self) -> None:
        self._die("the policy engine was closed")
        with self._lock:
            self._stopped = True
        self._batch.abort_all()
        self._updates.cancel(StationDied(self._dead or ""))

    def _die(self, cause: str) -> None:
        with self._lock:
            self._dead = self._dead or cause
            self._lock.notify_all()

    def _deliver(self) -> None:
        """Put the step's news into the outbox, in one go."""
        news = self._batch.take_news()
        if not news:
            return
        with self._lock:
            self._accepted.difference_update(each.request_id for each in news if isinstance(each, GroupResult))
            self._outbox += news
            self._lock.notify_all()
