"""The policy service on fake replicas and virtual time: what becomes of requests and versions when replicas fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from benchmarks.virtual_clock import run_virtual
from forgelite.errors import ConfigError, GenerationFailed, RequestRejected, StationDied, WeightError
from forgelite.policy.groups import GroupProgress, GroupResult
from forgelite.policy.replicas import ReplicaSettings
from forgelite.policy.service import PolicyService
from forgelite.types import Completion, GroupRequest, SamplingParams
from tests.unit.fake_replicas import START_S, STEP_S, Replicas

pytestmark = pytest.mark.timeout(30)


def request(name: str, *, tokens: int = 10, n: int = 1, session: str | None = None) -> GroupRequest:
    return GroupRequest(
        request_id=name, prompt_ids=(1, 2), sampling=SamplingParams(max_tokens=tokens), n=n, session=session
    )


@asynccontextmanager
async def serving(
    count: int = 2, *, max_open_requests: int | None = None, on_dead: Any = lambda error: None, **settings: Any
) -> AsyncIterator[tuple[PolicyService, Replicas]]:
    """A service whose replicas serve version 0."""
    fakes = Replicas()
    service = PolicyService(
        fakes.start,
        settings=ReplicaSettings(replicas=count, **settings),
        request_timeout_s=60.0,
        max_open_requests=max_open_requests,
        on_dead=on_dead,
    )
    await service.start()
    try:
        yield service, fakes
    finally:
        await service.close()
        assert not fakes.alive


def virtual(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Run an async test on virtual time."""

    def run() -> None:
        run_virtual(test())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def expect_whole(outcome: Sequence[Any], *, tokens: int) -> None:
    for completion in outcome:
        assert isinstance(completion, Completion)
        assert list(completion.token_ids) == list(range(tokens))


