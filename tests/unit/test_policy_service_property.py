"""The policy service under random schedules of deaths, hangs, updates, aborts and cancellations."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.virtual_clock import run_virtual
from forgelite.errors import GenerationFailed, WeightError
from forgelite.policy.replicas import ReplicaSettings
from forgelite.policy.service import PolicyService
from forgelite.types import Completion, GroupRequest, SamplingParams
from tests.unit.fake_replicas import FakeProcess, Replicas

pytestmark = pytest.mark.timeout(120)


@dataclass(kw_only=True, slots=True, frozen=True)
class Asked:
    """A request, when it comes, and what its caller does to it."""

    at: float
    tokens: int
    n: int
    timeout_s: float
    aborted_at: float | None
    cancelled_at: float | None


@dataclass(kw_only=True, slots=True, frozen=True)
class Event:
    """What happens to the replicas."""

    at: float
    what: str
    index: int


TIMES = st.integers(0, 240).map(lambda tick: tick * 0.05)
ASKED = st.builds(
    Asked,
    at=TIMES,
    tokens=st.integers(1, 60),
    n=st.integers(1, 3),
    timeout_s=st.sampled_from([0.2, 3.0, 200.0]),
    aborted_at=st.none() | TIMES,
    cancelled_at=st.none() | TIMES,
)
EVENT = st.builds(
    Event,
    at=TIMES,
    what=st.sampled_from(
        ["die", "hang", "freeze", "break", "fail_start", "slow_update", "update", "bad_update", "refused_update"]
    ),
    index=st.integers(0, 2),
)


class Checked(Replicas):
    """Replicas that compare, at every request, the weights they hold with what the service says it serves."""

    service: PolicyService

    async def start(self, name: str) -> FakeProcess:
        process = await super().start(name)
        submit = process.submit

        async def checked(requests: list[GroupRequest]) -> object:
            assert process.version_now >= self.service._replicas.version, "the version ran ahead of the weights"
            for request in requests:
                for partial in request.partials or ():
                    newest = partial.spans[-1].version if partial.spans else 0
                    assert newest <= process.version_now, "an older version would go on from tokens of a newer one"
            return await submit(requests)

        process.submit = checked
        return process


@given(
    replicas=st.integers(1, 3),
    max_open_requests=st.none() | st.integers(1, 2),
    asked=st.lists(ASKED, min_size=1, max_size=8),
    events=st.lists(EVENT, max_size=8),
)
@settings(max_examples=150)
def test_whatever_happens_every_request_ends_once_with_its_own_tokens_and_every_place_comes_back(
    replicas: int, max_open_requests: int | None, asked: list[Asked], events: list[Event]
):
    run_virtual(_scenario(replicas, max_open_requests, asked, events))


async def _scenario(replicas: int, max_open_requests: int | None, asked: list[Asked], events: list[Event]) -> None:
    fakes = Checked()
    service = PolicyService(
        fakes.start,
        settings=ReplicaSettings(
            replicas=replicas, max_restarts=100, update_timeout_s=30.0, hang_timeout_s=3.0, heartbeat_timeout_s=2.0
        ),
        max_open_requests=max_open_requests,
    )
    fakes.service = service
    await service.start()
    versions = iter(range(1, 100))
    updates = [asyncio.create_task(_happen(event, service, fakes, versions)) for event in events]
    outcomes = await asyncio.gather(*(_ask(f"g{i}", each, service) for i, each in enumerate(asked)))
    await asyncio.gather(*updates)

    for each, outcome in zip(asked, outcomes, strict=True):
        _check_outcome(each, outcome, newest=await service.version())
    # Every place has come back: the service can be filled to its brim again.
    brim = replicas * (max_open_requests or 4)
    probes = [_request(f"probe{i}", tokens=3, n=1) for i in range(brim)]
    for (completion,) in await asyncio.gather(*(service.generate_group(p, timeout_s=60.0) for p in probes)):
        assert list(completion.token_ids) == [0, 1, 2]
    assert not service._open
    assert not service._line
    assert all(not replica.open and replica.open_members == 0 for replica in service._replicas.serving())
    await service.close()
    assert not fakes.alive


def _request(name: str, *, tokens: int, n: int) -> GroupRequest:
    return GroupRequest(request_id=name, prompt_ids=(1,), sampling=SamplingParams(max_tokens=tokens), n=n, session=name)


async def _ask(name: str, asked: Asked, service: PolicyService) -> list[Completion] | type[BaseException]:
    await asyncio.sleep(asked.at)
    loop = asyncio.get_running_loop()
    request = _request(name, tokens=asked.tokens, n=asked.n)
    work = asyncio.create_task(service.generate_group(request, timeout_s=asked.timeout_s))
    aborts: list[asyncio.Task[None]] = []
    if asked.aborted_at is not None:
        loop.call_later(asked.aborted_at, lambda: aborts.append(asyncio.create_task(service.abort(name))))
    if asked.cancelled_at is not None:
        loop.call_later(asked.cancelled_at, work.cancel)
    began = loop.time()
    try:
        return await work
    except (GenerationFailed, asyncio.CancelledError) as error:
        return type(error)
    finally:
        assert loop.time() - began <= asked.timeout_s + 1.0, "it outlived its deadline"


def _check_outcome(asked: Asked, outcome: list[Completion] | type[BaseException], *, newest: int) -> None:
    if not isinstance(outcome, list):
        assert outcome is GenerationFailed or asked.cancelled_at is not None
        return
    assert len(outcome) == asked.n
    for completion in outcome:
        count = len(completion.token_ids)
        assert list(completion.token_ids) == list(range(count)), "a token is missing or came twice"
        assert completion.spans[-1].version <= newest if completion.spans else count == 0
        if completion.finish_reason == "abort":
            assert asked.aborted_at is not None
        else:
            assert count == asked.tokens


async def _happen(event: Event, service: PolicyService, fakes: Checked, versions: object) -> None:
    await asyncio.sleep(event.at)
    process = fakes.processes[-1 - event.index % len(fakes.processes)]
    if event.what == "die":
        process.die()
    elif event.what == "hang":
        process.hang()
    elif event.what == "freeze":
        process.frozen = True
    elif event.what == "break":
        process.break_engine()
    elif event.what == "fail_start":
        fakes.fail_starts += 1
    elif event.what == "slow_update":
        process.update_s = 1.5
    else:
        version = next(versions)
        process.refuse_next_update = event.what == "refused_update"
        if event.what == "bad_update":
            fakes.broken_versions.add(version)
        before = await service.version()
        try:
            await service.update_weights(version, None)
        except WeightError:
            assert await service.version() != version, "a version that was refused is served"
        else:
            assert await service.version() >= version > before
