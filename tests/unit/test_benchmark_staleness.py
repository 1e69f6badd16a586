"""What the staleness benchmark makes of its runs. The runs themselves need engines; `--quick` does a few."""

from __future__ import annotations

import pytest

from benchmarks.staleness import METHODS, Run, configuration, draw, report_rows
from benchmarks.staleness_training import Curve, PolicyInProcess
from forgelite.policy.client import PolicyClient
from tests.unit.version_engine import VersionEngine, request, started_loops

CURVES = {
    Run(method=method, age=age, seed=seed, steps=4, lr=2e-4): Curve(
        steps=[0, 2, 4], accuracy=[0.25, 0.5, 0.5 + 0.25 * seed], seconds=1.0, ess=1.0
    )
    for method in METHODS
    for age in (0, 8)
    for seed in (0, 1)
}


def test_every_method_has_a_case_for_every_age_with_the_mean_over_the_seeds():
    rows = {row.case: row for row in report_rows(CURVES)}
    assert rows.keys() == {"warm_start", *(f"accuracy_{method}_age_{age}" for method in METHODS for age in (0, 8))}
    assert rows["warm_start"].value == 0.25
    assert rows["accuracy_opsm_age_8"].value == 0.625
    assert rows["accuracy_opsm_age_8"].note == "0.5 to 0.75 in 2"


def test_the_picture_is_drawn(tmp_path):
    draw(CURVES, tmp_path / "pictures" / "curves.png")
    assert (tmp_path / "pictures" / "curves.png").stat().st_size > 10_000


def test_the_runs_take_everything_but_age_and_loss_from_the_toy():
    config = configuration(Run(method="none", age=8, seed=3, steps=7, lr=1e-3))
    assert (config.run.seed, config.loop.steps, config.trainer.optimizer.lr) == (3, 7, 1e-3)
    assert (config.loop.groups_per_step, config.loop.group_size) == (16, 8)


@pytest.mark.parametrize("name", ["none", "token_tis", "decoupled_ppo", "opsm", "gspo", "clip"])
def test_only_the_method_without_correction_would_be_refused_for_an_asynchronous_run(name):
    assert METHODS[name].corrects_gap == (name != "none")


async def test_the_engine_in_this_process_answers_every_call_of_the_client():
    with started_loops() as start:
        client = PolicyClient(PolicyInProcess(start(VersionEngine())))
        await client.update_weights(3, {"w": 3})
        (completion,) = await client.generate_group(request("g0"))
        await client.abort("g0")
        assert (completion.token_ids, await client.version()) == ([3, 3, 3, 3], 3)
        assert (await client.stats()).generated_tokens == 4
        await client.close()
