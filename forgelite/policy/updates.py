"""New weights in the middle of generation: one state machine, in the engine's thread, one update at a time.

                 in_flight ──────────────────────────────► swap ─┐
    serving ──── abort ─────► cut running ones ──────────► swap ─┼─► serving the new version:
       ▲         drain ─────► draining ── last one ended ► swap ─┘   cut ones resubmitted, held ones admitted
       │                         │  newcomers are held
       └── serves the old one ◄──┴── drain_timeout_s passed (DeadlineExceeded), or the swap was refused (WeightError)

    close, or an engine that breaks, ends an update in any state with StationDied.

A swap is weights, KV reset and version label in one command between two steps. `in_flight`: sequences go on, with
their KV cache computed anew (or kept). `abort`: sequences leave the engine and come back as prompt + tokens so far.
`drain`: no completion has two versions. `policy.update.mode=barrier` is a drain of whole rollouts: the training loop
starts no group, and its engines are told to drain.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from forgelite.errors import DeadlineExceeded, WeightError
from forgelite.policy.batch import Batch
from forgelite.policy.engine_protocol import Engine, UpdateMode, UpdateReport

_MOST_NAMED = 4  # requests that an error shows before it only counts


class SwapFailed(Exception):
    """The weights of the engine are undefined: it is broken. Says what happened; its cause says why."""


@dataclass(kw_only=True, slots=True)
class Update:
    """One update that was asked for.

    Example: `Update(version=4, put_in_use=swap, mode="drain", keep_kv=False, drain_timeout_s=60.0)`.
    """

    version: int
    put_in_use: Callable[[], None]  # from `Engine.prepare_weights`
    mode: UpdateMode
    keep_kv: bool
    drain_timeout_s: float
    asked: float = field(default_factory=time.monotonic)
    deadline: float = 0.0  # of the drain, on the monotonic clock
    outcome: Future[UpdateReport] = field(default_factory=Future)


def unchanged(version: int, mode: UpdateMode) -> UpdateReport:
    """The report of an update to the version that is in use."""
    return UpdateReport(version=version, queued_s=0.0, paused_s=0.0, recomputed=0, mode=mode)


class WeightUpdates:
    """Makes updates of one engine. Belongs to the engine's thread; the caller lets in one at a time."""

    def __init__(self, engine: Engine, batch: Batch) -> None:
        """Start in the state `serving`."""
        self._engine = engine
        self._batch = batch
        self._update: Update | None = None  # None: serving

    def begin(self, update: Update) -> None:
        """Make an update, or begin to drain for it. Its outcome holds the report or what went wrong.

        Raises:
            SwapFailed: the engine is broken.
        """
        self._update = update
        batch = self._batch
        if batch.live and update.version < batch.version:
            self._fail(
                WeightError(
                    f"version {update.version} is older than {batch.version}, and {len(batch.live)} requests are being "
                    "sampled, whose versions would fall: abort them first"
                )
            )
        elif update.mode == "drain" and batch.live:
            update.deadline = time.monotonic() + update.drain_timeout_s
            batch.hold()
        else:
            self._swap(update)

    def advance(self) -> None:
        """Go on with a drain, if there is one; called after every step and command.

        Raises:
            SwapFailed: the engine is broken.
        """
        update = self._update
        if update is None:
            return
        if not self._batch.live:
            self._swap(update)
        elif time.monotonic() >= update.deadline:
            still = self._still_running()
            self._batch.release()
            self._fail(
                DeadlineExceeded(
                    f"policy.update.drain_timeout_s={update.drain_timeout_s:g} passed and {still}; version "
                    f"{self._batch.version} still serves: raise it, lower policy.sampling.max_tokens, or set "
                    "policy.update.mode=in_flight"
                )
            )

    def cancel(self, error: Exception) -> None:
        """End the update under way, if there is one, because the engine serves nobody any more."""
        if self._update is not None:
            self._fail(error)

    def _swap(self, update: Update) -> None:
        began = time.monotonic()
        batch = self._batch
        recomputed = 0 if update.keep_kv else batch.sequences
        refusal: WeightError | None = None
        if update.mode == "abort":
            batch.cut()
        try:
            self._exchange(update)
        except WeightError as error:
            refusal = error
        if update.mode == "abort":
            batch.resubmit()
        held = batch.release()
        if refusal is not None:
            self._fail(refusal)
            return
        self._update = None
        update.outcome.set_result(
            UpdateReport(
                version=update.version,
                queued_s=began - update.asked,
                paused_s=time.monotonic() - began,
                recomputed=recomputed,
                mode=update.mode,
                held=held,
            )
        )

    def _exchange(self, update: Update) -> None:
        """Weights, KV cache and label in one go. A WeightError leaves all three as they were."""
        try:
            update.put_in_use()
        except WeightError:
            raise
        except Exception as error:
            raise SwapFailed(f"writing version {update.version} failed half-way") from error
        if not update.keep_kv:
            try:
                self._engine.drop_kv()
            except Exception as error:
                raise SwapFailed(f"the KV cache from before version {update.version} stayed") from error
        self._batch.version = update.version

    def _fail(self, error: Exception) -> None:
        update, self._update = self._update, None
        update.outcome.set_exception(error)

    def _still_running(self) -> str:
        live = self._batch.live
        named = ", ".join(list(live)[:_MOST_NAMED]) + (", ..." if len(live) > _MOST_NAMED else "")
        return f"{self._batch.sequences} sequences of {len(live)} requests are still being sampled ({named})"
