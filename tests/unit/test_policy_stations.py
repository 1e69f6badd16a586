"""How the processes of replicas are started, with a fleet that cannot, and how their end is noticed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from forgelite.errors import ConfigError
from forgelite.policy_stations import ProcessOfReplica, ReplicaLauncher, ReplicaPlan


class BrokenFleet:
    """Spawns nothing."""

    def spawn(self, name: str, actor: Any, **options: Any) -> Any:
        raise RuntimeError("this host has no room for another process")


def make_launcher(gpu_shares: tuple[str, ...]) -> ReplicaLauncher:
    plan = ReplicaPlan(
        model_path="model",
        engine={},
        seed=0,
        swap="copy",
        open_reader=None,
        environment={},
        setup_timeout_s=1.0,
        gpu_shares=gpu_shares,
    )
    return ReplicaLauncher(BrokenFleet(), plan)


async def test_the_gpus_of_a_replica_that_could_not_be_spawned_are_there_for_the_next():
    launcher = make_launcher(("0", "1"))
    for _ in range(5):
        with pytest.raises(RuntimeError, match="no room"):
            await launcher.start("policy-0")


async def test_a_replica_too_many_for_the_gpus_is_an_error_that_names_the_key():
    launcher = make_launcher(("0",))
    launcher._take_share("policy-0")
    with pytest.raises(ConfigError, match=r"no GPU is left for policy-1: name more in mesh\.policy_gpus"):
        await launcher.start("policy-1")


@pytest.mark.parametrize(
    ("command", "how"), [(["sleep", "60"], "was killed by SIGKILL"), (["sh", "-c", "exit 3"], "exit code 3")]
)
async def test_the_end_of_a_process_is_noticed_and_says_how_it_came(command: list[str], how: str):
    station = SimpleNamespace(name="policy-0", answer=None, actor=SimpleNamespace(slice=lambda procs: None))
    child = await asyncio.create_subprocess_exec(*command)
    process = ProcessOfReplica(station, BrokenFleet(), on_end=lambda: None)
    process.watch(child.pid)
    ended = asyncio.ensure_future(process.ended())
    if command[0] == "sleep":
        await asyncio.sleep(0)
        assert not ended.done()
        child.kill()
    cause = await asyncio.wait_for(ended, 10)
    await child.wait()
    assert cause.startswith("station policy-0 died: its process")
    assert how in cause or "has ended" in cause  # asyncio may have taken the exit code first


async def test_a_process_that_is_gone_before_it_is_watched_has_ended():
    station = SimpleNamespace(name="policy-0", answer=None, actor=SimpleNamespace(slice=lambda procs: None))
    child = await asyncio.create_subprocess_exec("true")
    await child.wait()
    process = ProcessOfReplica(station, BrokenFleet(), on_end=lambda: None)
    process.watch(child.pid)
    assert "has ended" in await asyncio.wait_for(process.ended(), 10)