async def eventually(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(STEP_S)
    raise AssertionError("it never came true")


@virtual
async def test_groups_spread_over_the_replicas_and_the_turns_of_a_session_stay_together():
    async with serving(2) as (service, fakes):
        await asyncio.gather(*(service.generate_group(request(f"g{i}", n=4)) for i in range(6)))
        first = [len(p.submitted) for p in fakes.processes]
        for turn in range(4):
            await service.generate_group(request(f"g9/0/{turn}", session="g9"))

    assert first == [3, 3]
    assert sorted(len(p.submitted) - 3 for p in fakes.processes) == [0, 4]


@virtual
async def test_the_requests_of_a_killed_replica_go_on_elsewhere_from_the_tokens_it_had_reported():
    async with serving(2) as (service, fakes):
        work = [asyncio.create_task(service.generate_group(request(f"g{i}", tokens=100, n=2))) for i in range(4)]
        await asyncio.sleep(2.5)
        lost, other = fakes.processes
        lost.die()
        for outcome in await asyncio.gather(*work):
            expect_whole(outcome, tokens=100)

        resumed = [r for r in other.submitted if r.partials is not None]
        assert {r.request_id for r in resumed} == {r.request_id for r in lost.submitted}
        assert all(20 <= len(partial.token_ids) <= 60 for r in resumed for partial in r.partials)
        assert (service.redispatched, service.restarts) == (2, 1)


@virtual
async def test_late_news_of_a_lost_process_does_not_cost_its_successor():
    async with serving(1) as (service, fakes):
        replica = service._replicas.get("policy-0")
        lost = replica.client
        fakes.of("policy-0").die()
        await eventually(lambda: len(fakes.processes) == 2 and service.replicas_serving == 1)
        service._replicas.lose(replica, lost, "it was found dead once more")
        assert service.replicas_serving == 1
        expect_whole(await service.generate_group(request("g")), tokens=10)


@virtual
async def test_a_lost_replica_takes_the_current_version_before_it_serves_again():
    async with serving(2) as (service, fakes):
        await service.update_weights(1, "manifest")
        fakes.of("policy-0").die()
        await eventually(lambda: len(fakes.processes) == 3 and service.replicas_serving == 2)
        await asyncio.gather(*(service.generate_group(request(f"g{i}")) for i in range(4)))

        restarted = fakes.of("policy-0")
        assert restarted.submitted
        assert restarted.version_now == 1


@virtual
async def test_a_replica_that_hangs_is_noticed_by_its_heartbeat_and_its_requests_go_on():
    async with serving(2) as (service, fakes):
        work = [asyncio.create_task(service.generate_group(request(f"g{i}", tokens=60))) for i in range(2)]
        await asyncio.sleep(1.5)
        hung, began = fakes.processes[0], asyncio.get_running_loop().time()
        hung.hang()
        await eventually(lambda: service.replicas_serving == 1)
        assert asyncio.get_running_loop().time() - began <= 5.0 + 1.0 + 2 * STEP_S
        for outcome in await asyncio.gather(*work):
            expect_whole(outcome, tokens=60)

        assert hung.dead is not None  # it was killed, not left behind


@virtual
async def test_an_engine_that_has_work_and_makes_no_step_is_replaced():
    async with serving(2, hang_timeout_s=10.0) as (service, fakes):
        work = [asyncio.create_task(service.generate_group(request(f"g{i}", tokens=400))) for i in range(2)]
        await asyncio.sleep(1.0)
        fakes.processes[0].frozen = True
        await asyncio.sleep(12.0)
        assert service.restarts == 1
        for outcome in await asyncio.gather(*work):
            expect_whole(outcome, tokens=400)


@virtual
async def test_an_engine_that_breaks_is_replaced_and_its_requests_go_on():
    async with serving(2) as (service, fakes):
        work = [asyncio.create_task(service.generate_group(request(f"g{i}", tokens=50))) for i in range(4)]
        await asyncio.sleep(1.2)
        fakes.processes[0].break_engine()
        for outcome in await asyncio.gather(*work):
            expect_whole(outcome, tokens=50)
        await eventually(lambda: service.replicas_serving == 2)


@virtual
async def test_a_request_that_breaks_every_engine_fails_and_does_not_take_the_service_with_it():
    async with serving(1) as (service, fakes):
        poison = asyncio.create_task(service.generate_group(request("poison", tokens=1000)))
        for life in (1, 2, 3):
            await eventually(lambda life=life: len(fakes.processes) == life and bool(fakes.processes[-1].submitted))
            fakes.processes[-1].break_engine()
        with pytest.raises(GenerationFailed, match="poison was open on 3 replicas when they were lost"):
            await poison

        expect_whole(await service.generate_group(request("g")), tokens=10)


@virtual
async def test_with_one_replica_requests_wait_for_its_successor():
    async with serving(1) as (service, fakes):
        running = asyncio.create_task(service.generate_group(request("running", tokens=60)))
        await asyncio.sleep(1.5)
        fakes.processes[0].die()
        await asyncio.sleep(0.5)
        newcomer = asyncio.create_task(service.generate_group(request("newcomer")))

        expect_whole(await running, tokens=60)
        expect_whole(await newcomer, tokens=10)


@virtual
async def test_the_deadline_of_a_request_runs_while_it_waits_and_when_its_replica_is_lost():
    async with serving(1, max_open_requests=1) as (service, fakes):
        first = asyncio.create_task(service.generate_group(request("first", tokens=60)))  # 3 s
        late = asyncio.create_task(service.generate_group(request("late", tokens=1000), timeout_s=8.0))
        began = asyncio.get_running_loop().time()
        await first
        await asyncio.sleep(0.5)
        fakes.of("policy-0").die()
        with pytest.raises(GenerationFailed, match="request late was not finished by its deadline"):
            await late

        assert asyncio.get_running_loop().time() - began == pytest.approx(8.0, abs=0.1)
        assert service.redispatched == 1


@virtual
async def test_a_request_whose_deadline_passes_while_nothing_serves_says_so():
    async with serving(1) as (service, fakes):
        fakes.processes[0].die()
        with pytest.raises(GenerationFailed, match=r"g found no place within its 1 s .*policy-0 starting"):
            await service.generate_group(request("g", tokens=60), timeout_s=1.0)


@virtual
async def test_the_last_replica_lost_beyond_its_restarts_ends_the_service_with_the_cause():
    causes: list[StationDied] = []
    async with serving(1, max_restarts=2, on_dead=causes.append) as (service, fakes):
        waiting = asyncio.create_task(service.generate_group(request("g", tokens=60)))
        await asyncio.sleep(1.0)
        fakes.fail_starts = 2
        fakes.processes[0].die()
        with pytest.raises(StationDied, match=r"out of memory.*policy.max_restarts"):
            await waiting
        with pytest.raises(StationDied, match="policy-0 died"):
            await service.generate_group(request("newcomer"))
        with pytest.raises(StationDied, match="policy-0 died"):
            await service.update_weights(1, None)

        assert len(causes) == 1


@virtual
async def test_restarts_of_long_ago_do_not_count():
    async with serving(1, max_restarts=1, restart_window_s=100.0) as (service, fakes):
        for _ in range(3):
            fakes.processes[-1].die()
            await eventually(lambda: service.replicas_serving == 1 and fakes.processes[-1].dead is None)
            await asyncio.sleep(100.0)

        assert service.restarts == 3


@virtual
async def test_a_replica_that_cannot_take_what_the_others_took_is_restarted_and_the_version_moves():
    async with serving(3) as (service, fakes):
        fakes.of("policy-1").refuse_next_update = True
        report = await service.update_weights(4, "manifest")

        assert (report.version, await service.version(), service.replicas_serving) == (4, 4, 2)
        await eventually(lambda: service.replicas_serving == 3)
        assert {p.version_now for p in fakes.alive} == {4}


@virtual
async def test_a_version_that_nobody_can_take_raises_and_everybody_serves_the_one_before():
    async with serving(2) as (service, fakes):
        await service.update_weights(1, None)
        fakes.broken_versions.add(2)
        with pytest.raises(WeightError, match="cannot take version 2"):
            await service.update_weights(2, None)

        assert (await service.version(), service.replicas_serving, service.restarts) == (1, 2, 0)
        (completion,) = await service.generate_group(request("g"))
        assert completion.spans[-1].version == 1


@virtual
async def test_a_replica_that_dies_in_an_update_does_not_hold_up_the_others():
    async with serving(2) as (service, fakes):
        update = asyncio.create_task(service.update_weights(1, None))
        await asyncio.sleep(0.005)
        fakes.processes[0].die()
        await update

        assert (await service.version(), service.replicas_serving) == (1, 1)


@virtual
async def test_a_replica_that_hangs_in_an_update_does_not_hold_up_the_others_longer_than_its_heartbeat():
    async with serving(2) as (service, fakes):
        began = asyncio.get_running_loop().time()
        fakes.processes[0].hang()
        await service.update_weights(1, None)

        assert asyncio.get_running_loop().time() - began < 7.0
        assert await service.version() == 1


@virtual
async def test_a_restarted_replica_that_hangs_while_it_takes_the_version_holds_up_no_update():
    async with serving(2, update_timeout_s=100.0) as (service, fakes):
        await service.update_weights(1, None)
        fakes.hang_starts = 1
        fakes.of("policy-0").die()
        await eventually(lambda: len(fakes.processes) == 3)
        began = asyncio.get_running_loop().time()
        await service.update_weights(2, None)

        assert asyncio.get_running_loop().time() - began < 7.0
        await eventually(lambda: service.replicas_serving == 2)
        assert {p.version_now for p in fakes.alive} == {2}
        assert service.restarts == 2


@virtual
async def test_an_update_that_finds_no_replica_is_taken_by_the_next_one_to_start():
    async with serving(1) as (service, fakes):
        fakes.processes[0].die()
        await asyncio.sleep(1.1)
        assert service.replicas_serving == 0
        report = await service.update_weights(7, "manifest")

        assert (report.version, await service.version()) == (7, 7)
        (completion,) = await service.generate_group(request("g"))
        assert completion.spans[-1].version == 7


@virtual
async def test_a_bad_version_that_finds_no_replica_raises_and_the_next_one_serves_the_version_before():
    async with serving(1) as (service, fakes):
        await service.update_weights(6, None)
        fakes.broken_versions.add(7)
        fakes.processes[0].die()
        await asyncio.sleep(1.1)
        with pytest.raises(WeightError, match="cannot take version 7"):
            await service.update_weights(7, None)

        await eventually(lambda: service.replicas_serving == 1)
        assert (await service.version(), fakes.processes[-1].version_now) == (6, 6)


@virtual
async def test_a_replica_that_returns_during_an_update_does_not_serve_what_the_others_leave_behind():
    async with serving(2) as (service, fakes):
        await service.update_weights(1, None)
        fakes.update_s = 1.0
        fakes.of("policy-0").die()
        await eventually(lambda: len(fakes.processes) == 3)  # it is taking version 1
        await service.update_weights(2, None)
        assert await service.version() == 2
        assert service.replicas_serving == 2
        assert fakes.of("policy-0").version_now == fakes.of("policy-1").version_now == 2


@virtual
async def test_two_updates_without_a_replica_are_taken_one_after_the_other():
    async with serving(1) as (service, fakes):
        fakes.of("policy-0").die()
        await eventually(lambda: service.replicas_serving == 0)
        reports = await asyncio.gather(service.update_weights(1, None), service.update_weights(2, None))
        assert [report.version for report in reports] == [1, 2]
        assert await service.version() == fakes.of("policy-0").version_now == 2


@virtual
async def test_an_update_that_a_replica_is_taking_at_its_deadline_is_waited_for():
    async with serving(1, update_timeout_s=1.0) as (service, fakes):
        fakes.update_s = 0.8
        fakes.of("policy-0").die()
        await eventually(lambda: service.replicas_serving == 0)
        await asyncio.sleep(START_S - 0.5)
        assert (await service.update_weights(1, None)).version == 1  # taken from 0.5 s to 1.3 s after it began
        assert await service.version() == fakes.of("policy-0").version_now == 1


@virtual
async def test_an_update_without_a_replica_ends_at_its_deadline():
    async with serving(1, update_timeout_s=1.0) as (service, fakes):
        fakes.processes[0].die()
        await asyncio.sleep(1.1)
        fakes.fail_starts = 1
        with pytest.raises(WeightError, match=r"no replica could take version 1 within 1 s.*policy-0 starting"):
            await service.update_weights(1, None)
        await eventually(lambda: service.replicas_serving == 1)

        assert await service.version() == fakes.processes[-1].version_now == 0


@virtual
async def test_more_requests_than_the_replicas_may_hold_wait_in_their_order():
    async with serving(2, max_open_requests=1) as (service, fakes):
        order: list[int] = []

        async def ask(index: int) -> None:
            await service.generate_group(request(f"g{index}"))
            order.append(index)

        await asyncio.gather(*(ask(i) for i in range(8)))
        assert order == sorted(order)
        assert max(len(p.submitted) for p in fakes.processes) == 4


@virtual
async def test_a_request_that_lost_its_replica_is_the_next_to_be_placed():
    async with serving(2, max_open_requests=1) as (service, fakes):
        work = [asyncio.create_task(service.generate_group(request(f"g{i}", tokens=60))) for i in range(6)]
        await asyncio.sleep(1.5)
        fakes.of("policy-0").die()
        await asyncio.gather(*work)

        (lost,) = fakes.processes[0].submitted
        assert fakes.of("policy-1").submitted[1].request_id == lost.request_id


@virtual
async def test_a_request_does_not_go_on_with_an_older_version_than_it_has_tokens_of():
    async with serving(2) as (service, fakes):
        ahead, behind = fakes.processes
        behind.update_s = 3.0
        work = [asyncio.create_task(service.generate_group(request(f"g{i}", tokens=80))) for i in range(2)]
        update = asyncio.create_task(service.update_weights(1, None))
        await asyncio.sleep(2.2)
        ahead.die()
        (completion,), _ = await asyncio.gather(*work)
        await update

        (resumed,) = (r for r in behind.submitted if r.partials is not None)
        assert resumed.partials[0].spans[-1].version == 1
        assert [span.version for span in completion.spans] == [0, 1] or completion.spans[0].version == 1


@virtual
async def test_a_cancelled_caller_gives_its_place_back_wherever_it_was():
    async with serving(1, max_open_requests=1) as (service, fakes):
        placed = asyncio.create_task(service.generate_group(request("placed", tokens=1000)))
        waiting = asyncio.create_task(service.generate_group(request("waiting")))
        just_placed = asyncio.create_task(service.generate_group(request("next")))
        await asyncio.sleep(0.5)
        waiting.cancel()
        placed.cancel()
        expect_whole(await just_placed, tokens=10)

        assert fakes.processes[0].aborted == ["placed"]
        assert [r.request_id for r in fakes.processes[0].submitted] == ["placed", "next"]


@virtual
async def test_an_aborted_request_gives_the_tokens_so_far_also_while_it_waits():
    async with serving(1, max_open_requests=1) as (service, _):
        running = asyncio.create_task(service.generate_group(request("running", tokens=1000, n=2)))
        waiting = asyncio.create_task(service.generate_group(request("waiting", n=2)))
        await asyncio.sleep(1.0)
        await service.abort("waiting")
        await service.abort("running")
        await service.abort("unknown")

        for outcome, least in ((await running, 10), (await waiting, 0)):
            assert [c.finish_reason for c in outcome] == ["abort", "abort"]
            assert all(len(c.token_ids) >= least for c in outcome)


@virtual
async def test_an_abort_right_after_its_request_still_ends_it():
    async with serving(1) as (service, _):
        for ticks in range(8):  # it is in the line, placed, on its way, or accepted
            work = asyncio.create_task(service.generate_group(request(f"g{ticks}", tokens=100_000)))
            for _ in range(ticks + 1):
                await asyncio.sleep(0)
            await service.abort(f"g{ticks}")
            (completion,) = await work
            assert completion.finish_reason == "abort"


@virtual
async def test_an_abort_that_meets_a_dying_replica_ends_the_request_with_what_was_reported():
    async with serving(2) as (service, fakes):
        work = asyncio.create_task(service.generate_group(request("g", tokens=1000)))
        await asyncio.sleep(2.5)
        replica = next(p for p in fakes.processes if p.submitted)
        replica.hang()
        asyncio.get_running_loop().call_later(0.5, replica.die)
        await service.abort("g")
        (completion,) = await work

        assert completion.finish_reason == "abort"
        assert len(completion.token_ids) >= 20
        assert service.redispatched == 0


@virtual
async def test_cancelling_a_group_ends_its_first_turn_and_all_later_ones_and_nobody_else():
    async with serving(2) as (service, _):
        names = ["g1", "g1/0/1", "g1/3/2", "g10", "g10/0/1"]
        work = {name: asyncio.create_task(service.generate_group(request(name, tokens=40))) for name in names}
        await asyncio.sleep(0.5)
        assert await service.cancel("g1") == 3

        ends = {name: (await task)[0].finish_reason for name, task in work.items()}
        assert ends == {"g1": "abort", "g1/0/1": "abort", "g1/3/2": "abort", "g10": "length", "g10/0/1": "length"}


@virtual
async def test_an_id_that_is_open_already_is_rejected():
    async with serving(1) as (service, _):
        first = asyncio.create_task(service.generate_group(request("same")))
        await asyncio.sleep(0)
        with pytest.raises(RequestRejected, match="open already"):
            await service.generate_group(request("same"))
        expect_whole(await first, tokens=10)


@virtual
async def test_a_stream_gives_every_token_once_and_its_result_last_also_when_its_replica_dies():
    async with serving(2) as (service, fakes):
        tokens: list[int] = []
        async for item in service.stream(request("g", tokens=40)):
            if isinstance(item, GroupProgress):
                (member,) = item.members
                assert member.start == len(tokens)
                tokens += member.token_ids
                if len(tokens) == 15:
                    next(p for p in fakes.processes if p.submitted).die()

        assert tokens == list(range(40))
        assert isinstance(item, GroupResult)
        expect_whole(item.outcome, tokens=40)


@virtual
async def test_closing_a_stream_ends_its_request_in_the_engine():
    async with serving(1) as (service, fakes):
        async with aclosing(service.stream(request("g", tokens=1000))) as stream:
            async for _ in stream:
                break
        await eventually(lambda: fakes.processes[0].aborted == ["g"])


@virtual
async def test_a_request_for_a_version_to_come_waits_for_it_and_holds_up_nobody():
    async with serving(1) as (service, _):
        waits = asyncio.create_task(service.generate_group(request("waits"), min_version=2))
        expect_whole(await service.generate_group(request("any")), tokens=10)
        await service.update_weights(1, None)
        await asyncio.sleep(1.0)
        assert not waits.done()
        await service.update_weights(2, None)

        (completion,) = await waits
        assert completion.spans[0].version == 2


@virtual
async def test_a_replica_that_is_added_holds_the_current_version_and_takes_requests():
    async with serving(1) as (service, fakes):
        await service.update_weights(5, None)
        name = await service.add_replica()
        await asyncio.gather(*(service.generate_group(request(f"g{i}")) for i in range(4)))

        assert (name, service.replicas_serving) == ("policy-1", 2)
        assert fakes.of(name).version_now == 5
        assert len(fakes.of(name).submitted) == 2


@virtual
async def test_a_replica_that_is_removed_finishes_its_requests_and_hands_the_long_ones_on():
    async with serving(2) as (service, fakes):
        short = [asyncio.create_task(service.generate_group(request(f"s{i}", tokens=20))) for i in range(2)]
        long = [asyncio.create_task(service.generate_group(request(f"l{i}", tokens=200))) for i in range(2)]
        await asyncio.sleep(0.2)
        await service.remove_replica("policy-0", timeout_s=3.0)

        assert fakes.of("policy-0").dead is not None
        for tokens, work in ((20, short), (200, long)):
            for outcome in await asyncio.gather(*work):
                expect_whole(outcome, tokens=tokens)
        assert (service.replicas_serving, service.redispatched, service.restarts) == (1, 1, 0)
        assert any(r.partials is not None for r in fakes.of("policy-1").submitted)


@pytest.mark.parametrize("leaver_dies", [False, True])
def test_a_service_whose_last_replica_leaves_is_dead_and_says_so(leaver_dies: bool):
    causes: list[StationDied] = []

    async def lose_the_one_that_stays() -> None:
        async with serving(2, on_dead=causes.append, max_restarts=0) as (service, fakes):
            work = asyncio.create_task(service.generate_group(request("long", tokens=500)))
            await asyncio.sleep(0.2)
            leaving = asyncio.create_task(service.remove_replica("policy-0", timeout_s=3.0))
            await asyncio.sleep(0.1)
            fakes.of("policy-1").die()
            if leaver_dies:
                await asyncio.sleep(2.0)
                fakes.of("policy-0").die()
            await leaving
            with pytest.raises(StationDied, match="the last replica of the policy is lost"):
                await work
            with pytest.raises(StationDied):
                await service.generate_group(request("late"))

    run_virtual(lose_the_one_that_stays())
    assert len(causes) == 1


@virtual
async def test_a_replica_that_is_being_added_when_the_service_ends_does_not_outlive_it():
    async with serving(1) as (service, fakes):
        adding = asyncio.create_task(service.add_replica())
        await asyncio.sleep(START_S / 2)
        await service.close()
        with pytest.raises(StationDied, match="the policy service was closed"):
            await adding
        assert not fakes.alive


@virtual
async def test_the_only_replica_and_unknown_ones_are_not_removed():
    async with serving(1) as (service, _):
        with pytest.raises(ConfigError, match="policy-0 is the only replica"):
            await service.remove_replica("policy-0")
        with pytest.raises(ConfigError, match=r"no serving replica 'policy-7'.*policy-0 serving"):
            await service.remove_replica("policy-7")


@virtual
async def test_the_counters_of_lost_replicas_are_kept():
    async with serving(2) as (service, fakes):
        await asyncio.gather(*(service.generate_group(request(f"g{i}", tokens=40)) for i in range(4)))
        before = await service.stats()
        fakes.processes[0].die()
        await asyncio.sleep(START_S + 2.0)
        after = await service.stats()

        assert before.generated_tokens == after.generated_tokens == 160
        assert before.busy_s == pytest.approx(40 * STEP_S)  # of each replica
        assert after.busy_s >= before.busy_s > 0


@virtual
async def test_a_closed_service_leaves_nobody_waiting():
    async with serving(1, max_open_requests=1) as (service, _):
        work = [asyncio.create_task(service.generate_group(request(f"g{i}", tokens=1000))) for i in range(3)]
        await asyncio.sleep(0.5)
        await service.close()
        for outcome in await asyncio.gather(*work, return_exceptions=True):
            assert isinstance(outcome, StationDied)


@virtual
async def test_a_replica_that_cannot_be_started_at_all_is_an_error_of_the_start():
    for count in (1, 2):
        causes: list[StationDied] = []
        fakes = Replicas(fail_starts=1)
        service = PolicyService(fakes.start, settings=ReplicaSettings(replicas=count), on_dead=causes.append)
        with pytest.raises(StationDied, match=r"^station policy-0 died: out of memory$"):
            await service.start()
        await service.close()
        assert not fakes.alive
        assert not causes
