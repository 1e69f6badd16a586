"""The other ranks of a replica as rank 0 sees them: commands go out, answers and failures come in."""

from __future__ import annotations

import os
import socket
import struct
import threading
import zlib
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from typing import Any

from forgelite.errors import DeadlineExceeded, ForgeliteError, StationDied
from forgelite.policy.engine_protocol import Sampled
from forgelite.policy.engine_thread import EngineThread
from forgelite.policy.tensor_parallel import Rendezvous


class Followers:
    """The other ranks as rank 0 sees them: one connection each, and whatever goes wrong there."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        """Open the door; nobody has come yet."""
        self._rendezvous = rendezvous
        self._changed = threading.Condition()
        self._sending = threading.Lock()  # the engine's commands and those of an update come from two threads
        self._connections: dict[int, Connection] = {}
        self._answers: dict[str, dict[int, Any]] = {}  # by what was asked, then by rank
        self._closed = False
        self.failure: ForgeliteError | None = None  # why the replica is beyond repair
        listener = Listener(
            rendezvous.command_address, family="AF_UNIX", backlog=rendezvous.ranks, authkey=rendezvous.secret
        )
        threading.Thread(target=self._let_in, args=(listener,), name="policy-ranks", daemon=True).start()

    def wait_for_all(self) -> None:
        """Return when every rank is connected.

        Raises:
            DeadlineExceeded: one of them did not come.
        """
        self._wait(
            lambda: len(self._connections) == self._rendezvous.ranks - 1,
            self._rendezvous.build_timeout_s,
            f"the other {self._rendezvous.ranks - 1} ranks of this replica to start",
        )

    def check(self) -> None:
        """Raise what went wrong, if anything did."""
        if self.failure is not None:
            raise self.failure

    def tell(self, command: str, *arguments: Any) -> None:
        """Send a command to every rank. One that cannot be reached is found out by whoever waits next."""
        with self._sending:
            for connection in self._connections.values():
                try:
                    connection.send((command, arguments))
                except OSError as error:
                    self._fail(StationDied(f"a rank of this replica cannot be reached: {error}"))

    def together(self, thread: EngineThread, call: Callable[[], Any], *, what: str, answer: str | None = None) -> Any:
        """Run this rank's part in `thread` and wait for it, and for the answer of all others where there is one.

        Raises:
            StationDied: a rank is gone or has failed; `call` may then go on for ever.
            DeadlineExceeded: the time is up, which is as bad.
            ForgeliteError: what another rank raised.
            Exception: what `call` raised.
        """
        seconds = self._rendezvous.build_timeout_s if answer == "built" else self._rendezvous.call_timeout_s
        outcome = thread.submit(call, lambda _: self._notify())
        self._wait(outcome.done, seconds, f"{what} on rank 0")
        result = outcome.result()
        if answer is not None:
            self.answers(answer, f"{what} on the other ranks")
        return result

    def answers(self, kind: str, what: str, *, fatal: bool = True) -> dict[int, Any]:
        """What every rank said to the last command of this kind, by rank. Raises as `together` does.

        Args:
            kind: of the answer.
            what: is waited for.
            fatal: a rank that is late has lost step with the others.
        """
        seconds = self._rendezvous.build_timeout_s if kind == "built" else self._rendezvous.call_timeout_s
        self._wait(lambda: len(self._answers.get(kind, ())) == len(self._connections), seconds, what, fatal=fatal)
        with self._changed:
            return self._answers.pop(kind, {})

    def part(self) -> None:
        """Tell every rank to close; that it goes is no failure from here on."""
        self._closed = True
        self.tell("close")

    def close(self) -> None:
        """Let go of the connections. A rank that was not told to close ends its process."""
        self._closed = True
        with self._sending:
            for connection in self._connections.values():
                hang_up(connection)

    def _wait(self, ready: Callable[[], bool], seconds: float, what: str, *, fatal: bool = True) -> None:
        with self._changed:
            self._changed.wait_for(lambda: ready() or self.failure is not None, timeout=seconds)
            self.check()
            if not ready():
                late = DeadlineExceeded(f"waited {seconds:g} s for {what}")
                self.failure = late if fatal else None
                raise late

    def _let_in(self, listener: Listener) -> None:
        try:
            for _ in range(self._rendezvous.ranks - 1):
                self._greet(listener)
        except OSError as error:
            self._fail(StationDied(f"rank 0 cannot let the other ranks in: {error}"))
        finally:
            listener.close()

    def _greet(self, listener: Listener) -> None:
        while True:
            try:
                connection = listener.accept()
                index = connection.recv()
                break
            except (AuthenticationError, EOFError, ConnectionError):  # another program's probe
                continue
        limit_sends(connection, self._rendezvous.call_timeout_s)
        with self._changed:
            self._connections[index] = connection
            self._changed.notify_all()
        threading.Thread(
            target=self._listen, args=(index, connection), name=f"policy-rank-{index}", daemon=True
        ).start()

    def _listen(self, index: int, connection: Connection) -> None:
        try:
            while True:
                kind, value = connection.recv()
                if kind == "failed":
                    self._fail(value)
                    continue
                with self._changed:
                    self._answers.setdefault(kind, {})[index] = value
                    self._changed.notify_all()
        except (EOFError, OSError):
            if not self._closed:
                self._fail(StationDied(f"rank {index} of this replica is gone"))
        finally:
            connection.close()

    def _fail(self, error: ForgeliteError) -> None:
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


def limit_sends(connection: Connection, seconds: float) -> None:
    """Let a send end with an OSError when the other side has not read for so long and the buffer is full."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))


def hang_up(connection: Connection) -> None:
    """End a connection for both sides. `close` alone leaves it open for as long as a thread reads from it."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def checksum(sampled: Sequence[Sampled]) -> int:
    """Of the tokens of a step, for the comparison of ranks."""
    return zlib.crc32(array("q", [token for output in sampled for token in output.token_ids]))
