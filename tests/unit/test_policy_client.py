"""The policy client against a policy of three lines: coalescing, deadlines, cancellation, death."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from forgelite.errors import GenerationFailed, RequestRejected, StationDied, WeightMismatch
from forgelite.policy.admission import REJECTED
from forgelite.policy.client import PolicyClient
from forgelite.policy.engine_protocol import EngineStats, UpdateReport
from forgelite.policy.groups import GroupResult
from forgelite.types import Completion, Failure, GroupRequest, SamplingParams, VersionSpan

pytestmark = pytest.mark.timeout(20)

STATS = EngineStats(version=4, alive_s=1.0, busy_s=0.5, steps=3, generated_tokens=8, running=0, waiting=0)
SAMPLING = SamplingParams(max_tokens=2)


def request(name: str, n: int = 1) -> GroupRequest:
    return GroupRequest(request_id=name, prompt_ids=(1, 2), sampling=SAMPLING, n=n)


def completions(of: GroupRequest) -> list[Completion]:
    return [
        Completion(
            request_id=f"{of.request_id}/{index}",
            prompt_ids=of.prompt_ids,
            token_ids=[7, 8],
            logprobs=[-0.1, -0.2],
            spans=[VersionSpan(version=4, start=0, end=2)],
            finish_reason="length",
        )
        for index in range(of.n)
    ]


class FakePolicy:
    """Finishes every request at once, unless told to hold them. Records what it was asked."""

    def __init__(self, *, holds: bool = False) -> None:
        self.holds = holds
        self.submitted: list[list[str]] = []
        self.submits: asyncio.Queue[list[str]] = asyncio.Queue()  # the same, for a test to wait for
        self.aborts: asyncio.Queue[str] = asyncio.Queue()
        self.begun_polls: asyncio.Queue[float] = asyncio.Queue()
        self.polls = self.most_polls = 0
        self.refusals: dict[str, Failure] = {}
        self.failure: Exception | None = None
        self._finished: asyncio.Queue[list[GroupResult]] = asyncio.Queue()

    async def submit(self, requests: list[GroupRequest]) -> list[Failure | None]:
        self.submitted.append([each.request_id for each in requests])
        self.submits.put_nowait(self.submitted[-1])
        if not self.holds:
            self.finish(*requests)
        return [self.refusals.get(each.request_id) for each in requests]

    def finish(self, *requests: GroupRequest) -> None:
        self._finished.put_nowait(
            [
                GroupResult(request_id=each.request_id, outcome=completions(each))
                for each in requests
                if each.request_id not in self.refusals
            ]
        )

    def fail(self, name: str, failure: Failure) -> None:
        self._finished.put_nowait([GroupResult(request_id=name, outcome=failure)])

    def die(self, error: Exception) -> None:
        self.failure = error
        self._finished.put_nowait([])

    async def collect(self, timeout_s: float) -> list[GroupResult]:
        self.polls += 1
        self.begun_polls.put_nowait(timeout_s)
        self.most_polls = max(self.most_polls, self.polls)
        try:
            results = await asyncio.wait_for(self._finished.get(), timeout_s)
        except TimeoutError:
            results = []
        finally:
            self.polls -= 1
        if self.failure is not None:
            raise self.failure
        return results

    async def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.aborts.put_nowait(request_id)

    async def update_weights(
        self, version: int, manifest: Any, mode: str, keep_kv: bool, drain_timeout_s: float
    ) -> UpdateReport:
        if version == 13:
            raise WeightMismatch("missing: w")
        if version == 99:
            await asyncio.Event().wait()
        return UpdateReport(version=version, queued_s=0.0, paused_s=0.0, recomputed=0)

    async def version(self) -> int:
        return 4

    async def stats(self) -> EngineStats:
        return STATS


async def test_requests_of_one_tick_share_one_submit_and_one_poll() -> None:
    policy = FakePolicy()
    client = PolicyClient(policy)
    groups = await asyncio.gather(*(client.generate_group(request(f"g{i}", n=3)) for i in range(16)))

    assert policy.submitted == [[f"g{i}" for i in range(16)]]
    assert policy.most_polls == 1
    assert [group[2].request_id for group in groups] == [f"g{i}/2" for i in range(16)]
    await client.close()


async def test_requests_of_later_ticks_ride_on_the_same_poll() -> None:
    policy = FakePolicy(holds=True)
    client = PolicyClient(policy)
    waiting = []
    for i in range(5):
        waiting.append(asyncio.create_task(client.generate_group(request(f"g{i}"))))
        assert await policy.submits.get() == [f"g{i}"]
    policy.finish(*(request(f"g{i}") for i in range(5)))
    await asyncio.gather(*waiting)

    assert policy.most_polls == 1
    await client.close()


async def test_a_single_completion_is_a_group_of_one() -> None:
    client = PolicyClient(FakePolicy())
    completion = await client.generate([1, 2], SAMPLING, "turn 1", session="rollout 5")

    assert completion.request_id == "turn 1/0"
    assert completion.token_ids == [7, 8]
    await client.close()


async def test_a_request_past_its_deadline_fails_by_name_and_is_aborted_in_the_engine() -> None:
    policy = FakePolicy(holds=True)
    client = PolicyClient(policy)
    with pytest.raises(GenerationFailed, match=r"request slow was not finished by its deadline .*, 0\.05 s after"):
        await client.generate_group(request("slow"), timeout_s=0.05)

    assert await policy.aborts.get() == "slow"
    await client.close()


async def test_the_late_result_of_a_request_past_its_deadline_disturbs_nobody() -> None:
    policy = FakePolicy(holds=True)
    client = PolicyClient(policy)
    with pytest.raises(GenerationFailed):
        await client.generate_group(request("slow"), timeout_s=0.05)
    other = asyncio.create_task(client.generate_group(request("other")))
    while await policy.submits.get() != ["other"]:
        pass
    policy.finish(request("slow"), request("other"))

    assert (await other)[0].request_id == "other/0"
    await client.close()


async def test_a_cancelled_caller_aborts_its_request_in_the_engine() -> None:
    policy = FakePolicy(holds=True)
    client = PolicyClient(policy)
    caller = asyncio.create_task(client.generate_group(request("unwanted")))
    await policy.submits.get()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller

    assert await policy.aborts.get() == "unwanted"
    await client.close()


async def test_a_refused_request_is_rejected_and_the_others_are_sampled() -> None:
    policy = FakePolicy()
    policy.refusals["bad"] = Failure(reason=REJECTED, message="request bad: the prompt is empty")
    client = PolicyClient(policy)
    bad, good = await asyncio.gather(
        client.generate_group(request("bad")),
        client.generate_group(request("good")),
        return_exceptions=True,
    )

    assert isinstance(bad, RequestRejected)
    assert "the prompt is empty" in str(bad)
    assert good[0].request_id == "good/0"
    await client.close()


async def test_an_id_that_is_waiting_already_is_rejected() -> None:
    policy = FakePolicy(holds=True)
    client = PolicyClient(policy)
    first = asyncio.create_task(client.generate_group(request("same")))
    await policy.submits.get()
    with pytest.raises(RequestRejected, match="waiting already"):
        await client.generate_group(request("same"))
    policy.finish(request("same"))

    assert len(await first) == 1
    await client.close()


async def test_a_failed_sample_names_its_reason() -> None:
    policy = FakePolicy(holds=True)
    client = PolicyClient(policy)
    waiting = asyncio.create_task(client.generate_group(request("g")))
    await policy.submits.get()
    policy.fail("g", Failure(reason="not_finite", message="request g/0: the logprob is nan"))

    with pytest.raises(GenerationFailed, match="not_finite: request g/0"):
        await waiting
    await client.close()


@pytest.mark.parametrize(
    "error",
    [StationDied("station policy died: Killed(sig=9)"), RuntimeError("Killed(sig=9) of some other kind")],
)
async def test_a_death_releases_everybody_at_once_and_refuses_newcomers(error: Exception) -> None:
    policy = FakePolicy(holds=True)
    client = PolicyClient(policy)
    waiting = [asyncio.create_task(client.generate_group(request(f"g{i}"))) for i in range(4)]
    await policy.submits.get()
    policy.die(error)

    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(outcome, StationDied)
        assert "Killed(sig=9)" in str(outcome)
    with pytest.raises(StationDied, match="Killed"):
        await client.generate_group(request("newcomer"))
    await client.close()


async def test_a_policy_that_does_not_answer_a_poll_is_dead() -> None:
    policy = FakePolicy(holds=True)
    policy.collect = lambda timeout_s: asyncio.Event().wait()
    client = PolicyClient(policy, poll_s=0.02, answer_s=0.03)

    with pytest.raises(StationDied, match=r"0.05 s for the policy's poll"):
        await client.generate_group(request("g"))
    await client.close()


async def test_a_process_that_was_stopped_itself_does_not_take_the_policy_for_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("forgelite.policy.client._HELD_UP_S", 0.1)

    class SlowPolicy(FakePolicy):
        async def version(self) -> int:
            for _ in range(2):
                await asyncio.sleep(0.01)
            return 4

    asking = asyncio.create_task(PolicyClient(SlowPolicy(), answer_s=0.1).version())
    await asyncio.sleep(0)
    time.sleep(0.3)  # noqa: ASYNC251 - what SIGSTOP, or a long computation, does to the event loop
    assert await asking == 4


async def test_an_empty_poll_is_followed_by_the_next() -> None:
    policy = FakePolicy(holds=True)
    client = PolicyClient(policy, poll_s=0.01)
    waiting = asyncio.create_task(client.generate_group(request("g")))
    for _ in range(2):  # the second begins when the first has come back empty
        await policy.begun_polls.get()
    policy.finish(request("g"))

    assert len(await waiting) == 1
    await client.close()


async def test_weights_that_do_not_fit_raise_and_the_policy_goes_on() -> None:
    client = PolicyClient(FakePolicy())
    with pytest.raises(WeightMismatch, match="missing: w"):
        await client.update_weights(13, None)

    assert (await client.update_weights(5, None)).version == 5
    assert len(await client.generate_group(request("g"))) == 1
    await client.close()


async def test_an_update_that_is_not_acknowledged_in_time_takes_the_policy_out() -> None:
    client = PolicyClient(FakePolicy(), update_timeout_s=0.05)
    with pytest.raises(StationDied, match="the policy to take version 99"):
        await client.update_weights(99, None)
    with pytest.raises(StationDied, match="version 99"):
        await client.generate_group(request("g"))
    await client.close()


async def test_a_closed_client_leaves_nobody_waiting_and_no_task_behind() -> None:
    policy = FakePolicy(holds=True)
    client = PolicyClient(policy)
    waiting = asyncio.create_task(client.generate_group(request("g")))
    await policy.submits.get()
    await client.close()

    with pytest.raises(StationDied, match="was closed"):
        await waiting
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left or not (await asyncio.wait(left, timeout=1.0))[1]
    assert policy.polls == 0
