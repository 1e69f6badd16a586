"""Two hosts with a cable between them, as network namespaces: versions cross it, also after it was pulled out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.namespaces import obstacle, two_hosts
from benchmarks.weight_sync_peers import PORT, WORKER
from forgelite.mesh.environment import root_environment, station_environment
from tests.faults.two_hosts_program import TIMEOUT_S

WHY_NOT = obstacle()

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"no two hosts on this machine: {WHY_NOT}"),
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program saw: two versions, one while the cable is pulled out, and the ones after it was put back."""
    folder = tmp_path_factory.mktemp("hosts")
    environment = root_environment({}) | station_environment(PYTHONPATH=os.getcwd())
    with two_hosts() as (near, far), (folder / "log").open("w") as log:
        own, other = f"tcp://{near.address}:0", f"tcp://{far.address}:{PORT}"
        options = {"environment": environment, "stdout": log, "stderr": subprocess.STDOUT}
        host = far.start([sys.executable, "-c", WORKER, other, "trust_all_connections"], **options)
        program = [sys.executable, "-m", "tests.faults.two_hosts_program", str(folder), own, other, near.device]
        root = near.start(program, **options)
        try:
            assert root.wait(180) == 0, Path(folder / "log").read_text()[-4000:]
        finally:
            for process in (root, host):
                process.kill()
                process.wait()
    return json.loads((folder / "seen.json").read_text())


def test_versions_cross_the_cable(seen: dict[str, Any]) -> None:
    assert [result.get("right") for result in seen["before"]] == [True, True]


def test_a_cable_that_is_pulled_out_in_the_middle_is_an_error_within_a_bound(seen: dict[str, Any]) -> None:
    assert "version 3 did not arrive from ['a'] within 4.0 s" in seen["cut"]["error"]
    assert seen["cut"]["seconds"] < TIMEOUT_S + 2


def test_the_next_version_crosses_once_the_cable_is_back(seen: dict[str, Any]) -> None:
    assert seen["after"][-1].get("right") is True, seen["after"]
