"""Record, replay and sampling alone, as a user runs them."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from forgelite.config import GRPOConfig, load_config
from forgelite.errors import ConfigError
from forgelite.observe.metrics import read_metrics
from forgelite.observe.recording import open_record, read_batch
from forgelite.preparation import prepare_replay
from tests.apps import ROOT, is_gone, run_app, running_app, shared_memory_of, toy_arguments

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS = 4
PREFIXES = ("loss/", "ratio/", "age/", "reward/", "mismatch/", "trainer/lr", "tokens/trained")


@pytest.fixture(scope="module")
def recorded(warm_start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An asynchronous run with a record."""
    folder = tmp_path_factory.mktemp("replay") / "recorded"
    overrides = ("loop.record=true", f"loop.steps={STEPS}", "eval.every=0", "eval.max_prompts=8")
    finished = run_app("apps.grpo.main", *toy_arguments(warm_start, folder, *overrides))
    assert finished.returncode == 0, finished.output
    return folder


def replay(warm_start: Path, record: Path, folder: Path, *overrides: str):
    return run_app(
        "apps.grpo.main", *toy_arguments(warm_start, folder, f"loop.replay={record}", f"loop.steps={STEPS}", *overrides)
    )


def weights(folder: Path) -> bytes:
    return (folder / "checkpoints" / "hf" / "model.safetensors").read_bytes()


def what_was_learned(folder: Path) -> list[dict]:
    """Everything of a step that does not depend on the clock or on an evaluation."""
    lines = [line for line in read_metrics(folder) if "tokens/trained" in line]
    return [{k: v for k, v in line.items() if k.startswith(PREFIXES)} for line in lines]


def test_a_replay_gives_the_weights_of_an_asynchronous_run_bit_for_bit_with_the_trainer_alone(
    recorded: Path, warm_start: Path, tmp_path: Path
):
    folder = tmp_path / "again"
    # In two parts, so that it is seen to be resumed as well.
    first = replay(warm_start, recorded, folder, "loop.steps=2", "checkpoint.every=2")
    assert first.returncode == 0, first.output
    second = replay(warm_start, recorded, folder, "run.resume=true")
    assert second.returncode == 0, second.output

    assert max(line["age/max"] for line in what_was_learned(recorded)) == 1
    assert what_was_learned(folder) == what_was_learned(recorded)
    assert weights(folder) == weights(recorded)
    assert "starting the trainer" in second.output
    assert "policy:" not in second.output
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["exit_reason"], summary["steps"]) == ("completed", STEPS)
    assert summary["ledger/trained"] == json.loads((recorded / "summary.json").read_text())["ledger/trained"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loop.steps=9"], rf"loop\.steps=9, but the record in .* holds {STEPS} steps"),
        (["trainer.training.seq_len=10", "policy.engine.max_model_len=10"], r"trainer\.training\.seq_len=10, but"),
        (["policy.sampling.temperature=0.5"], r"policy\.sampling\.temperature is 0\.5, but"),
        (["model.tokenizer={other}"], r"model\.tokenizer \(fingerprint"),
        (["loop.replay=/nowhere"], r"there is no record in /nowhere"),
    ],
)
def test_what_the_record_does_not_fit_is_refused_before_anything_starts(
    recorded: Path, warm_start: Path, tmp_path: Path, overrides: list[str], message: str
):
    other = tmp_path / "other"
    shutil.copytree(warm_start / "checkpoints" / "hf", other)
    tokenizer = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(tokenizer.replace('"a": 2', '"A": 2'))
    given = [override.format(other=other) for override in (f"loop.replay={recorded}", *overrides)]
    arguments = toy_arguments(warm_start, tmp_path / "run", f"loop.steps={STEPS}", *given)
    with pytest.raises(ConfigError, match=message):
        prepare_replay(load_config(GRPOConfig, ROOT / arguments[1], arguments[2:]))


def test_sampling_alone_starts_no_trainer_ends_cleanly_and_can_be_trained_from(warm_start: Path, tmp_path: Path):
    folder = tmp_path / "sampled"
    overrides = ("loop.generate_only=true", "loop.steps=100000", "reference.enabled=false")
    with running_app(tmp_path / "log.txt", "apps.grpo.main", *toy_arguments(warm_start, folder, *overrides)) as app:
        app.wait_for_output("step 3/100000")
        processes = app.descendants()
        assert "trainer" not in {p.environ().get("FORGELITE_STATION") for p in processes}
        app.process.send_signal(signal.SIGINT)
        assert app.wait(60) == 130
    assert all(is_gone(process) for process in processes)
    assert shared_memory_of("sampled") == []

    summary = json.loads((folder / "summary.json").read_text())
    assert summary["exit_reason"] == "interrupted"
    assert 0 < summary["reward/mean"] < 1
    assert summary["tokens_per_s/generated"] > 0
    record = open_record(folder)
    assert record.steps >= 3
    spans = [s for step in (1, 3) for g in read_batch(record, step).groups for t in g.trajectories for s in t.spans]
    assert {s.version for s in spans} == {0}

    finished = replay(warm_start, folder, tmp_path / "trained", "loop.steps=3", "loop.max_policy_age=2")
    assert finished.returncode == 0, finished.output
    assert [line["age/max"] for line in what_was_learned(tmp_path / "trained")] == [0, 1, 2]
