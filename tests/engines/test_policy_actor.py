"""The policy as a run has it: a Monarch actor with a real engine in a process of its own, and its client."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

import forgelite
from forgelite.errors import RequestRejected, StationDied, WeightError
from forgelite.mesh.environment import root_environment, station_environment
from forgelite.policy.client import PolicyClient
from forgelite.policy.environment import policy_environment
from forgelite.policy.groups import GroupProgress
from forgelite.types import GroupRequest, SamplingParams
from forgelite.weights import WeightStore
from tests.engines.policy_process import (
    ENGINE,
    TOLERANCE,
    VOCABULARY,
    furthest,
    group,
    read_checkpoint,
    reference_logprobs,
    save_checkpoint,
)
from tests.unit.weights_memory import MemoryDirectory

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

SLOT_FREE_S = 5.0  # far more than a policy needs to give a lease back
MARK = "FORGELITE_TEST_POLICY"  # in the environment of the policy process, to find it by


@dataclass(kw_only=True, slots=True, frozen=True)
class Running:
    """A policy station with its client, and a store whose versions it reads."""

    station: Any  # mesh.processes.Station
    client: PolicyClient
    store: WeightStore
    checkpoints: Path

    def process(self) -> psutil.Process:
        """The process of the policy."""
        marked = [
            child
            for child in psutil.Process().children(recursive=True)
            if child.environ().get(MARK) == str(os.getpid())
        ]
        (found,) = (child for child in marked if child.parent() not in marked)  # it has helpers of its own
        return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def policy(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    os.environ.update(root_environment(os.environ))
    from forgelite.mesh.fleet import Fleet  # imports Monarch, which reads the environment
    from forgelite.policy.actor import ActorCalls, PolicyActor

    checkpoints = tmp_path_factory.mktemp("checkpoints")
    for index in (1, 2):
        save_checkpoint(checkpoints / str(index), "qwen3_tied", seed=index)
    run_id = f"policy-actor-{os.getpid()}"
    environment = station_environment(
        **policy_environment("cpu"),
        **{MARK: str(os.getpid()), "PYTHONPATH": str(Path(forgelite.__file__).parents[1])},
    )
    async with Fleet(stop_timeout_s=15.0) as fleet:
        station = fleet.spawn("policy", PolicyActor, environment=environment, expendable=True)
        open_reader = partial(WeightStore, directory=MemoryDirectory(), run_id=run_id)
        setup = station.actor.setup.call_one(str(checkpoints / "1"), ENGINE, 0, 0, open_reader, "zero_copy")
        capabilities = await station.call(setup, 120.0, "setup")
        assert capabilities["vocab_size"] == VOCABULARY
        assert (capabilities["dtype"], capabilities["attention_backend"]) == ("float32", "CPU_ATTN")
        client = PolicyClient(ActorCalls(station.actor, station.answer))
        store = WeightStore(
            directory=MemoryDirectory(), run_id=run_id, retain=1, served_in_place=1, timeout_s=SLOT_FREE_S
        )
        yield Running(station=station, client=client, store=store, checkpoints=checkpoints)
        await client.close()
        store.close()


async def test_groups_asked_for_together_come_back_whole(policy: Running) -> None:
    requests = [group(f"g{index}", n=4, prompt=[index, 5, 6], max_tokens=6) for index in range(8)]
    groups = await asyncio.gather(*(policy.client.generate_group(request) for request in requests))

    for request, completions in zip(requests, groups, strict=True):
        assert [c.request_id for c in completions] == [f"{request.request_id}/{i}" for i in range(4)]
        assert all(tuple(c.prompt_ids) == request.prompt_ids and len(c.token_ids) == 6 for c in completions)
    assert (await policy.client.stats()).generated_tokens >= 8 * 4 * 6


async def test_a_wrong_request_is_rejected_across_the_process_border(policy: Running) -> None:
    with pytest.raises(RequestRejected, match="outside the vocabulary"):
        await policy.client.generate([VOCABULARY], SamplingParams(max_tokens=2), "wrong")


async def test_a_published_version_is_read_served_and_stamped(policy: Running) -> None:
    manifest = await policy.store.publish(3, read_checkpoint(policy.checkpoints / "2"))
    report = await policy.client.update_weights(3, manifest)
    completion = await policy.client.generate([4, 5], SamplingParams(max_tokens=16), "updated")

    assert report.version == await policy.client.version() == 3
    assert [span.version for span in completion.spans] == [3]
    expected = reference_logprobs(policy.checkpoints / "2", completion)
    assert furthest(completion.logprobs, expected) < TOLERANCE


async def test_a_version_stays_whole_for_as_long_as_it_is_served_in_place(policy: Running) -> None:
    served = await policy.client.version()
    for version in range(served + 1, served + 6):  # far more than the segment has slots
        await policy.store.publish(version, read_checkpoint(policy.checkpoints / "1"))

    completion = await policy.client.generate([4, 5], SamplingParams(max_tokens=16), "still served")
    assert [span.version for span in completion.spans] == [served]
    expected = reference_logprobs(policy.checkpoints / "2", completion)
    assert furthest(completion.logprobs, expected) < TOLERANCE


async def test_an_update_that_is_asked_for_again_keeps_the_version_and_its_lease(policy: Running) -> None:
    version = await policy.client.version() + 10
    manifest = await policy.store.publish(version, read_checkpoint(policy.checkpoints / "2"))
    await policy.client.update_weights(version, manifest)
    report = await policy.client.update_weights(version, manifest)
    for later in range(version + 1, version + 6):
        await policy.store.publish(later, read_checkpoint(policy.checkpoints / "1"))

    assert (report.version, report.paused_s) == (version, 0.0)
    completion = await policy.client.generate([4, 5], SamplingParams(max_tokens=16), "asked twice")
    expected = reference_logprobs(policy.checkpoints / "2", completion)
    assert furthest(completion.logprobs, expected) < TOLERANCE


async def test_reports_and_partials_cross_the_process_border(policy: Running) -> None:
    whole = await policy.client.generate([4, 5], SamplingParams(max_tokens=12, temperature=0.0), "whole")
    saved = dataclasses.replace(
        whole,
        token_ids=whole.token_ids[:5],
        logprobs=whole.logprobs[:5],
        spans=[dataclasses.replace(whole.spans[0], end=5)],
        finish_reason="abort",
    )
    sampling = SamplingParams(max_tokens=12, temperature=0.0)
    request = GroupRequest(
        request_id="resumed", prompt_ids=(4, 5), sampling=sampling, partials=(saved,), progress_s=0.0
    )
    reports: list[GroupProgress] = []
    (resumed,) = await policy.client.generate_group(request, on_progress=reports.append)

    assert resumed.token_ids == whole.token_ids
    assert [token for report in reports for token in report.members[0].token_ids] == whole.token_ids[5:]


async def test_a_version_that_was_replaced_gives_its_slot_back(policy: Running) -> None:
    before = await policy.client.version()
    for version in range(before + 6, before + 12):
        manifest = await policy.store.publish(version, read_checkpoint(policy.checkpoints / "1"))
        await policy.client.update_weights(version, manifest)

    completion = await policy.client.generate([4, 5], SamplingParams(max_tokens=16), "newest")
    expected = reference_logprobs(policy.checkpoints / "1", completion)
    assert furthest(completion.logprobs, expected) < TOLERANCE


async def test_a_version_that_cannot_be_had_leaves_the_old_one(policy: Running) -> None:
    before = await policy.client.version()
    with pytest.raises(WeightError, match="version 77"):
        await policy.client.update_weights(77, None)

    assert await policy.client.version() == before
    assert await policy.client.generate([4], SamplingParams(max_tokens=2), "still there")


async def test_a_cancelled_caller_frees_its_place_in_the_engine(policy: Running) -> None:
    caller = asyncio.create_task(policy.client.generate_group(group("unwanted", n=8, max_tokens=500)))
    await policy.client.generate([4], SamplingParams(max_tokens=8), "beside it")
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await policy.client.generate([4], SamplingParams(max_tokens=8), "after it")

    stats = await policy.client.stats()
    assert (stats.running, stats.waiting) == (0, 0)


async def test_a_second_engine_never_joins_the_process(policy: Running) -> None:
    setup = policy.station.actor.setup.call_one(str(policy.checkpoints / "1"), ENGINE, 0)
    with pytest.raises(Exception, match="two engines never share one"):
        await policy.station.call(setup, 60.0, "setup")


async def test_a_killed_policy_releases_everybody_with_the_cause(policy: Running) -> None:
    """The last test of this process."""
    long = SamplingParams(max_tokens=500)
    requests = [GroupRequest(request_id=f"g{i}", prompt_ids=(4, 5), sampling=long, n=8) for i in range(4)]
    waiting = [asyncio.create_task(policy.client.generate_group(request)) for request in requests]
    await policy.client.generate([4], SamplingParams(max_tokens=2), "first sign of life")
    killed = time.monotonic()
    policy.process().send_signal(signal.SIGKILL)

    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert time.monotonic() - killed < 20.0
    for outcome in outcomes:
        assert isinstance(outcome, StationDied)
        assert "Killed(sig=9)" in str(outcome)
    with pytest.raises(StationDied, match="Killed"):
        await policy.client.generate([4], SamplingParams(max_tokens=2), "newcomer")
