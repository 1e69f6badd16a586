"""Real replicas that die, hang and raise under load: nothing is lost, and no token names a version it was not made by.

The two checkpoints take turns as versions (even: the first, odd: the second), and their models agree about no token.
So a fresh forward pass of the checkpoint that a span names tells whether its tokens were really sampled by it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import pytest_asyncio

import forgelite
from forgelite.mesh.environment import root_environment, station_environment
from forgelite.policy.environment import policy_environment
from forgelite.policy.groups import GroupProgress
from forgelite.policy.replicas import ReplicaSettings
from forgelite.policy.service import PolicyService
from forgelite.types import Completion, GroupRequest, SamplingParams
from forgelite.weights import WeightStore
from forgelite.weights.manifest import Manifest
from tests.engines.policy_process import (
    ENGINE,
    TOLERANCE,
    furthest,
    read_checkpoint,
    reference_logprobs,
    save_checkpoint,
)
from tests.unit.weights_memory import MemoryDirectory

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
]

NOTICED_S = 8.0  # "within a few seconds": heartbeat and supervision, on two busy cores
BACK_S = 90.0
TOKENS = 400
Fault = Literal["kill -9", "SIGSTOP", "exception"]


@dataclass(kw_only=True, slots=True)
class Running:
    """A service of two replicas, and a store whose versions they read."""

    service: PolicyService
    store: WeightStore
    checkpoints: Path
    processes: dict[str, Any] = field(default_factory=dict)  # the newest ProcessOfReplica of each name
    published: int = 0
    round: int = 0

    def checkpoint_of(self, version: int) -> Path:
        return self.checkpoints / str(version % 2)

    async def publish(self) -> Manifest:
        self.published += 1
        return await self.store.publish(self.published, read_checkpoint(self.checkpoint_of(self.published)))

    async def until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait for what nothing can notify us of."""
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def both_serve(self) -> None:
        await self.until(lambda: self.service.replicas_serving == 2, BACK_S)

    def load(self) -> list[GroupRequest]:
        """Six groups, three for each replica."""
        self.round += 1
        sampling = SamplingParams(max_tokens=TOKENS)
        return [
            GroupRequest(
                request_id=f"r{self.round}g{i}", prompt_ids=(3, 1, 4, i), sampling=sampling, n=2, progress_s=0.05
            )
            for i in range(6)
        ]

    async def strike(self, name: str, fault: Fault, where: Literal["step", "swap"]) -> None:
        if fault == "exception":
            await self.processes[name]._station.actor.inject.call_one(where)
        else:
            os.kill(self.processes[name].process_ids[0], signal.SIGKILL if fault == "kill -9" else signal.SIGSTOP)

    def expect_true(self, outcome: list[Any]) -> None:
        """Each member is whole, and each of its spans was sampled by the weights that it names."""
        for member in outcome:
            assert isinstance(member, Completion)
            assert (len(member.token_ids), member.finish_reason) == (TOKENS, "length")
            for span in member.spans:
                assert span.version <= self.published
                expected = reference_logprobs(self.checkpoint_of(span.version), member)
                part = slice(span.start, span.end)
                assert furthest(member.logprobs[part], expected[part]) < TOLERANCE, span


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    os.environ.update(root_environment(os.environ))
    from forgelite import policy_stations  # imports Monarch, which reads the environment
    from forgelite.mesh.fleet import Fleet
    from tests.faults.breakable_policy import BreakablePolicyActor

    checkpoints = tmp_path_factory.mktemp("checkpoints")
    for index in (0, 1):
        save_checkpoint(checkpoints / str(index), "qwen3_tied", seed=index + 1)
    run_id = f"policy-replicas-{os.getpid()}"
    plan = policy_stations.ReplicaPlan(
        model_path=str(checkpoints / "0"),
        engine=ENGINE,
        seed=0,
        swap="zero_copy",
        open_reader=partial(WeightStore, directory=MemoryDirectory(), run_id=run_id),
        environment=station_environment(
            **policy_environment("cpu"), PYTHONPATH=str(Path(forgelite.__file__).parents[1])
        ),
        setup_timeout_s=120.0,
    )
    store = WeightStore(directory=MemoryDirectory(), run_id=run_id, retain=2, served_in_place=2, timeout_s=10.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy_stations, "PolicyActor", BreakablePolicyActor)
        async with Fleet(stop_timeout_s=15.0) as fleet:
            launcher = policy_stations.ReplicaLauncher(fleet, plan)

            async def start(name: str) -> Any:
                process = await launcher.start(name)
                this.processes[name] = process
                return process

            settings = ReplicaSettings(replicas=2, max_restarts=10, heartbeat_timeout_s=3.0)
            this = Running(service=PolicyService(start, settings=settings), store=store, checkpoints=checkpoints)
            await this.service.start()
            yield this
            await this.service.close()
            assert not fleet.died.done()
    store.close()


@pytest.mark.parametrize("fault", ["kill -9", "SIGSTOP", "exception"])
async def test_a_fault_during_generation_costs_no_request_and_no_token(running: Running, fault: Fault) -> None:
    await running.both_serve()
    service, restarts, redispatched = running.service, running.service.restarts, running.service.redispatched
    first, *others = running.load()
    work = [asyncio.create_task(service.generate_group(request)) for request in others]
    struck = False
    async for item in service.stream(first):
        if not struck and isinstance(item, GroupProgress) and item.members[0].start > 20:
            struck = True
            await running.strike("policy-0", fault, "step")
    await running.until(lambda: service.replicas_serving == 1, NOTICED_S)
    outcomes = [item.outcome, *await asyncio.gather(*work)]

    for outcome in outcomes[:3]:
        running.expect_true(outcome)
    assert all(len(c.token_ids) == TOKENS for outcome in outcomes for c in outcome)
    assert service.redispatched > redispatched
    assert service.restarts == restarts + 1


@pytest.mark.parametrize("fault", ["kill -9", "SIGSTOP", "exception"])
async def test_a_fault_during_an_update_leaves_one_version_served_by_all(running: Running, fault: Fault) -> None:
    await running.both_serve()
    service, restarts = running.service, running.service.restarts
    work = [asyncio.create_task(service.generate_group(request)) for request in running.load()]
    manifest = await running.publish()
    if fault == "kill -9":
        update = asyncio.create_task(service.update_weights(running.published, manifest))
        await asyncio.sleep(0)
        await running.strike("policy-0", fault, "swap")
        report = await update
    else:
        await running.strike("policy-0", fault, "swap")
        report = await service.update_weights(running.published, manifest)
    assert report.version == await service.version() == running.published

    for outcome in (await asyncio.gather(*work))[::3]:
        running.expect_true(outcome)
    await running.both_serve()
    assert service.restarts == restarts + 1
    for outcome in await asyncio.gather(*(service.generate_group(request) for request in running.load()[:2])):
        running.expect_true(outcome)
        assert {span.version for member in outcome for span in member.spans} == {running.published}


async def test_killed_replicas_have_given_their_leases_back(running: Running) -> None:
    """Else a publisher would find its slots taken: there are five of them."""
    for _ in range(8):
        manifest = await running.publish()
        await running.service.update_weights(running.published, manifest)

    assert await running.service.version() == running.published
