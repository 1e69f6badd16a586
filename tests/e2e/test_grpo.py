"""The GRPO app as a user runs it, with every part real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forgelite.config import GRPOConfig, load_config
from forgelite.observe.metrics import read_metrics
from tests.apps import run_app, shared_memory_of, toy_arguments

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def asynchronous(warm_start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run of the demo's configuration."""
    folder = tmp_path_factory.mktemp("grpo") / "asynchronous"
    finished = run_app("apps.grpo.main", *toy_arguments(warm_start, folder, "metrics.tensorboard=true"))
    assert finished.returncode == 0, finished.output
    return folder


@pytest.fixture(scope="module")
def synchronous(warm_start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps at depth 0 and age 0."""
    folder = tmp_path_factory.mktemp("grpo") / "synchronous"
    finished = run_app("apps.grpo.main", *synchronous_arguments(warm_start, folder))
    assert finished.returncode == 0, finished.output
    return folder


def synchronous_arguments(warm_start: Path, folder: Path, *overrides: str) -> list[str]:
    return toy_arguments(
        warm_start,
        folder,
        *("loop.depth=0", "loop.max_policy_age=0", "loop.steps=6", "eval.every=0", "eval.max_prompts=32"),
        *overrides,
    )


def steps(folder: Path) -> list[dict]:
    return [line for line in read_metrics(folder) if "tokens/trained" in line]


def test_held_out_accuracy_rises(asynchronous: Path):
    summary = json.loads((asynchronous / "summary.json").read_text())
    assert summary["exit_reason"] == "completed"
    assert summary["steps"] == 40
    assert summary["seconds"] > 0
    assert summary["eval/reward"]["before"] <= 0.35
    assert summary["eval/reward"]["after"] >= 0.85


def test_the_run_folder_is_complete(asynchronous: Path):
    assert {p.name for p in asynchronous.iterdir()} == {
        *(
            ".lock",
            "config.yaml",
            "metrics.jsonl",
            "rollouts.jsonl",
            "tensorboard",
            "checkpoints",
            "summary.json",
            "curves.png",
        )
    }
    load_config(GRPOConfig, asynchronous / "config.yaml")
    assert (asynchronous / "checkpoints" / "hf" / "model.safetensors").exists()


def test_every_step_logs_the_metrics_of_the_contract(asynchronous: Path):
    names = {
        *("step", "version", "reward/mean", "reward/std", "loss/policy", "loss/kl_ref", "loss/entropy"),
        *("loss/grad_norm", "ratio/mean", "ratio/max", "ratio/clipped_fraction", "ratio/ess"),
        *("age/mean", "age/max", "age/histogram", "ledger/trained", "ledger/filtered", "ledger/in_flight"),
        *("sync/publish_s", "sync/fetch_s", "sync/pause_s", "sync/bytes", "time/step_s", "time/wait_batch_s"),
        *("time/train_s", "idle/trainer", "idle/policy", "tokens/generated", "tokens/trained"),
        "tokens_per_s/generated",
    }
    lines = steps(asynchronous)
    assert [line["step"] for line in lines] == [line["version"] for line in lines] == list(range(1, 41))
    seen = {name for line in lines for name in line}
    assert names <= seen
    # of an update that is through, if there was one
    always = {name for name in names if not name.startswith("sync/")}
    assert all(always <= line.keys() for line in lines)


def test_evaluations_are_before_during_and_after(asynchronous: Path):
    assert [line["step"] for line in read_metrics(asynchronous) if "eval/reward" in line] == [
        0,
        10,
        20,
        30,
        40,
    ]


def test_nothing_older_than_the_bound_is_trained_and_generation_runs_ahead(asynchronous: Path):
    lines = steps(asynchronous)
    assert max(line["age/max"] for line in lines) == 1
    records = [json.loads(line) for line in (asynchronous / "rollouts.jsonl").read_text().splitlines()]
    for record in records:
        assert record["age"] == record["step"] - 1 - min(version for version, *_ in record["versions"])


def test_every_trajectory_is_accounted_for(asynchronous: Path):
    for line in steps(asynchronous):
        states = ("trained", "rejected", "filtered", "failed", "cancelled", "queued", "in_flight")
        assert line["ledger/issued"] == sum(line[f"ledger/{s}"] for s in states)
    last = steps(asynchronous)[-1]  # filtered groups are not replaced in this configuration
    assert last["ledger/trained"] + last["ledger/filtered"] + last["ledger/rejected"] >= 40 * 16 * 8
    assert last["ledger/trained"] > 40 * 8 * 8


def test_policy_and_trainer_agree_on_the_probability_of_a_token(asynchronous: Path, synchronous: Path):
    gaps = [line.get("mismatch/logprob_abs_max") for line in steps(asynchronous) + steps(synchronous)]
    assert max(gap for gap in gaps if gap is not None) < 1e-3
    assert all(line["mismatch/logprob_abs_max"] < 1e-3 for line in steps(synchronous))


def test_a_synchronous_run_is_on_policy_at_every_step(synchronous: Path):
    lines = steps(synchronous)
    assert len(lines) == 6
    for line in lines:
        assert line["ratio/max"] == pytest.approx(1, abs=1e-3)
        assert line["ratio/mean"] == pytest.approx(1, abs=1e-3)
        assert line["age/max"] == 0


def repeatable(folder: Path) -> list[dict]:
    """What does not depend on the clock."""
    timed = ("time/", "sync/", "idle/", "tokens_per_s/", "tokens/generated")
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in read_metrics(folder)]


def test_a_synchronous_run_repeats_bit_for_bit(synchronous: Path, warm_start: Path, tmp_path: Path):
    finished = run_app("apps.grpo.main", *synchronous_arguments(warm_start, tmp_path / "again"))
    assert finished.returncode == 0, finished.output
    assert repeatable(tmp_path / "again") == repeatable(synchronous)


def test_a_resumed_run_goes_on_with_the_step_that_would_have_come(synchronous: Path, warm_start: Path, tmp_path: Path):
    folder = tmp_path / "resumed"
    first = run_app("apps.grpo.main", *synchronous_arguments(warm_start, folder, "loop.steps=3", "checkpoint.every=3"))
    assert first.returncode == 0, first.output
    second = run_app("apps.grpo.main", *synchronous_arguments(warm_start, folder, "run.resume=true"))
    assert second.returncode == 0, second.output
    resumed = [line for line in repeatable(folder) if line["step"] > 3]
    assert resumed == [line for line in repeatable(synchronous) if line["step"] > 3]


def test_nothing_is_left_in_shared_memory(asynchronous: Path, synchronous: Path):
    assert shared_memory_of("asynchronous") == shared_memory_of("synchronous") == []


@pytest.mark.parametrize("mode", ["barrier", "abort"])  # a barrier drains the engine
def test_a_run_trains_with_every_way_of_taking_new_weights(warm_start: Path, tmp_path: Path, mode: str):
    options = (f"policy.update.mode={mode}", "loop.steps=4", "eval.every=0", "eval.max_prompts=32")
    finished = run_app("apps.grpo.main", *toy_arguments(warm_start, tmp_path / mode, *options))
    assert finished.returncode == 0, finished.output
    assert [line["step"] for line in steps(tmp_path / mode)] == [1, 2, 3, 4]
    records = [json.loads(line) for line in (tmp_path / mode / "rollouts.jsonl").read_text().splitlines()]
    assert {version for record in records for version, *_ in record["versions"]} >= {0, 1}
    if mode != "abort":
        assert all(len(record["versions"]) == 1 for record in records)
