"""Training from a record, and sampling without training, on fakes."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from forgelite.config import AdvantageConfig, GRPOConfig, LoopConfig, load_config
from forgelite.errors import ConfigError, ForgeliteError
from forgelite.generation import BatchCounter, FrozenPolicy, untrained
from forgelite.loop import Loop
from forgelite.observe.metrics import Rate
from forgelite.observe.recording import Record, RecordWriter, open_record, read_batch
from forgelite.replay import check_replay, train_from_record
from forgelite.rollout.episode import Rollout
from forgelite.scoring.group import score_group
from forgelite.scoring.reward import RewardSample
from forgelite.types import Group, SamplingParams, Score, TrainingBatch
from tests.unit.fakes import CharTokenizer, CountingTrainer, Recorder, make_run
from tests.unit.test_recording import HEADER
from tests.unit.trajectories import make_group

TOY = Path(__file__).parents[2] / "configs/grpo/toy.yaml"


def record_run(folder: Path, told: Recorder) -> Record:
    """The record of a run, from what its observer was told."""
    writer = RecordWriter(folder / "record", HEADER)
    for (step, metrics), (_, groups) in zip(told.lines, told.groups, strict=True):
        if groups:
            writer.write(step, groups, {k: v for k, v in metrics.items() if k.startswith("reward/")})
    return open_record(folder)


def record_of(folder: Path, *batches: Sequence[Group]) -> Record:
    """A record of these batches."""
    writer = RecordWriter(folder / "record", HEADER)
    for step, groups in enumerate(batches, 1):
        writer.write(step, groups, {"reward/mean": Rate(numerator=1, denominator=4)})
    return open_record(folder)


async def replay(record: Record, **options) -> tuple[CountingTrainer, Recorder]:
    """Train the whole record."""
    trainer, recorder = CountingTrainer(random.Random(0)), Recorder()
    loop = {"steps": record.steps, "max_policy_age": 8, **options.pop("loop", {})}
    trainer.version = options.get("resumed", {}).get("version", 0)
    await train_from_record(
        record, config=LoopConfig(**loop), row_length=64, trainer=trainer, observer=recorder, **options
    )
    return trainer, recorder


def same(a: TrainingBatch, b: TrainingBatch) -> bool:
    pairs = ((getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return all(x is y is None or torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("depth", [0, 1, 3])
async def test_a_replay_trains_the_very_batches_of_the_recorded_run(tmp_path, depth):
    run = make_run(seed=depth, depth=depth, max_policy_age=depth, steps=6)
    await run.loop.run()

    trainer, recorder = await replay(record_run(tmp_path, run.recorder), loop={"max_policy_age": depth})

    assert [version for version, _ in trainer.batches] == list(range(6))
    assert all(same(a, b) for (_, a), (_, b) in zip(trainer.batches, run.trainer.batches, strict=True))
    for (step, line), (_, before) in zip(recorder.lines, run.recorder.lines, strict=True):
        for name in ("version", "age/mean", "age/max", "age/histogram", "reward/mean", "reward/std"):
            assert line[name] == before[name], (step, name)


async def test_the_rewards_of_a_step_are_the_recorded_ones_filtered_samples_included(tmp_path):
    _, recorder = await replay(record_of(tmp_path, [make_group("g0")]))
    assert recorder.lines[0][1]["reward/mean"] == Rate(numerator=1, denominator=4)


async def test_a_lower_bound_on_age_rejects_and_counts(tmp_path):
    young, old = make_group("g2", versions=(1, 1)), make_group("g1", versions=(0, 1))
    record = record_of(tmp_path, [make_group("g0")], [old, young])
    trainer, recorder = await replay(record, loop={"max_policy_age": 0})
    assert recorder.final["ledger/trained"] == 4
    assert recorder.final["ledger/rejected/stale"] == 2
    assert recorder.final["ledger/issued"] == 6
    assert recorder.lines[1][1]["age/max"] == 0
    assert trainer.batches[1][1].trained_tokens == 4


async def test_stale_tokens_are_masked_where_the_configuration_says_so(tmp_path):
    record = record_of(tmp_path, [make_group("g0")], [make_group("g1", versions=(0, 1, 1))])
    trainer, _ = await replay(record, loop={"max_policy_age": 0, "on_stale": "mask_tokens"})
    assert trainer.batches[1][1].trained_tokens == 4


async def test_a_batch_of_which_nothing_is_young_enough_ends_the_replay_with_the_reason(tmp_path):
    record = record_of(tmp_path, [make_group("g0")], [make_group("g1", versions=(0, 0))])
    recorder = Recorder()
    with pytest.raises(ForgeliteError, match=r"step 2 .*all 2 samples.*loop\.max_policy_age=0 \(the oldest: 1\)"):
        await train_from_record(
            record,
            config=LoopConfig(steps=2, max_policy_age=0),
            row_length=64,
            trainer=CountingTrainer(random.Random(0)),
            observer=recorder,
        )
    assert recorder.final["ledger/trained"] == recorder.final["ledger/rejected"] == 2


async def test_a_step_that_fails_trains_nothing(tmp_path):
    class Failing(CountingTrainer):
        async def train_step(self, batch):
            raise ForgeliteError("the loss is nan")

    recorder = Recorder()
    with pytest.raises(ForgeliteError, match="the loss is nan"):
        await train_from_record(
            record_of(tmp_path, [make_group("g0")]),
            config=LoopConfig(steps=1),
            row_length=64,
            trainer=Failing(random.Random(0)),
            observer=recorder,
        )
    assert recorder.final["ledger/trained"] == 0
    assert recorder.final["ledger/cancelled/run_ended"] == 2


async def test_a_resumed_replay_goes_on_with_the_next_step(tmp_path):
    record = record_of(tmp_path, *([make_group(f"g{i}")] for i in range(4)))
    saved: list[dict] = []

    async def save(state):
        saved.append(state)

    await replay(record, loop={"steps": 2}, save=save, save_every=2)
    trainer, recorder = await replay(record, resumed=saved[-1])
    assert [version for version, _ in trainer.batches] == [2, 3]
    assert recorder.final["ledger/trained"] == 8


def toy(*overrides: str) -> GRPOConfig:
    return load_config(GRPOConfig, TOY, overrides)


@pytest.mark.parametrize(
    ("change", "overrides", "message"),
    [
        ({"steps": 12}, [], r"loop\.steps=40, but .* holds 12 steps: set loop\.steps=12"),
        ({"longest": 49}, [], r"trainer\.training\.seq_len=48, but .* 49 tokens"),
        (
            {"has_reference": False},
            ["loss.kl_coefficient=0.1"],
            r"loss\.kl_coefficient=0\.1 .*reference\.enabled=false",
        ),
    ],
)
def test_a_record_that_does_not_hold_what_is_asked_for_is_refused(change, overrides, message):
    enough = Record(folder=Path("r"), header=HEADER, steps=40, longest=48, oldest=1, has_reference=True)
    check_replay(enough, toy(*overrides))
    with pytest.raises(ConfigError, match=message):
        check_replay(dataclasses.replace(enough, **change), toy(*overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loop.replay=runs/a", "loop.generate_only=true"], r"loop\.replay .*loop\.generate_only .*take one"),
        (["loop.replay=runs/a", "loop.record=true"], r"loop\.replay with loop\.record=true"),
        (["loop.replay=runs/a", "run.dir=runs/a"], r"loop\.replay=runs/a lies in run\.dir=runs/a"),
        (["loop.replay=runs/a/record", "run.dir=runs/a"], r"loop\.replay=runs/a/record lies in run\.dir=runs/a"),
        (["loop.replay=runs/a", "loss={name: reinforce}", "loop.depth=0"], r"loop\.replay.*loss\.name=reinforce"),
        (["loop.generate_only=true", "run.resume=true"], r"run\.resume=true with loop\.generate_only=true"),
        (["loop.generate_only=true", "checkpoint.every=5"], r"checkpoint\.every=5 with loop\.generate_only=true"),
    ],
)
def test_modes_that_contradict_each_other_are_refused_by_their_keys(overrides, message):
    with pytest.raises(ConfigError, match=message):
        toy(*overrides)


@pytest.mark.parametrize("depth", [0, 2, None])
async def test_sampling_alone_records_every_batch_by_version_0_and_rejects_nothing(tmp_path, depth):
    rng, recorder, fakes = random.Random(0), Recorder(), make_run(steps=5)

    async def score(samples: Sequence[RewardSample]) -> list[Score]:
        return [Score(reward=rng.random()) for _ in samples]

    rollout = Rollout(
        generator=fakes.policy, tokenizer=CharTokenizer(), sampling=SamplingParams(max_tokens=6), seed=0, max_tokens=64
    )
    scoring = {"reference": None, "advantage": AdvantageConfig(), "drop_group_on_failure": False}
    await Loop(
        config=untrained(LoopConfig(steps=5, depth=depth, max_policy_age=1, groups_per_step=3, group_size=2)),
        row_length=64,
        prompts=fakes.prompts,
        roll_out=rollout.run,
        score_group=partial(score_group, score=score, filter_zero_variance=True, **scoring),
        trainer=BatchCounter(),
        policy=FrozenPolicy(fakes.policy),
        observer=recorder,
    ).run()

    record = record_run(tmp_path, recorder)
    assert (record.steps, record.oldest) == (5, 4)
    groups = [group for step in range(1, 6) for group in read_batch(record, step).groups]
    assert len(groups) == 15
    assert {s.version for g in groups for t in g.trajectories for s in t.spans} == {0}
    assert recorder.final["ledger/rejected"] == 0
    assert [line["version"] for _, line in recorder.lines] == [0] * 5
