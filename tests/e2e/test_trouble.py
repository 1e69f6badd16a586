"""Bad input and bad rewards: one clear error before anything starts, or a counted failure in a run that goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from forgelite.observe.metrics import read_metrics
from tests.apps import run_app, toy_arguments


def expect_refusal(arguments: list[str], *words: str) -> None:
    finished = run_app("apps.grpo.main", *arguments)
    assert finished.returncode == 2, finished.output
    assert finished.output.startswith("error: ")
    assert all(word in finished.output for word in words), finished.output
    assert "Traceback" not in finished.output
    assert "starting the stations" not in finished.output


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("loop.dpeth=1", ["loop.dpeth", "did you mean loop.depth"]),
        ("loop.depth=much", ["loop.depth", "much"]),
        ("loop.sync_every=5", ["loop.sync_every=5", "loop.depth=1"]),
        ("model.path=nowhere", ["model.path", "nowhere"]),
        ("data.train=nowhere.jsonl", ["data.train", "nowhere.jsonl"]),
        ("data.train_args.count=0", ["data.train", "no rows"]),
        ("reward.functions.0.path=no.such:thing", ["reward.functions", "no.such"]),
        ("reward.functions.0.path=apps.toy.task:nothing", ["reward.functions", "apps.toy.task has no nothing"]),
        ("loss={name: custom, path: 'no.such:thing', uses_ratio: true}", ["loss.path", "no.such"]),
        ("loss={name: reinforce}", ["loop.depth=1", "loss.name=reinforce", "loss.corrections"]),
        ("data.prompt=question", ["data.prompt", "question"]),
        ("mesh.device=cuda", ["mesh.device=cuda", "no GPU"]),
        ("policy.sampling.top_p=0.9", ["policy.sampling.top_p=0.9", "biased"]),
        ("mesh.trainer_processes=3;trainer.parallelism.tensor_parallel_degree=2", ["mesh.trainer_processes=3"]),
    ],
)
def test_a_wrong_configuration_is_refused_with_exit_code_2_before_any_actor_starts(toy_base, tmp_path, override, words):
    expect_refusal(
        [
            "--config",
            "configs/grpo/toy.yaml",
            f"run.dir={tmp_path / 'run'}",
            f"model.path={toy_base}",
            *override.split(";"),
        ],
        *words,
    )
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_larger_than_the_model_s_vocabulary_is_refused(toy_base: Path, tmp_path: Path):
    small = tmp_path / "small"
    shutil.copytree(toy_base, small)
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**config, "vocab_size": 40}))
    expect_refusal(
        ["--config", "configs/grpo/toy.yaml", f"run.dir={tmp_path / 'run'}", f"model.path={small}"],
        *("model.tokenizer", "45 tokens", "40"),
    )


def test_help_lists_every_key_with_its_meaning():
    finished = run_app("apps.grpo.main", "--help")
    assert finished.returncode == 0
    for words in (
        "loop.max_policy_age",
        "oldest age, in versions",
        "policy.update.kv",
        "trainer.optimizer.lr",
    ):
        assert words in finished.output


@pytest.mark.engine
@pytest.mark.slow
def test_rewards_that_raise_hang_or_return_nan_are_counted_failures_and_the_run_lives(warm_start: Path, tmp_path: Path):
    finished = run_app(
        "apps.grpo.main",
        *toy_arguments(
            warm_start,
            tmp_path / "run",
            *("loop.steps=8", "eval.every=0", "eval.max_prompts=16"),
            *(
                "reward.functions.0.path=tests.e2e.troublesome:sometimes_broken",
                "reward.functions.0.timeout_s=0.5",
            ),
            "reward.max_hung_threads=4",
        ),
    )
    assert finished.returncode == 0, finished.output
    last = read_metrics(tmp_path / "run")[-1]
    assert last["ledger/failed/raised"] > 0
    assert last["ledger/failed/timeout"] > 0
    assert last["ledger/failed/not_finite"] > 0
    assert last["ledger/trained"] > 8 * 16
    assert "failed (raised): reward sometimes_broken on g" in finished.output
    assert "replacing the reward process" in finished.output


@pytest.mark.engine
@pytest.mark.slow
def test_a_run_whose_rewards_are_all_equal_says_so_and_ends_at_its_deadline(warm_start: Path, tmp_path: Path):
    finished = run_app(
        "apps.grpo.main",
        *toy_arguments(
            warm_start,
            tmp_path / "run",
            *(
                "reward.functions.0.path=tests.e2e.troublesome:always_one",
                "loop.batch_timeout_s=5",
                "rollout.timeout_s=4",
            ),
        ),
    )
    assert finished.returncode == 1, finished.output
    assert "equal rewards within each group" in finished.output
    assert "waited 5 s for a training batch (loop.batch_timeout_s): 0 of 16 groups are queued" in finished.output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["exit_reason"] == "failed"
    assert "training batch" in summary["error"]
