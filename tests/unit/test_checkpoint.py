"""A run goes on from its checkpoint as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forgelite.buffer.ledger import State
from forgelite.checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint
from forgelite.errors import ForgeliteError
from tests.unit.fakes import make_run


class Files:
    """A trainer whose whole state is its version."""

    def __init__(self, version: int = 0) -> None:
        self.version = version

    async def save(self, folder: str) -> None:
        self._write(Path(folder))

    async def load(self, folder: str) -> int:
        self._read(Path(folder))
        return self.version

    def _write(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "version").write_text(str(self.version))

    def _read(self, folder: Path) -> None:
        self.version = int((folder / "version").read_text())


async def run_until(steps, states, **options):
    async def save(state):
        states.append(json.loads(json.dumps(state)))

    run = make_run(steps=steps, save=save, save_every=1, **options)
    await run.loop.run()
    return run


async def test_a_resumed_run_trains_every_queued_sample_once_and_loses_no_prompt():
    states = []
    await run_until(6, states, depth=2, max_policy_age=3)
    saved = next(s for s in states if s["queue"] and s["prompts"]["given_back"])
    resumed = make_run(steps=6, depth=2, max_policy_age=3)
    resumed.loop.load_state_dict(saved)
    resumed.trainer.version = resumed.policy.version = saved["version"]
    queued = [t["trajectory_id"] for g in saved["queue"] for t in g["trajectories"]]
    handed_back = list(saved["prompts"]["given_back"])
    await resumed.loop.run()
    trained = [t.trajectory_id for _, groups in resumed.recorder.groups for g in groups for t in g.trajectories]
    assert trained[: len(queued)] == queued
    assert len(set(trained)) == len(trained) == (6 - saved["version"]) * 3 * 2
    prompts = [g.prompt.prompt_id for _, groups in resumed.recorder.groups for g in groups]
    assert {str(p) for p in handed_back} <= set(prompts)
    ledger = resumed.loop.ledger
    assert ledger.count(State.TRAINED) == 6 * 3 * 2
    assert ledger.metrics().get("ledger/cancelled/resume", 0) == 2 * len(handed_back)


async def test_the_next_batch_after_resume_is_the_one_that_would_have_come():
    states = []
    run = await run_until(12, states, depth=2, max_policy_age=3)
    at = next(i for i, s in enumerate(states) if len(s["queue"]) >= 3)
    resumed = make_run(steps=at + 2, depth=2, max_policy_age=3)
    resumed.loop.load_state_dict(states[at])
    resumed.trainer.version = resumed.policy.version = at + 1
    await resumed.loop.run()
    assert resumed.trainer.batches[0][1].token_ids.equal(run.trainer.batches[at + 1][1].token_ids)


async def test_the_newest_complete_checkpoint_is_found_and_old_ones_go(tmp_path):
    for version in (1, 2, 3):
        await save_checkpoint({"version": version}, folder=tmp_path, trainer=Files(version), keep=2)
    (tmp_path / ".step-000004").mkdir()  # a run was killed while it wrote this one
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-000002", "step-000003"]
    trainer = Files()
    assert (await load_checkpoint(newest_checkpoint(tmp_path), trainer))["version"] == 3
    assert trainer.version == 3


async def test_no_checkpoint_is_none(tmp_path):
    assert newest_checkpoint(tmp_path / "nothing") is None


async def test_halves_of_different_versions_are_refused(tmp_path):
    await save_checkpoint({"version": 2}, folder=tmp_path, trainer=Files(1), keep=1)
    with pytest.raises(ForgeliteError, match="trainer is at version 1, the loop at 2"):
        await load_checkpoint(newest_checkpoint(tmp_path), Files())
