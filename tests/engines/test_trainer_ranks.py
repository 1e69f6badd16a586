"""A trainer of two processes sees what a trainer of one sees."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forgelite.trainer.trainer import Trainer
from tests.engines.tiny import model_config, save_llama, save_qwen3
from tests.engines.trainer_rank import CASES, LOSS, batches, run, trainer_config

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@dataclass(kw_only=True, slots=True, frozen=True)
class Runs:
    """The same training by one process and by two."""

    model: Path
    single: dict
    single_folder: Path
    ranks: list[dict]
    ranks_folder: Path


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two processes have run every case."""
    folder = tmp_path_factory.mktemp("two")
    save_llama(folder / "llama")
    save_qwen3(folder / "qwen3")
    port = min(_free_port(), 65535 - len(CASES))
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.engines.trainer_rank", str(rank), "2", str(port), str(folder)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors[-4000:]
    finally:
        for process in processes:
            process.kill()
    return folder


@pytest.fixture(scope="module", params=list(CASES))
def runs(request: pytest.FixtureRequest, two_processes: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    model = two_processes / CASES[request.param][0]
    single_folder, ranks_folder = tmp_path_factory.mktemp("one"), two_processes / request.param
    return Runs(
        model=model,
        single=run(model, {}, None, single_folder),
        single_folder=single_folder,
        ranks=[json.loads((ranks_folder / f"rank{rank}.json").read_text()) for rank in range(2)],
        ranks_folder=ranks_folder,
    )


def _without_times(metrics: dict) -> dict:
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


def test_every_rank_reports_the_metrics_of_a_single_process(runs: Runs) -> None:
    for seen in runs.ranks:
        assert seen["loss"] == pytest.approx(runs.single["loss"], rel=1e-5)
        for found, expected in zip(seen["steps"], runs.single["steps"], strict=True):
            assert _without_times(found) == pytest.approx(_without_times(expected), rel=1e-4, abs=1e-5)


def test_the_starting_weights_are_the_folders_bit_for_bit(runs: Runs) -> None:
    start = torch.load(runs.ranks_folder / "start.pt")
    original = load_file(runs.model / "model.safetensors")
    assert start.keys() == original.keys()
    assert all(torch.equal(start[name], original[name]) for name in original)


def test_the_trained_weights_are_those_of_a_single_process(runs: Runs) -> None:
    ours, theirs = (
        load_file(folder / "hf" / "model.safetensors") for folder in (runs.ranks_folder, runs.single_folder)
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-4)


def test_a_nan_on_one_rank_stops_the_step_on_all(runs: Runs) -> None:
    assert [seen["diverged_at"] for seen in runs.ranks] == [3, 3]


def test_a_resumed_step_is_the_one_that_would_have_come(runs: Runs) -> None:
    for seen in runs.ranks:
        assert seen["after_resume"] == seen["after"]


def test_one_process_continues_what_two_have_saved(runs: Runs) -> None:
    trainer = Trainer.build(model_config(runs.model), trainer_config({}), LOSS, steps=9)
    trainer.load(runs.ranks_folder / "state")
    assert trainer.version == 3
    loss = trainer.train_step(batches()[0]).metrics["loss/policy"]
    assert loss == pytest.approx(runs.ranks[0]["after"], rel=1e-4, abs=1e-5)
