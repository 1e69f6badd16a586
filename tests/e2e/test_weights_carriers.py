"""Runs whose weights travel otherwise than by shared memory of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from forgelite.observe.metrics import read_metrics
from tests.apps import run_app, shared_memory_of, toy_arguments

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def run(warm_start: Path, folder: Path, *overrides: str) -> str:
    """Three synchronous steps; the output."""
    short = ("loop.depth=0", "loop.max_policy_age=0", "loop.steps=3", "eval.every=0", "eval.max_prompts=16")
    finished = run_app("apps.grpo.main", *toy_arguments(warm_start, folder, *short, *overrides))
    assert finished.returncode == 0, finished.output
    return finished.output


def largest_gap(folder: Path) -> float:
    """Between the log-probabilities of policy and trainer, which are of the same version here."""
    lines = [line for line in read_metrics(folder) if "tokens/trained" in line]
    assert [line["version"] for line in lines] == [1, 2, 3]
    return max(line["mismatch/logprob_abs_max"] for line in lines)


def test_two_trainer_processes_publish_shards_that_the_policy_pulls(warm_start: Path, tmp_path: Path) -> None:
    folder = tmp_path / "rdma"
    output = run(warm_start, folder, "weights.carrier=rdma", "mesh.trainer_processes=2")
    assert "weights travel by rdma" in output
    assert "weights are pulled by RDMA over" in output
    assert largest_gap(folder) < 1e-4
    assert shared_memory_of(folder.name) == []


def test_weights_travel_through_a_folder_and_stay_for_other_tools(warm_start: Path, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    assert "weights travel by filesystem" in run(warm_start, folder, "weights.carrier=filesystem")
    assert largest_gap(folder) < 1e-4
    files = sorted(path.relative_to(folder) for path in folder.glob("weights/*/model.safetensors"))
    assert [str(path.parent.name) for path in files] == ["version-00000002", "version-00000003"]
