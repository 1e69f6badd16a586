"""Publisher, readers, deaths and restarts in random order: a reader sees a whole version, or a clear error."""

from __future__ import annotations

import dataclasses
import os
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forgelite.errors import WeightError
from forgelite.weights import SHARED_MEMORY, Manifest, reclaim
from tests.faults.weights_on_demand import NBYTES, RETAIN, publish_on_demand, read_on_demand
from tests.faults.weights_processes import kill, running

RUN = f"property-{os.getpid()}"
READERS = 2
SEGMENT_BYTES = (RETAIN + 2) * NBYTES + 2 * 4096
reader = st.integers(0, READERS - 1)


class Life(RuleBasedStateMachine):
    """The model: what was committed where, and who holds which version."""

    def __init__(self) -> None:
        super().__init__()
        self.processes = ExitStack()
        self.publisher: tuple[BaseProcess, Connection] | None = None
        self.readers: list[tuple[BaseProcess, Connection]] = []
        self.version = 0
        self.committed: list[Manifest] = []  # all of them, oldest first
        self.living: list[Manifest] = []  # of the publisher that lives
        self.held: dict[int, Manifest] = {}  # reader -> the version that it keeps
        self.newest_seen = [0] * READERS

    @initialize()
    def start(self) -> None:
        reclaim(SHARED_MEMORY, RUN)
        self.readers = [self.start_process(read_on_demand) for _ in range(READERS)]

    def start_process(self, target: object) -> tuple[BaseProcess, Connection]:
        process, pipe = self.processes.enter_context(running(target, RUN))
        pipe.recv()
        return process, pipe

    @precondition(lambda self: self.publisher is None)
    @rule()
    def a_publisher_starts_and_removes_what_the_dead_left(self) -> None:
        reclaim(SHARED_MEMORY, RUN)
        self.publisher = self.start_process(publish_on_demand)
        self.living = []

    @precondition(lambda self: self.publisher is not None)
    @rule(repeat=st.integers(1, 8))
    def it_publishes(self, repeat: int) -> None:
        for _ in range(repeat):
            self.version += 1
            self.publisher[1].send((self.version, None))
            answer = self.publisher[1].recv()
            kept_by_readers = {m.version for m in self.held.values() if m in self.living[:-RETAIN]}
            # Refused exactly when readers hold both slots that may be overwritten.
            assert isinstance(answer, WeightError) == (len(kept_by_readers) == 2), answer
            if isinstance(answer, WeightError):
                break
            self.committed.append(answer)
            self.living.append(answer)
        for who, manifest in self.held.items():
            assert self.ask(who, "look", manifest) == manifest.version

    @precondition(lambda self: self.publisher is not None)
    @rule(byte=st.integers(0, NBYTES))
    def it_is_killed_while_it_writes(self, byte: int) -> None:
        self.version += 1
        self.publisher[1].send((self.version, byte))
        self.publisher[1].recv()  # stopped there, or refused because of leases
        self.it_is_killed()
        if self.living:
            torn = dataclasses.replace(self.living[-1], version=self.version)
            assert self.ask(0, "fetch", torn) == "unavailable"

    @precondition(lambda self: self.publisher is not None)
    @rule()
    def it_is_killed(self) -> None:
        kill(self.publisher[0])
        self.publisher = None

    @precondition(lambda self: self.committed)
    @rule(who=reader)
    def a_reader_fetches_the_newest_version(self, who: int) -> None:
        newest = self.committed[-1]
        found = self.ask(who, "fetch", newest)
        if newest in self.living:  # its segment exists, whether its owner lives or not
            assert found == newest.version
        assert found in (newest.version, "unavailable")
        if found == newest.version:
            assert found >= self.newest_seen[who]
            self.newest_seen[who] = found

    @precondition(lambda self: self.committed)
    @rule(who=reader, back=st.integers(0, 8))
    def a_reader_fetches_an_older_version(self, who: int, back: int) -> None:
        asked = self.committed[-1 - min(back, len(self.committed) - 1)]
        found = self.ask(who, "fetch", asked)
        assert found in (asked.version, "unavailable")
        if asked in self.living[-RETAIN:] or self.held.get(who) == asked:
            assert found == asked.version

    @precondition(lambda self: self.committed)
    @rule(who=reader, back=st.integers(0, RETAIN - 1))
    def a_reader_serves_a_recent_version_in_place(self, who: int, back: int) -> None:
        asked = self.committed[-1 - min(back, len(self.committed) - 1)]
        self.held.pop(who, None)
        found = self.ask(who, "hold", asked)
        assert found in (asked.version, "unavailable")
        if found == asked.version:
            self.held[who] = asked
        else:
            assert asked not in self.living

    @rule(who=reader)
    def a_reader_lets_go(self, who: int) -> None:
        assert self.ask(who, "release", None) == "released"
        self.held.pop(who, None)

    @rule(who=reader)
    def a_reader_is_killed_and_another_one_starts(self, who: int) -> None:
        kill(self.readers[who][0])
        self.held.pop(who, None)
        self.newest_seen[who] = 0
        self.readers[who] = self.start_process(read_on_demand)

    @invariant()
    def shared_memory_in_use_is_that_of_one_segment(self) -> None:
        sizes = [path.stat().st_size for path in SHARED_MEMORY.iterdir() if f"forgelite-{RUN}-" in path.name]
        assert sum(sizes) <= SEGMENT_BYTES

    def ask(self, who: int, action: str, manifest: Manifest | None) -> object:
        pipe = self.readers[who][1]
        pipe.send((action, manifest))
        assert pipe.poll(20.0), f"reader {who} does not answer"
        return pipe.recv()

    def teardown(self) -> None:
        self.processes.close()
        reclaim(SHARED_MEMORY, RUN)
        assert not [path for path in SHARED_MEMORY.iterdir() if f"forgelite-{RUN}-" in path.name]


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
