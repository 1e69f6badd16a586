"""Staleness on real engines: at depth 0 and age 0 the loop is the synchronous algorithm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forgelite.observe.metrics import read_metrics
from tests.apps import run_app, toy_arguments

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SYNCHRONOUS = ("loop.depth=0", "loop.max_policy_age=0", "loop.steps=3", "eval.every=0", "eval.max_prompts=16")
TOLERANCE = 1e-5


def test_depth_0_and_age_0_give_the_trajectory_of_a_synchronous_driver(warm_start: Path, tmp_path: Path):
    """Both with groups that are filtered and not replaced, so that a batch is one wave; see `synchronous_driver`."""
    app = run_app("apps.grpo.main", *toy_arguments(warm_start, tmp_path / "loop", *SYNCHRONOUS))
    assert app.returncode == 0, app.output
    driver = run_app("tests.e2e.synchronous_driver", *toy_arguments(warm_start, tmp_path / "driver", *SYNCHRONOUS))
    assert driver.returncode == 0, driver.output

    lines = [line for line in read_metrics(tmp_path / "loop") if "tokens/trained" in line]
    expected = json.loads((tmp_path / "driver" / "driver.json").read_text())
    assert len(lines) == len(expected) == 3
    for line, step in zip(lines, expected, strict=True):
        assert line["version"] == step["version"]
        assert line["reward/mean"] == pytest.approx(sum(step["rewards"]) / len(step["rewards"]), abs=TOLERANCE)
        shared = {name for name in step if name in line and not name.startswith("time/")}
        assert {"loss/policy", "loss/grad_norm", "loss/entropy", "ratio/mean", "tokens/trained"} <= shared
        for name in shared:
            assert line[name] == pytest.approx(step[name], rel=TOLERANCE, abs=TOLERANCE), name
    ours, theirs = (
        load_file(tmp_path / run / "checkpoints" / "hf" / "model.safetensors") for run in ("loop", "driver")
    )
    start = load_file(warm_start / "checkpoints" / "hf" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=TOLERANCE)
    assert max((tensor - start[name]).abs().max() for name, tensor in ours.items()) > 10 * TOLERANCE


def test_stragglers_are_cut_and_the_account_says_so(warm_start: Path, tmp_path: Path):
    """Complete at six of eight members, two of which dawdle; a surplus that is cut; freshest first; real engines."""
    folder = tmp_path / "cut"
    app = run_app(
        "apps.grpo.main",
        *toy_arguments(warm_start, folder, "loop.steps=6", "loop.depth=2", "loop.max_policy_age=2"),
        *("loop.complete_at=6", "loop.selection=freshest", "loop.oversample=1.25", "loop.surplus=cut"),
        *("rollout.environment=tests.e2e.troublesome:Dawdling", "eval.every=0", "eval.max_prompts=16"),
    )
    assert app.returncode == 0, app.output
    assert "never awaited" not in app.output
    lines = [line for line in read_metrics(folder) if "tokens/trained" in line]
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert max(line["age/max"] for line in lines) <= 2
    for line in lines:
        states = ("trained", "rejected", "filtered", "failed", "cancelled", "queued", "in_flight")
        assert line["ledger/issued"] == sum(line[f"ledger/{state}"] for state in states)
        scored = sum(line[f"ledger/{state}"] for state in ("trained", "rejected", "filtered", "queued"))
        assert line["ledger/cancelled/straggler"] * 3 == scored  # of eight members six are scored and two are cut
