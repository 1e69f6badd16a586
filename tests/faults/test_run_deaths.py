"""Whatever dies, the run ends with its cause, nobody waits for ever, and nothing stays behind."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from forgelite.observe.metrics import read_metrics
from tests.apps import (
    RunningApp,
    is_gone,
    run_app,
    running_app,
    shared_memory_of,
    toy_arguments,
    until,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@contextmanager
def endless_run(warm_start: Path, folder: Path, *overrides: str) -> Iterator[tuple[RunningApp, list[psutil.Process]]]:
    """A run in its fifth step, and all processes it has started."""
    arguments = toy_arguments(
        warm_start, folder, "loop.steps=100000", "eval.every=0", "eval.max_prompts=16", *overrides
    )
    with running_app(folder.with_suffix(".log"), "apps.grpo.main", *arguments) as app:
        app.wait_for_output("step 5/")
        children = app.descendants()
        assert len(children) >= 4
        assert shared_memory_of(folder.name)
        yield app, children


def expect_nothing_left(folder: Path, processes: list[psutil.Process]) -> None:
    until(lambda: all(map(is_gone, processes)), 15, lambda: str([p for p in processes if not is_gone(p)]))
    assert shared_memory_of(folder.name) == []


def exit_reason(folder: Path) -> tuple[str, str | None]:
    summary = json.loads((folder / "summary.json").read_text())
    return summary["exit_reason"], summary["error"]


@pytest.mark.parametrize("station", ["policy-0", "trainer", "reference"])
def test_the_death_of_an_engine_that_nobody_replaces_ends_the_run_within_30_s_with_the_cause(
    warm_start: Path, tmp_path: Path, station: str
):
    folder = tmp_path / f"killed-{station}"
    with endless_run(warm_start, folder, "policy.max_restarts=0") as (app, children):
        app.station(station).send_signal(signal.SIGKILL)
        assert app.wait(30) == 1
        assert f"station {station} died" in app.output
        assert "Traceback" not in app.output
        reason, error = exit_reason(folder)
        assert reason == "failed"
        assert f"station {station} died" in error
        expect_nothing_left(folder, children)


def test_the_death_of_one_of_two_replicas_costs_the_run_nothing(warm_start: Path, tmp_path: Path):
    folder = tmp_path / "killed-replica"
    with endless_run(warm_start, folder, "policy.replicas=2", "loop.steps=40", "metrics.progress=plain") as (app, _):
        app.station("policy-1").send_signal(signal.SIGKILL)
        assert app.wait(120) == 0, app.output
        assert "policy-1 is out of service" in app.output
        assert "Traceback" not in app.output
    last = read_metrics(folder)[-1]
    assert (last["step"], last["policy/restarts"], last["ledger/failed"]) == (40, 1, 0)


def test_the_death_of_the_reward_process_costs_its_samples_and_not_the_run(warm_start: Path, tmp_path: Path):
    folder = tmp_path / "killed-reward"
    with endless_run(warm_start, folder, "loop.steps=60", "metrics.progress=plain") as (app, _):
        app.station("reward").send_signal(signal.SIGKILL)
        assert app.wait(90) == 0, app.output
        assert "replacing the reward process" in app.output
    assert read_metrics(folder)[-1]["step"] == 60


def test_ctrl_c_while_the_engines_start_ends_a_run_cleanly(warm_start: Path, tmp_path: Path):
    folder = tmp_path / "interrupted-early"
    with running_app(tmp_path / "log", "apps.grpo.main", *toy_arguments(warm_start, folder)) as app:
        app.wait_for_output("starting the stations")
        until(lambda: len(app.descendants()) >= 4, 30)
        children = app.descendants()
        app.process.send_signal(signal.SIGINT)
        assert app.wait(30) == 130
        assert "Traceback" not in app.output
        assert "never retrieved" not in app.output
        assert exit_reason(folder) == ("interrupted", None)
        expect_nothing_left(folder, children)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_an_interrupt_ends_a_run_cleanly(warm_start: Path, tmp_path: Path, number: signal.Signals):
    folder = tmp_path / f"interrupted-{number.name}"
    with endless_run(warm_start, folder) as (app, children):
        app.process.send_signal(number)
        assert app.wait(30) == 130
        assert "Traceback" not in app.output
        assert exit_reason(folder) == ("interrupted", None)
        expect_nothing_left(folder, children)


def test_kill_9_of_the_main_process_leaves_no_process_and_the_next_run_takes_its_shared_memory_away(
    warm_start: Path, tmp_path: Path
):
    folder = tmp_path / "killed-main"
    with endless_run(warm_start, folder) as (app, children):
        app.process.send_signal(signal.SIGKILL)
        app.wait(10)
        until(lambda: all(map(is_gone, children)), 15, lambda: str([p for p in children if not is_gone(p)]))
    following = run_app("apps.grpo.main", *toy_arguments(warm_start, tmp_path / "next", "loop.steps=1"))
    assert following.returncode == 0, following.output
    assert shared_memory_of(folder.name) == []
