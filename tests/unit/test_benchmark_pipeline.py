"""The simulated stations of `benchmarks.pipeline`, against times and ages worked out by hand."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from rich.console import Console

from benchmarks.pipeline import goal_rows, main
from benchmarks.pipeline_advise import Candidate, Question, advise
from benchmarks.pipeline_lengths import Lengths
from benchmarks.pipeline_policy import BLOCK, Engine, SimulatedPolicy
from benchmarks.pipeline_simulation import Scenario, simulate
from benchmarks.pipeline_stations import Rewards, Trainer
from benchmarks.pipeline_studies import goals, studies
from benchmarks.pipeline_tables import histogram
from benchmarks.table import is_met
from benchmarks.virtual_clock import run_virtual
from forgelite.types import VersionSpan

ENGINE = Engine(slots=4, tokens_per_s=200.0, sequence_tokens_per_s=100.0, pause_s=0.0)  # 50 tokens/s in a full slot


def simulated(policy: SimulatedPolicy, work) -> float:
    """Run `work(policy)`; returns the simulated seconds that it took."""

    async def run() -> float:
        await work(policy)
        return asyncio.get_running_loop().time()

    return run_virtual(run())


async def finish(answers) -> None:
    await asyncio.gather(*(answer.done for answer in answers))


def test_a_sequence_alone_is_sampled_at_its_own_rate():
    async def work(policy):
        await finish(policy.start("g0", [1000]))

    assert simulated(SimulatedPolicy(ENGINE), work) == pytest.approx(10.0, rel=1e-4)


def test_sequences_beyond_the_slots_wait_for_one():
    async def work(policy):
        await finish(policy.start("g0", [1000] * 8))

    assert simulated(SimulatedPolicy(ENGINE), work) == pytest.approx(40.0, rel=1e-4)  # 8,000 tokens at 200 a second


def test_a_sequence_is_faster_when_others_have_ended():
    async def work(policy):
        await finish(policy.start("g0", [500, 1000]))

    step_of_two = ENGINE.step_s(2)
    assert simulated(SimulatedPolicy(ENGINE), work) == pytest.approx(500 * step_of_two + 500 / 100, rel=1e-4)


def test_spans_say_which_version_wrote_which_tokens():
    async def work(policy):
        (answer,) = policy.start("g0", [20 * BLOCK])
        await asyncio.sleep(5 * BLOCK / 100)  # five entries are written
        await policy.update_weights(1)
        await finish([answer])
        tokens, spans = policy.entries(answer)
        assert tokens == [BLOCK] * 20
        assert spans == [VersionSpan(version=0, start=0, end=5), VersionSpan(version=1, start=5, end=20)]
        (later,) = policy.start("g1", [BLOCK + 1])
        await finish([later])
        assert policy.entries(later) == ([BLOCK, 1], [VersionSpan(version=1, start=0, end=2)])

    simulated(SimulatedPolicy(ENGINE), work)


def test_an_entry_is_as_old_as_its_first_token():
    async def work(policy):
        (answer,) = policy.start("g0", [3 * BLOCK])
        await asyncio.sleep(1.5 * BLOCK / 100)
        await policy.update_weights(1)
        await finish([answer])
        assert policy.entries(answer)[1][0] == VersionSpan(version=0, start=0, end=2)

    simulated(SimulatedPolicy(ENGINE), work)


def test_nothing_is_generated_during_the_pause_of_an_update():
    async def work(policy):
        answers = policy.start("g0", [100])
        await policy.update_weights(1)
        await finish(answers)

    paused = dataclasses.replace(ENGINE, pause_s=3.0)
    assert simulated(SimulatedPolicy(paused), work) == pytest.approx(4.0, rel=1e-4)


def test_recomputing_the_cache_takes_as_long_as_the_context_needs():
    async def work(policy):
        answers = policy.start("g0", [1000])
        await asyncio.sleep(5.0)  # 500 tokens of context
        await policy.update_weights(1)
        await finish(answers)

    recomputing = dataclasses.replace(ENGINE, recompute_tokens_per_s=250.0)
    assert simulated(SimulatedPolicy(recomputing), work) == pytest.approx(12.0, rel=1e-4)


@pytest.mark.parametrize("how", ["the task that waits for it", "the policy"])
def test_a_cancelled_answer_frees_its_slot(how):
    async def work(policy):
        async def wait():
            answers = policy.start("g0", [10_000] * 4)
            try:
                await finish(answers)
            finally:
                policy.take_out(answers)

        task = asyncio.create_task(wait())
        await asyncio.sleep(1.0)
        assert (await policy.usage()).first_versions == {"g0": 0}
        if how == "the policy":
            await policy.cancel("g0")
        else:
            task.cancel()
        await asyncio.wait([task])
        assert (await policy.usage()).first_versions == {}
        await finish(policy.start("g1", [1000] * 4))

    assert simulated(SimulatedPolicy(ENGINE), work) == pytest.approx(1.0 + 20.0, rel=1e-4)


def test_an_engine_that_is_faster_full_than_alone_is_refused():
    with pytest.raises(ValueError, match="4 slots that share 800 tokens/s run faster than one sequence alone"):
        Engine(slots=4, tokens_per_s=800.0, sequence_tokens_per_s=100.0)


@pytest.mark.parametrize("text", ["constant:1000", "normal:1000,100", "lognormal:1000,1.0", "pareto:1000,3"])
def test_lengths_have_the_mean_that_is_written(text):
    assert Lengths(text=text, longest=10**9).mean() == pytest.approx(1000, rel=0.03)


def test_lengths_are_cut_at_the_longest(tmp_path):
    (tmp_path / "lengths.txt").write_text("10\n30\n")
    assert Lengths(text=f"file:{tmp_path / 'lengths.txt'}", longest=20).mean() == pytest.approx(15, rel=0.03)


@pytest.mark.parametrize("text", ["zipf:3", "lognormal:800", "pareto:800,1", "constant:-5", "normal:a,b", "constant:"])
def test_lengths_that_name_no_distribution_are_refused(text):
    with pytest.raises(ValueError, match=f"lengths '{text}'"):
        Lengths(text=text, longest=100).mean()


def small(**changes) -> Scenario:
    """8 groups of 4 a step, 8 slots, 40 s of generation and 40 s of training a step at the bound."""
    loop = {"groups_per_step": 8, "group_size": 4, "depth": 2, "max_policy_age": 4, **changes.pop("loop", {})}
    fields = {
        "lengths": Lengths(text="lognormal:1000,1.0", longest=8192),
        "engine": Engine(slots=8, tokens_per_s=800.0, sequence_tokens_per_s=120.0),
        "trainer": Trainer(tokens_per_s=800.0),
        "rewards": Rewards(),
        "seconds": 800.0,
    }
    return Scenario(**{**fields, **changes}, loop=loop)


def test_a_synchronous_step_takes_generation_and_training_and_the_update():
    scenario = small(
        lengths=Lengths(text="constant:1000", longest=8192),
        engine=Engine(slots=32, tokens_per_s=800.0, sequence_tokens_per_s=120.0, pause_s=1.0),
        trainer=Trainer(tokens_per_s=800.0, publish_s=2.0),
        rewards=Rewards(mean_s=5.0, sigma=0.0),
        loop={"depth": 0, "max_policy_age": 0},
    )
    outcome = simulate(scenario)
    assert outcome.bound_s == pytest.approx(40.0 * outcome.steps)
    assert outcome.elapsed_s == pytest.approx((40 + 5 + 40 + 2 + 1) * outcome.steps, rel=1e-4)
    assert outcome.trainer_idle == pytest.approx(48 / 88, rel=1e-3)
    assert outcome.ages == {0: outcome.trained_samples}


def test_a_scenario_repeats_itself():
    first, second = (dataclasses.replace(simulate(small()), controller_s=0.0) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("selection", ["fifo", "windowed", "freshest"])
@pytest.mark.parametrize("bound", [1, 2])
def test_no_simulated_sample_is_older_than_the_bound(selection, bound):
    outcome = simulate(small(loop={"selection": selection, "max_policy_age": bound, "depth": 4}))
    assert max(outcome.ages) <= bound


def test_samples_that_are_not_trained_are_accounted_for():
    outcome = simulate(small(loop={"max_policy_age": 1}, rewards=Rewards(failed_share=0.05)))
    assert 0 < outcome.rejected_share < 0.5
    assert outcome.closed["failed/simulated"] > 0


def test_stragglers_hold_up_a_synchronous_run_unless_they_are_cut():
    late = Rewards(straggling_share=0.05, straggling_s=1000.0)
    waits, cuts = (
        simulate(small(loop={"depth": 0, "complete_at": complete_at}, rewards=late)) for complete_at in (None, 3)
    )
    assert cuts.elapsed_s < 0.6 * waits.elapsed_s
    assert cuts.cut_share > 0.2


def test_the_goals_are_met_on_a_few_steps():
    study = goals(300.0)
    outcomes = {label: simulate(scenario) for label, scenario in study.rows.items()}
    rows = {row.case: row for row in goal_rows(outcomes, outcomes["tail, asynchronous",])}
    del rows["controller_us_per_sample"]  # a time of this machine
    assert {case: is_met(row) for case, row in rows.items() if row.goal is not None} == dict.fromkeys(
        ("efficiency_depth2", "async_over_sync_tail", "rejected_share_paced"), True
    )


def test_every_scenario_has_a_configuration_that_the_loop_takes():
    for study in studies(60.0):
        for label, scenario in study.rows.items():
            assert len(label) == len(study.columns)
            assert scenario.loop_config(10).steps == 10


def test_a_histogram_ends_with_all_that_are_older():
    assert histogram({0: 1, 1: 6, 7: 2, 9: 1}) == "10 60 0 0 0 0 30"


QUESTION = Question(
    generate_tokens_per_s=6000.0,
    train_tokens_per_s=3000.0,
    lengths=Lengths(text="constant:500", longest=8192),
    gpus=3,
    slots=96,
    sequence_tokens_per_s=None,
    groups_per_step=8,
    group_size=4,
    reward_s=1.0,
    max_age=2,
    seconds=100.0,
)


def test_the_advice_balances_the_stations_with_the_youngest_samples():
    console = Console(width=160, record=True, quiet=True)
    best = advise(QUESTION, console, processes=1)
    assert best.generating == 1  # of 3: 2,000 tokens/s on either side
    assert isinstance(best, Candidate)
    assert 1 <= best.depth <= best.max_policy_age <= 2


def test_a_question_without_rates_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--advise", "--lengths", "lognormal:800,1.0"])
    assert "--advise needs --generate-tokens-per-s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--sequence-tokens-per-s=5", "512 slots that share 4000 tokens/s run faster than one sequence alone"),
        ("--max-age=-1", "--max-age"),
        ("--group-size=0", "--group-size 0 must be at least 1"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused_by_its_option(capsys, option, message):
    with pytest.raises(SystemExit):
        main(["--advise", "--generate-tokens-per-s=4000", "--train-tokens-per-s=2500", option])
    assert message in capsys.readouterr().err


def test_the_command_prints_an_answer(capsys):
    rates = ["--generate-tokens-per-s", "4000", "--train-tokens-per-s", "2500"]
    small_run = ["--lengths", "constant:500", "--groups-per-step", "4", "--slots", "32", "--seconds", "50"]
    main(["--advise", *rates, *small_run, "--max-age", "1", "--processes", "1"])
    assert "Take: loop.depth=1 loop.max_policy_age=1" in capsys.readouterr().out
