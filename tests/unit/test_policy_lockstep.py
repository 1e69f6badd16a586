"""Ranks in lock-step, over real sockets, with engines that only note what they are told."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from forgelite.errors import ConfigError, DeadlineExceeded, StationDied, WeightError, WeightMismatch
from forgelite.policy.admission import Limits
from forgelite.policy.engine_protocol import Sampled
from forgelite.policy.follower import Follower, follow
from forgelite.policy.lockstep import LockstepEngine, lead
from forgelite.policy.ranks import hang_up
from forgelite.policy.tensor_parallel import Rank, check_ranks, new_rendezvous
from forgelite.types import SamplingParams

BOUND_S = 10.0  # far more than anything here takes


@dataclass
class NotingEngine:
    """Notes every call; each step samples the number of the step, or `token`."""

    calls: list[Any] = field(default_factory=list)
    token: int | None = None
    refuses: bool = False
    fails: bool = False
    capabilities: str = "what was built"
    limits: Limits = field(default_factory=lambda: Limits(vocab_size=10, max_model_len=10))
    inside: threading.Event = field(default_factory=threading.Event)  # a step has begun
    blocked: threading.Event | None = None  # a step lasts until this is set: a collective without its peers

    def add(self, sequence_ids: Any, prompt_ids: Any, sampling: Any, seeds: Any, cache_salt: str) -> None:
        if self.refuses:
            raise ValueError("temperature")
        self.calls.append(("add", list(sequence_ids), list(prompt_ids), list(seeds), cache_salt))

    def abort(self, sequence_ids: Any) -> None:
        self.calls.append(("abort", list(sequence_ids)))

    def step(self) -> list[Sampled]:
        self.calls.append("step")
        self.inside.set()
        if self.fails:
            raise RuntimeError("out of memory")
        if self.blocked is not None:
            self.blocked.wait(BOUND_S)
        number = self.calls.count("step")
        return [Sampled("g/0", [self.token or number], [-0.5], None)]

    def queue_lengths(self) -> tuple[int, int]:
        return 1, 0

    def prepare_weights(self, tensors: Any) -> Any:
        return lambda: self.calls.append(("swap", tensors))

    def drop_kv(self) -> None:
        self.calls.append("drop_kv")

    def close(self) -> None:
        self.calls.append("close")


@dataclass
class Lease:
    """A prepared version of a follower, which notes when its lease is given back."""

    engine: NotingEngine
    source: Any
    released: list[Any]

    def put_in_use(self) -> None:
        self.engine.calls.append(("swap", self.source))

    def release(self) -> None:
        self.released.append(self.source)


@dataclass
class Replica:
    """Two ranks in one process."""

    engines: tuple[NotingEngine, NotingEngine]
    leader: LockstepEngine
    follower: Follower
    released: list[Any]
    lost: threading.Event


@contextmanager
def replica(
    first: NotingEngine | None = None, second: NotingEngine | None = None, **rendezvous: Any
) -> Iterator[Replica]:
    engines = (first or NotingEngine(), second or NotingEngine())
    released: list[Any] = []
    lost = threading.Event()
    meeting = replace(new_rendezvous(2, build_timeout_s=BOUND_S, call_timeout_s=BOUND_S), **rendezvous)

    def prepare(engine: NotingEngine, source: Any) -> Lease:
        if source == "unfit":
            raise WeightMismatch("missing: lm_head.weight")
        return Lease(engine, source, released)

    followers: list[Follower] = []
    place = Rank(index=1, rendezvous=meeting)

    def start() -> None:
        followers.append(follow(lambda: engines[1], place, prepare=prepare, on_lost=lambda cause: lost.set()))

    thread = threading.Thread(target=start)
    thread.start()
    leader = lead(lambda: engines[0], meeting)
    thread.join(BOUND_S)
    with ExitStack() as stack:
        stack.callback(leader.close)
        for engine in engines:
            if engine.blocked is not None:
                stack.callback(engine.blocked.set)
        yield Replica(engines, leader, followers[0], released, lost)


def test_every_rank_does_the_same_in_the_same_order() -> None:
    with replica() as ranks:
        ranks.leader.add(["g/0", "g/1"], [1, 2], SamplingParams(max_tokens=3), [11, 12], "version 0")
        assert [ranks.leader.step()[0].token_ids for _ in range(3)] == [[1], [2], [3]]
        ranks.leader.abort(["g/1"])
        ranks.leader.drop_kv()
        ranks.leader.step()
    ranks.follower.join(BOUND_S)

    assert ranks.engines[0].calls == ranks.engines[1].calls
    assert ranks.engines[1].calls[-1] == "close"
    assert not ranks.lost.is_set()


def test_a_request_that_rank_0_refuses_reaches_no_other_rank() -> None:
    with replica(first=NotingEngine(refuses=True)) as ranks:
        with pytest.raises(ValueError, match="temperature"):
            ranks.leader.add(["g/0"], [1], SamplingParams(max_tokens=3), [11], "version 0")
        ranks.leader.step()
    ranks.follower.join(BOUND_S)

    assert ranks.engines[1].calls == ["step", "close"]


def test_a_rank_that_samples_other_tokens_breaks_the_next_step() -> None:
    release = threading.Event()
    with replica(second=NotingEngine(token=7)) as ranks:
        ranks.leader.step()
        ranks.engines[0].blocked = release  # the next step ends only when the other rank has been heard
        with pytest.raises(StationDied, match=r"rank 1 .*sampled other tokens than rank 0"):
            ranks.leader.step()
        release.set()


def test_a_step_ends_with_the_cause_when_another_rank_fails_in_it() -> None:
    with (
        replica(first=NotingEngine(blocked=threading.Event()), second=NotingEngine(fails=True)) as ranks,
        pytest.raises(StationDied, match="rank 1 of this replica failed: step: RuntimeError: out of memory"),
    ):
        ranks.leader.step()


def test_a_step_ends_when_another_rank_dies_in_it() -> None:
    blocked = threading.Event()
    with replica(first=NotingEngine(blocked=blocked), second=NotingEngine(blocked=blocked)) as ranks:
        cut = threading.Thread(
            target=lambda: ranks.engines[1].inside.wait(BOUND_S) and hang_up(ranks.follower._connection)
        )
        cut.start()
        with pytest.raises(StationDied, match="rank 1 of this replica is gone"):
            ranks.leader.step()
        cut.join(BOUND_S)
        with pytest.raises(StationDied, match="rank 1"):
            ranks.leader.add(["g/0"], [1], SamplingParams(max_tokens=3), [11], "version 0")


def test_a_rank_that_stands_still_is_given_up_at_the_deadline() -> None:
    with replica(first=NotingEngine(blocked=threading.Event()), call_timeout_s=0.1) as ranks:
        with pytest.raises(DeadlineExceeded, match=r"waited 0\.1 s for a step"):
            ranks.leader.step()
        with pytest.raises(DeadlineExceeded):
            ranks.leader.step()


def test_a_rank_that_loses_rank_0_ends_even_inside_a_step() -> None:
    blocked = threading.Event()
    with replica(first=NotingEngine(blocked=blocked), second=NotingEngine(blocked=blocked)) as ranks:
        stepping = threading.Thread(target=ranks.leader.step)
        stepping.start()
        assert ranks.engines[1].inside.wait(BOUND_S)
        ranks.leader._followers.close()
        assert ranks.lost.wait(BOUND_S)
        blocked.set()
        stepping.join(BOUND_S)


def test_new_weights_are_prepared_everywhere_before_any_rank_takes_them() -> None:
    with replica() as ranks:
        ranks.leader.prepare_followers("version 4")
        put_in_use = ranks.leader.prepare_weights("tensors of version 4")
        assert ranks.engines[0].calls == ranks.engines[1].calls == []
        put_in_use()
        assert ranks.engines[0].calls == [("swap", "tensors of version 4")]
        assert ranks.engines[1].calls == [("swap", "version 4")]
        assert ranks.released == []
        ranks.leader.discard_prepared()
        ranks.leader.step()
    ranks.follower.join(BOUND_S)
    assert ranks.released == ["version 4"]


def test_weights_that_one_rank_cannot_take_are_taken_by_none() -> None:
    with replica() as ranks:
        with pytest.raises(WeightError, match=r"rank 1: WeightMismatch: missing: lm_head\.weight"):
            ranks.leader.prepare_followers("unfit")
        ranks.leader.discard_prepared()
        ranks.leader.step()  # the replica goes on
    ranks.follower.join(BOUND_S)
    assert ranks.engines[1].calls == ["step", "close"]


def test_a_lease_of_a_version_that_was_never_taken_is_given_back() -> None:
    with replica() as ranks:
        ranks.leader.prepare_followers("version 4")
        ranks.leader.discard_prepared()
        ranks.leader.prepare_followers("version 5")
        assert ranks.released == ["version 4"]


def test_a_stranger_at_the_door_keeps_no_rank_out() -> None:
    meeting = new_rendezvous(2, build_timeout_s=BOUND_S, call_timeout_s=BOUND_S)
    leaders: list[LockstepEngine] = []
    thread = threading.Thread(target=lambda: leaders.append(lead(NotingEngine, meeting)))
    thread.start()
    while True:
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(meeting.command_address)
            break
        except ConnectionRefusedError:
            continue
    follower = follow(
        NotingEngine, Rank(index=1, rendezvous=meeting), prepare=lambda *_: None, on_lost=lambda cause: None
    )
    thread.join(BOUND_S)
    leaders[0].close()
    follower.join(BOUND_S)


def test_a_rank_that_cannot_build_its_engine_tells_rank_0_why() -> None:
    meeting = new_rendezvous(2, build_timeout_s=BOUND_S, call_timeout_s=BOUND_S)
    never = threading.Event()  # rank 0 waits in the rendezvous of its engine

    def refuse() -> None:
        raise ConfigError("policy.engine.dtype='float33'")

    def start() -> None:
        with pytest.raises(ConfigError):
            follow(refuse, Rank(index=1, rendezvous=meeting), prepare=lambda *_: None, on_lost=lambda cause: None)

    thread = threading.Thread(target=start)
    thread.start()
    with pytest.raises(ConfigError, match="float33"):
        lead(lambda: never.wait(BOUND_S), meeting)
    never.set()
    thread.join(BOUND_S)


def test_a_start_without_the_other_ranks_ends_at_its_deadline() -> None:
    meeting = new_rendezvous(3, build_timeout_s=0.1, call_timeout_s=BOUND_S)
    with pytest.raises(DeadlineExceeded, match="the other 2 ranks of this replica to start"):
        lead(NotingEngine, meeting)


@pytest.mark.parametrize(
    ("engine", "swap", "ranks", "message"),
    [
        ({"tensor_parallel_size": 2}, "copy", 1, r"tensor_parallel_size=2 needs as many processes .* has 1"),
        ({}, "copy", 2, r"tensor_parallel_size=1 needs as many processes .* has 2"),
        ({"tensor_parallel_size": 2}, "zero_copy", 2, r"weights\.swap=zero_copy with .*_size=2"),
        ({"tensor_parallel_size": 0}, "copy", 1, "must be a whole number of at least 1"),
        ({"tensor_parallel_size": "2"}, "copy", 1, "must be a whole number of at least 1"),
    ],
)
def test_ranks_that_do_not_fit_the_engine_are_an_error(engine: dict, swap: str, ranks: int, message: str) -> None:
    meeting = new_rendezvous(ranks, build_timeout_s=BOUND_S, call_timeout_s=BOUND_S)
    rank = Rank(index=0, rendezvous=meeting) if ranks > 1 else None
    with pytest.raises(ConfigError, match=message):
        check_ranks(engine, swap, rank)
