from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from forgelite.errors import VersionUnavailable, WeightError
from forgelite.weights import SHARED_MEMORY, reclaim
from forgelite.weights.arena_reader import ArenaReader
from tests.faults.weights_processes import (
    filled,
    hold_a_lease,
    is_whole,
    kill,
    make_writer,
    publish_for_ever,
    read_until_told,
    running,
    stop_half_created,
    stop_in_the_middle_of,
)

RUN = "faults"


@pytest.fixture(autouse=True)
def clean_run() -> Iterator[None]:
    reclaim(SHARED_MEMORY, RUN)
    yield
    assert reclaim(SHARED_MEMORY, RUN) == []


def test_a_publisher_killed_in_mid_copy_leaves_the_versions_before_whole() -> None:
    with running(stop_in_the_middle_of, RUN, 5) as (publisher, pipe):
        reader = ArenaReader(pipe.recv())
        kill(publisher)
        assert reader.versions() == [3, 4]
        for version in (3, 4):
            with reader.lease(version) as (_, views):
                assert is_whole(views, version)
        for version in (2, 5):
            with pytest.raises(VersionUnavailable), reader.lease(version):
                pass
        assert reclaim(SHARED_MEMORY, RUN) == [reader.path]


@pytest.mark.parametrize("seed", range(12))
def test_a_publisher_killed_at_any_moment_leaves_whole_versions_or_none(seed: int) -> None:
    moment = random.Random(seed)
    with running(publish_for_ever, RUN) as (publisher, pipe):
        reader = ArenaReader(pipe.recv())
        until = moment.randrange(1, 8)
        while (begun := pipe.recv()) < until:
            pass
        time.sleep(moment.uniform(0, 4e-3))  # a write takes about two milliseconds
        kill(publisher)
        while pipe.poll():
            try:
                begun = pipe.recv()
            except EOFError:
                break
        whole = reader.versions()
        assert set(whole) >= set(range(max(0, begun - 2), begun))
        assert whole[-1] in (begun - 1, begun)
        for version in whole:
            with reader.lease(version) as (_, views):
                assert is_whole(views, version)
        assert reclaim(SHARED_MEMORY, RUN) == [reader.path]


def test_a_reader_killed_inside_a_lease_gives_it_back() -> None:
    writer = make_writer(RUN, retain=1)
    writer.write(1, filled(1), timeout_s=1.0)
    writer.write(2, filled(2), timeout_s=1.0)
    with running(hold_a_lease, writer.path, 1) as (reader, pipe):
        assert pipe.recv() == "held"
        with pytest.raises(WeightError, match=rf"version 1 under a lease of process \[{reader.pid}\]"):
            writer.write(3, filled(3), timeout_s=0.01)
        kill(reader)
        writer.write(3, filled(3), timeout_s=0.01)
    assert writer.versions() == [2, 3]
    writer.close()


def test_after_publisher_and_reader_died_the_next_run_starts_clean() -> None:
    with running(stop_in_the_middle_of, RUN, 3) as (publisher, pipe):
        path = pipe.recv()
        with running(hold_a_lease, path, 1) as (reader, reader_pipe):
            assert reader_pipe.recv() == "held"
            kill(publisher)
            kill(reader)
    assert reclaim(SHARED_MEMORY, RUN) == [path]
    successor = make_writer(RUN)
    successor.write(1, filled(1), timeout_s=0.01)
    assert successor.versions() == [1]
    successor.close()


def test_reclaim_takes_the_dead_and_leaves_the_living() -> None:
    with (
        running(publish_for_ever, RUN) as (publisher, pipe),
        running(stop_half_created, RUN) as (maker, half),
    ):
        dead, unfinished = pipe.recv(), half.recv()
        living = make_writer(RUN)
        assert reclaim(SHARED_MEMORY, RUN) == []
        kill(publisher)
        assert reclaim(SHARED_MEMORY, RUN) == [dead]
        kill(maker)
        assert reclaim(SHARED_MEMORY, RUN) == [unfinished]
        living.write(1, filled(1), timeout_s=1.0)
        assert [dead.exists(), unfinished.exists(), living.path.exists()] == [False, False, True]
        living.close()


def test_a_reader_keeps_what_it_reads_when_the_segment_of_a_dead_publisher_is_reclaimed() -> None:
    with running(publish_for_ever, RUN) as (publisher, pipe):
        reader = ArenaReader(pipe.recv())
        while pipe.recv() < 3:
            pass
        kill(publisher)
        version = reader.versions()[-1]
        with reader.lease(version) as (_, views):
            assert reclaim(SHARED_MEMORY, RUN) == [reader.path]
            assert is_whole(views, version)


def test_two_readers_beside_a_fast_publisher_never_see_a_torn_version() -> None:
    writer = make_writer(RUN, retain=1)  # two slots: every write meets the readers
    writer.write(0, filled(0), timeout_s=10.0)
    with running(read_until_told, writer.path) as (_, one), running(read_until_told, writer.path) as (_, two):
        assert [one.recv(), two.recv()] == ["attached", "attached"]
        versions = [filled(version) for version in range(1, 9)]
        for version in range(1, 401):
            # the same eight sets of memory, each refilled, so that the publisher spends its time in the copy
            tensors = versions[version % 8]
            for tensor in tensors.values():
                tensor.fill_(version)
            writer.write(version, tensors, timeout_s=10.0)
        for pipe in (one, two):
            pipe.send("stop")
        for counts in (one.recv(), two.recv()):
            assert counts["torn"] == 0
            assert counts["backwards"] == 0
            assert counts["whole"] > 20
    writer.close()
