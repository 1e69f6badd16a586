"""A replica of two ranks on a CPU beside one of a single process: the same tokens, the same boundaries, one fate."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

import forgelite
from forgelite.errors import StationDied, WeightError
from forgelite.mesh.environment import root_environment, station_environment
from forgelite.policy.client import PolicyClient
from forgelite.policy.environment import policy_environment
from forgelite.types import SamplingParams
from forgelite.weights import WeightStore
from tests.engines.policy_process import (
    ENGINE,
    TOLERANCE,
    furthest,
    group,
    read_checkpoint,
    reference_logprobs,
    save_checkpoint,
)
from tests.unit.weights_memory import MemoryDirectory

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

RANKS = 2
NOTICED_S = 20.0  # a bound on how long a death may go unnoticed
LONG = 400  # tokens: far more than are sampled while a test gives its next command


@dataclass(kw_only=True, slots=True, frozen=True)
class Policies:
    """Two replicas with the same weights, and a store whose versions the one of two ranks reads."""

    two_ranks: PolicyClient
    one: PolicyClient
    processes: tuple[int, ...]  # of the two ranks, by rank
    store: WeightStore
    checkpoints: Path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def policies(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Policies]:
    os.environ.update(root_environment(os.environ))
    from forgelite.mesh.fleet import Fleet  # imports Monarch, which reads the environment
    from forgelite.policy_stations import ReplicaLauncher, ReplicaPlan

    checkpoints = tmp_path_factory.mktemp("checkpoints")
    for index in (1, 2):
        save_checkpoint(checkpoints / str(index), "qwen3_tied", seed=index)
    run_id = f"tensor-parallel-{os.getpid()}"
    plan = ReplicaPlan(
        model_path=str(checkpoints / "1"),
        engine=ENGINE | {"tensor_parallel_size": RANKS},
        seed=0,
        swap="copy",
        open_reader=partial(WeightStore, directory=MemoryDirectory(), run_id=run_id),
        environment=station_environment(
            **policy_environment("cpu"), PYTHONPATH=str(Path(forgelite.__file__).parents[1])
        ),
        setup_timeout_s=150.0,
        step_timeout_s=30.0,
    )
    async with Fleet(stop_timeout_s=15.0) as fleet:
        launchers = {
            "ranks": ReplicaLauncher(fleet, plan),
            "single": ReplicaLauncher(fleet, replace(plan, engine=ENGINE)),
        }
        started = await fleet.together(*(launcher.start(name) for name, launcher in launchers.items()))
        store = WeightStore(directory=MemoryDirectory(), run_id=run_id, retain=1, timeout_s=5.0)
        clients = [PolicyClient(process.calls) for process in started]
        yield Policies(
            two_ranks=clients[0],
            one=clients[1],
            processes=started[0].process_ids,
            store=store,
            checkpoints=checkpoints,
        )
        for client in clients:
            await client.close()
        for process in started:
            await process.kill()
        store.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
async def test_two_ranks_sample_what_one_process_does(policies: Policies, temperature: float) -> None:
    requests = [
        group(f"{temperature}/{index}", n=4, prompt=[index, 5, 6], max_tokens=24, temperature=temperature, seed=index)
        for index in range(4)
    ]
    clients = (policies.two_ranks, policies.one)
    together, alone = [await asyncio.gather(*map(client.generate_group, requests)) for client in clients]
    for ours, theirs in zip(together, alone, strict=True):
        assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
        assert max(furthest(a.logprobs, b.logprobs) for a, b in zip(ours, theirs, strict=True)) < TOLERANCE


async def test_an_update_falls_on_the_same_token_of_all_ranks(policies: Policies) -> None:
    asked = asyncio.create_task(policies.two_ranks.generate_group(group("long", n=2, max_tokens=LONG)))
    before = (await policies.two_ranks.stats()).generated_tokens
    while (await policies.two_ranks.stats()).generated_tokens < before + 20:
        pass
    manifest = await policies.store.publish(1, read_checkpoint(policies.checkpoints / "2"))
    report = await policies.two_ranks.update_weights(1, manifest)

    assert (report.version, report.recomputed) == (1, 2)
    for completion in await asked:
        old, new = completion.spans
        assert (old.version, new.version, new.end) == (0, 1, LONG)
        under_old, under_new = (reference_logprobs(policies.checkpoints / str(i), completion) for i in (1, 2))
        boundary = old.end
        assert furthest(completion.logprobs[:boundary], under_old[:boundary]) < TOLERANCE
        assert furthest(completion.logprobs[boundary:], under_new[boundary:]) < TOLERANCE


async def test_no_rank_keeps_the_lease_of_a_version_that_it_has_copied(policies: Policies) -> None:
    for version in range(2, 6):  # more than the segment has slots
        manifest = await policies.store.publish(version, read_checkpoint(policies.checkpoints / "1"))
        await policies.two_ranks.update_weights(version, manifest)

    completion = await policies.two_ranks.generate([4, 5], SamplingParams(max_tokens=16), "newest")
    assert furthest(completion.logprobs, reference_logprobs(policies.checkpoints / "1", completion)) < TOLERANCE


async def test_a_version_that_a_rank_cannot_have_is_taken_by_none(policies: Policies) -> None:
    before = await policies.two_ranks.version()
    with pytest.raises(WeightError, match=r"rank 1: .*version 77"):
        await policies.two_ranks.update_weights(77, None)

    assert await policies.two_ranks.version() == before
    assert await policies.two_ranks.generate([4], SamplingParams(max_tokens=2), "still there")


async def test_a_rank_that_is_killed_takes_the_replica_with_it(policies: Policies) -> None:
    """The last test of this replica."""
    waiting = [
        asyncio.create_task(policies.two_ranks.generate_group(group(f"g{i}", max_tokens=LONG))) for i in range(4)
    ]
    await policies.two_ranks.generate([4], SamplingParams(max_tokens=2), "first sign of life")
    killed = time.monotonic()
    os.kill(policies.processes[1], signal.SIGKILL)

    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert time.monotonic() - killed < NOTICED_S
    assert all(isinstance(outcome, StationDied) for outcome in outcomes), outcomes
    assert all("rank 1" in str(outcome) or "Killed" in str(outcome) for outcome in outcomes), outcomes
    assert not [name for name in os.listdir("/dev/shm") if "replica=" in name]
