"""A rank of a replica other than 0: it does what rank 0 says, in the order in which rank 0 says it.

    socket ──► [reading thread] ──add, abort, step, swap, drop_kv──► [engine thread]
                       └───────── prepare, discard ──► [thread of an update], beside the steps

It samples the same tokens as rank 0 and tells nobody. When rank 0 is gone, its engine may be inside a collective that
never ends, and nobody would ever ask for it again: `on_lost` then ends the process.

Knows neither vLLM nor torch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Client, Connection
from typing import Any, Protocol

from forgelite.errors import DeadlineExceeded, ForgeliteError, StationDied
from forgelite.policy.engine_protocol import Engine
from forgelite.policy.engine_thread import EngineThread
from forgelite.policy.ranks import checksum
from forgelite.policy.tensor_parallel import Rank

log = logging.getLogger(__name__)

_RETRY_S = 0.05  # between two attempts to reach rank 0, which may not listen yet


class PreparedWeights(Protocol):
    """A version that this rank holds a lease of."""

    def put_in_use(self) -> None:
        """Write it into the engine, between two steps."""

    def release(self) -> None:
        """Give the lease back."""


class Follower:
    """Executes the commands of rank 0 until it says `close`. `follow` is the way to get one."""

    def __init__(
        self,
        connection: Connection,
        rank: Rank,
        thread: EngineThread,
        engine: Engine,
        *,
        prepare: Callable[[Engine, Any], PreparedWeights],
        on_lost: Callable[[str], None],
    ) -> None:
        """Start to execute.

        Args:
            connection: to rank 0.
            rank: of this process.
            thread: that `engine` was built in.
            engine: of this rank; closed when rank 0 says so.
            prepare: takes a lease of a version (a manifest or a number) and prepares it; called beside the steps.
            on_lost: called with the cause when rank 0 is gone. It does not return in a run: it ends the process.
        """
        self.capabilities = engine.capabilities
        self._connection = connection
        self._rank = rank
        self._thread = thread
        self._engine = engine
        self._prepare_for = prepare
        self._on_lost = on_lost
        self._sending = threading.Lock()
        self._prepared: PreparedWeights | None = None
        self._sampled_before: int | None = None
        self._failed = False
        self._commands: dict[str, Callable[..., None]] = {
            "add": engine.add,
            "abort": engine.abort,
            "step": self._step,
            "swap": self._swap,
            "drop_kv": engine.drop_kv,
            "close": self._close,
        }
        self._beside_steps: dict[str, Callable[..., None]] = {"prepare": self._prepare, "discard": self._discard}
        self._updates = EngineThread("policy-follower-updates")
        self._reader = threading.Thread(target=self._read, name="policy-follower", daemon=True)
        self._reader.start()

    def join(self, timeout_s: float) -> None:
        """Wait until rank 0 has said `close` and the engine is freed.

        Raises:
            DeadlineExceeded: it was not in time.
        """
        self._reader.join(timeout_s)
        if self._reader.is_alive():
            raise DeadlineExceeded(f"rank 0 did not close this rank within {timeout_s:g} s")

    def _read(self) -> None:
        try:
            while True:
                command, arguments = self._connection.recv()
                if command in self._beside_steps:
                    self._updates.submit(partial(self._execute, self._beside_steps[command], arguments))
                    continue
                outcome = self._thread.submit(partial(self._execute, self._commands[command], arguments))
                if command == "close":
                    outcome.result(self._rank.rendezvous.call_timeout_s)
                    self._thread.end()
                    self._updates.end()
                    return
        except (EOFError, OSError) as error:  # a TimeoutError of the close is an OSError too
            self._on_lost(f"rank {self._rank.index} lost rank 0 of its replica: {type(error).__name__}: {error}")

    def _execute(self, command: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if self._failed:  # rank 0 knows, and gives the replica up
            return
        try:
            command(*arguments)
        except Exception as error:
            what = command.__name__.lstrip("_")
            log.exception("%s failed on rank %d", what, self._rank.index)
            self._failed = True
            self._say("failed", StationDied(_cause(self._rank, what, error)))

    def _step(self, sampled_before: int | None) -> None:
        if sampled_before != self._sampled_before:
            raise RuntimeError("this rank has sampled other tokens than rank 0: the ranks are out of step")
        self._sampled_before = checksum(self._engine.step())

    def _prepare(self, update: int, source: Any) -> None:
        self._discard()
        refusal = None
        try:
            self._prepared = self._prepare_for(self._engine, source)
        except (ForgeliteError, OSError) as error:  # the weights cannot be had or do not fit; the engine is whole
            refusal = f"{type(error).__name__}: {error}"
        self._say(f"prepared {update}", refusal)

    def _swap(self) -> None:
        if self._prepared is None:
            raise RuntimeError("asked to swap, but no version is prepared")
        self._prepared.put_in_use()
        self._say("swapped", None)

    def _discard(self) -> None:
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            prepared.release()

    def _close(self) -> None:
        self._discard()
        self._engine.close()

    def _say(self, kind: str, value: Any) -> None:
        with self._sending:
            try:
                self._connection.send((kind, value))
            except OSError:  # the reading thread sees it too, and ends the process
                log.warning("rank 0 did not hear: %s", kind)


def follow(
    build: Callable[[], Engine],
    rank: Rank,
    *,
    prepare: Callable[[Engine, Any], PreparedWeights],
    on_lost: Callable[[str], None],
) -> Follower:
    """Build the engine of a rank together with the others, and start to execute what rank 0 says.

    Args:
        build: makes the engine of this rank.
        rank: not 0.
        prepare, on_lost: see `Follower`.

    Raises:
        ConfigError: as `build`.
        DeadlineExceeded: rank 0 cannot be reached.
    """
    connection, thread = _connect(rank), EngineThread(f"policy-rank-{rank.index}")
    try:
        engine = thread.submit(build).result(rank.rendezvous.build_timeout_s)
    except Exception as error:
        own = isinstance(error, ForgeliteError)
        connection.send(("failed", error if own else StationDied(_cause(rank, "the start of the engine", error))))
        raise
    connection.send(("built", None))
    return Follower(connection, rank, thread, engine, prepare=prepare, on_lost=on_lost)


def _connect(rank: Rank) -> Connection:
    rendezvous = rank.rendezvous
    deadline = time.monotonic() + rendezvous.build_timeout_s
    while True:
        try:
            connection = Client(rendezvous.command_address, family="AF_UNIX", authkey=rendezvous.secret)
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"rank {rank.index} of this replica waited {rendezvous.build_timeout_s:g} s for rank 0"
                ) from None
            time.sleep(_RETRY_S)
    connection.send(rank.index)
    return connection


def _cause(rank: Rank, what: str, error: Exception) -> str:
    return f"rank {rank.index} of this replica failed: {what}: {type(error).__name__}: {error}"
