"""What a run writes, and waits that end."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest

from forgelite.errors import ConfigError, DeadlineExceeded
from forgelite.observe.batch_metrics import age_metrics, reward_metrics
from forgelite.observe.gates import within
from forgelite.observe.metrics import MetricsLog, Rate, read_metrics
from forgelite.observe.progress import make_progress
from forgelite.observe.recorder import Recorder, claim_folder
from forgelite.observe.report import age_histogram, draw_curves, windowed_rate
from forgelite.types import Score
from tests.unit.test_recording import HEADER
from tests.unit.trajectories import make_group


async def test_a_wait_that_ends_at_its_deadline_names_the_gate_and_what_it_holds():
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.01 s for a batch: 3 of 16 are there"):
        await within(0.01, asyncio.Event().wait(), "a batch", lambda: "3 of 16 are there")


async def test_a_timeout_inside_the_awaited_work_is_not_taken_for_the_deadline():
    async def work():
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await within(5, work(), "work")


async def test_a_cancelled_wait_cancels_what_it_waited_for():
    cancelled = asyncio.Event()

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    waiting = asyncio.ensure_future(within(60, work(), "work"))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.wait_for(cancelled.wait(), 1)


def test_a_rate_is_written_with_its_numerator_and_denominator(tmp_path):
    log = MetricsLog(tmp_path, tensorboard=False, wandb=False, config={})
    log.write(3, {"reward/mean": Rate(numerator=3, denominator=4), "idle/policy": Rate(numerator=0, denominator=0)})
    log.close()
    (line,) = read_metrics(tmp_path)
    assert line["step"] == 3
    assert (line["reward/mean"], line["reward/mean/numerator"], line["reward/mean/denominator"]) == (
        0.75,
        3,
        4,
    )
    assert line["idle/policy"] is None


def test_a_number_that_is_not_finite_is_null_in_json(tmp_path):
    log = MetricsLog(tmp_path, tensorboard=False, wandb=False, config={})
    log.write(0, {"loss/policy": float("nan")})
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss/policy"] is None


def test_metrics_reach_tensorboard(tmp_path):
    log = MetricsLog(tmp_path, tensorboard=True, wandb=False, config={})
    log.write(1, {"reward/mean": 0.5})
    log.close()
    assert list((tmp_path / "tensorboard").iterdir())


def test_age_metrics_are_taken_over_trajectories():
    metrics = age_metrics([make_group("g0", versions=(2, 3)), make_group("g1", versions=(3, 3))], 4)
    assert metrics["age/mean"].value == 1.5
    assert metrics["age/max"] == 2
    assert metrics["age/histogram"] == {"1": 2, "2": 2}


def test_reward_metrics_hold_every_part():
    metrics = reward_metrics(
        [Score(reward=1.0, parts={"a": 1.0, "b": 0.0}), Score(reward=0.0, parts={"a": 0.0, "b": 0.0})]
    )
    assert metrics["reward/mean"].value == 0.5
    assert metrics["reward/std"] == 0.5
    assert metrics["reward/a/mean"].value == 0.5
    assert reward_metrics([]) == {}


def record(tmp_path, *, resume=False, **options):
    folder = tmp_path / "run"
    claim, _ = claim_folder(folder, resume=resume)
    settings = {"tensorboard": False, "wandb": False, "rollouts_per_step": None} | options
    return folder, Recorder(
        folder, config_yaml="a: 1\n", config={"a": 1}, progress=make_progress("none", 2, "t"), claim=claim, **settings
    )


async def test_a_run_folder_holds_config_metrics_rollouts_and_summary(tmp_path):
    folder, recorder = record(tmp_path)
    with recorder:
        await recorder.on_step(0, {"eval/reward": Rate(numerator=1, denominator=4)}, [])
        await recorder.on_step(1, {"reward/mean": 0.5, "ledger/trained": 2}, [make_group("g0")])
        await recorder.on_step(2, {"eval/reward": Rate(numerator=3, denominator=4)}, [make_group("g1")])
        recorder.on_end({"ledger/trained": 4, "ledger/filtered/zero_variance": 2})
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["exit_reason"] == "completed"
    assert summary["eval/reward"] == {"before": 0.25, "after": 0.75}
    assert summary["steps"] == 2
    assert summary["ledger/trained"] == 4
    assert (folder / "config.yaml").read_text() == "a: 1\n"
    rollouts = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert [r["trajectory"] for r in rollouts] == ["g0/0", "g0/1", "g1/0", "g1/1"]
    assert rollouts[2]["age"] == 1


async def test_rollouts_are_sampled_evenly_when_there_are_too_many(tmp_path):
    folder, recorder = record(tmp_path, rollouts_per_step=2)
    with recorder:
        await recorder.on_step(1, {}, [make_group("g0", members=4), make_group("g1", members=4)])
    rollouts = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert [r["trajectory"] for r in rollouts] == ["g0/0", "g1/0"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("boom"), "failed"),
        (KeyboardInterrupt(), "interrupted"),
        (asyncio.CancelledError(), "interrupted"),
    ],
)
def test_the_summary_says_why_a_run_ended(tmp_path, error, reason):
    folder, recorder = record(tmp_path)
    with pytest.raises(type(error)), recorder:
        raise error
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["exit_reason"] == reason
    assert summary["error"] == ("RuntimeError: boom" if reason == "failed" else None)


def test_an_earlier_run_is_moved_aside_and_not_overwritten(tmp_path):
    moved = []
    for _ in range(3):
        folder, recorder = record(tmp_path)
        with recorder:
            pass
        claim, old = claim_folder(folder, resume=False)
        claim.close()
        moved.append(old)
        assert {p.name for p in folder.iterdir()} == {".lock"}
    assert len(set(moved)) == 3
    assert all((old / "summary.json").exists() for old in moved)


def test_a_folder_belongs_to_one_run_at_a_time(tmp_path):
    claim, _ = claim_folder(tmp_path / "run", resume=False)
    for resume in (False, True):
        with pytest.raises(ConfigError, match=r"run\.dir=.*in use by another run"):
            claim_folder(tmp_path / "run", resume=resume)
    claim.close()
    assert claim_folder(tmp_path / "run", resume=True)[1] is None


def test_curves_are_drawn_even_from_a_run_without_steps(tmp_path):
    draw_curves([], tmp_path / "none.png", "t")
    lines = [
        {"step": 0, "eval/reward": 0.2},
        {
            "step": 1,
            "reward/mean": 0.3,
            "idle/trainer/numerator": 1,
            "idle/trainer/denominator": 2,
            "age/histogram": {"0": 3, "1": 1},
        },
    ]
    draw_curves(lines, tmp_path / "curves.png", "t")
    assert age_histogram(lines) == {0: 3, 1: 1}
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_plain_lines_are_few_however_many_steps_there_are(capsys):
    progress = make_progress("plain", 1000, "a run")
    for step in range(1001):
        progress.step({"step": step, "eval/reward": 0.5 if step == 333 else None})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 70
    assert any(line.startswith("step 333/1000") for line in lines)
    assert lines[-1].startswith("step 1000/1000")


@pytest.mark.parametrize("mode", ["live", "plain", "none"])
def test_every_display_takes_every_event(mode, capsys):
    progress = make_progress(mode, 2, "a run")
    progress.phase("starting")
    progress.note("something")
    progress.step({"step": 1, "reward/mean": 0.5, "eval/reward": None, "ledger/trained": 4})
    progress.close()
    out = capsys.readouterr().out
    assert ("0.500" in out) == (mode != "none")


def test_a_rate_over_several_steps_is_a_quotient_of_sums():
    lines = [
        {"step": 1, "idle/trainer/numerator": 1, "idle/trainer/denominator": 1},
        {"step": 2, "idle/trainer/numerator": 0, "idle/trainer/denominator": 3},
        {"step": 3, "idle/trainer/numerator": 0, "idle/trainer/denominator": 1},
    ]
    assert windowed_rate(lines, "idle/trainer", 2) == ([1, 2, 3], [1.0, 0.25, 0.0])


async def test_a_resumed_run_goes_on_in_the_same_files_without_the_steps_it_does_again(tmp_path):
    folder, recorder = record(tmp_path)
    with recorder:
        for step in (1, 2, 3):
            await recorder.on_step(step, {"reward/mean": step / 10}, [make_group(f"g{step}")])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')  # the run was killed while it wrote this line
    resumed = Recorder(
        folder,
        config_yaml="",
        config={},
        progress=make_progress("none", 4, "t"),
        tensorboard=False,
        wandb=False,
        rollouts_per_step=None,
        first_step=2,
    )
    with resumed:
        await resumed.on_step(3, {"reward/mean": 0.9}, [make_group("g9")])
    assert [line["reward/mean"] for line in read_metrics(folder)] == [0.1, 0.2, 0.9]


async def test_a_resume_that_its_record_refuses_changes_nothing_in_the_run_folder(tmp_path):
    folder, recorder = record(tmp_path, record=HEADER)
    with recorder:
        for step in (1, 2, 3):
            await recorder.on_step(step, {}, [make_group(f"g{step}")])
    before = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    with pytest.raises(ConfigError, match=r"policy\.sampling\.temperature is 0\.5"):
        record(tmp_path, record=dataclasses.replace(HEADER, temperature=0.5), first_step=2, resume=True)
    assert {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()} == before
