"""The record of a run: what is written comes back, whole steps only."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from forgelite.errors import ConfigError, ForgeliteError
from forgelite.observe.metrics import Rate
from forgelite.observe.recording import RecordHeader, RecordWriter, check_header, open_record, read_batch, read_header
from forgelite.types import Group, Prompt, Score
from tests.unit.trajectories import make_group

HEADER = RecordHeader(
    model_type="llama",
    vocab_size=45,
    tokenizer="9f2c",
    temperature=1.0,
    groups_per_step=2,
    group_size=2,
    advantage={"name": "group_normalised"},
)


def write(folder: Path, steps: int, **options) -> RecordWriter:
    """A record in `<folder>/record` with `steps` steps of two groups."""
    writer = RecordWriter(folder / "record", HEADER, **options)
    for step in range(1, steps + 1):
        writer.write(step, [make_group(f"g{step}"), make_group(f"g{step + 100}", versions=(0, step - 1))], {})
    return writer


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def test_a_batch_comes_back_as_it_was_trained(tmp_path):
    group = make_group("g7", members=3, versions=(1, 1, 2))
    for i, trajectory in enumerate(group.trajectories):
        trajectory.logprobs = [float(np.float32(x)) for x in trajectory.logprobs]
        trajectory.reference_logprobs = [0.0, 0.0, -0.5, -0.25, -0.125 * i]
        trajectory.loss_mask[2] = i != 1
        trajectory.score = Score(reward=0.1 * i, parts={"exact": 0.1 * i})
        trajectory.completion_text = "äß 語\n"
        trajectory.advantage = 1 / 3
    empty = Group(group_id="g8", prompt=Prompt(prompt_id="8", text="x", token_ids=(3,)), trajectories=[])
    rewards = {"reward/mean": Rate(numerator=3, denominator=8), "reward/std": 0.5}
    RecordWriter(tmp_path / "record", HEADER).write(1, [group, empty], rewards)

    batch = read_batch(open_record(tmp_path), 1)

    assert batch.groups == [group, empty]
    assert batch.rewards == rewards


def test_a_record_says_how_long_and_how_old_its_samples_are(tmp_path):
    write(tmp_path, 3)
    record = open_record(tmp_path)
    assert (record.steps, record.longest, record.oldest, record.has_reference) == (3, 5, 2, False)
    assert record.header == HEADER
    assert record.torn is None


def test_a_record_is_found_by_its_own_folder_too(tmp_path):
    write(tmp_path, 1)
    assert open_record(tmp_path / "record").steps == 1


def test_a_last_file_that_was_cut_short_is_left_out_and_named(tmp_path):
    write(tmp_path, 3)
    cut_short(tmp_path / "record" / "step-000003.safetensors")
    record = open_record(tmp_path)
    assert (record.steps, record.torn) == (2, "step-000003.safetensors")


def test_a_file_in_the_middle_that_was_cut_short_is_an_error_that_names_it(tmp_path):
    write(tmp_path, 3)
    cut_short(tmp_path / "record" / "step-000002.safetensors")
    with pytest.raises(ConfigError, match=r"step-000002\.safetensors cannot be read"):
        open_record(tmp_path)


def test_a_missing_step_is_an_error_that_names_it(tmp_path):
    write(tmp_path, 3)
    (tmp_path / "record" / "step-000002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"step 2 is missing .* the next one there is 3"):
        open_record(tmp_path)


def test_a_run_that_died_while_it_wrote_leaves_whole_steps(tmp_path):
    write(tmp_path, 2)
    (tmp_path / "record" / "step-000003.4711.tmp").write_bytes(b"half a st")
    assert open_record(tmp_path).steps == 2


def test_a_resumed_run_writes_its_steps_once(tmp_path):
    write(tmp_path, 4)
    writer = RecordWriter(tmp_path / "record", HEADER, first_step=2)
    assert open_record(tmp_path).steps == 2
    writer.write(3, [make_group("g9")], {})
    assert [g.group_id for g in read_batch(open_record(tmp_path), 3).groups] == ["g9"]


def test_a_run_that_was_resumed_without_the_record_of_its_first_steps_is_told_so(tmp_path):
    with pytest.raises(ConfigError, match=r"loop\.record=true with run\.resume=true: step 1 of 3"):
        RecordWriter(tmp_path / "record", HEADER, first_step=3)
    assert not (tmp_path / "record").exists()
    write(tmp_path, 2)
    with pytest.raises(ConfigError, match="step 3 of 3"):
        RecordWriter(tmp_path / "record", HEADER, first_step=3)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"model_type": "qwen3"}, r"model\.path \(the model's family\) is llama.*made with qwen3"),
        ({"vocab_size": 46}, r"model\.path \(vocab_size\) is 45.*made with 46"),
        ({"tokenizer": "0000"}, r"model\.tokenizer .* is 9f2c.*made with 0000"),
        ({"temperature": 0.5}, r"policy\.sampling\.temperature is 1\.0.*made with 0\.5"),
        ({"groups_per_step": 4}, r"loop\.groups_per_step is 2.*made with 4"),
        ({"group_size": 4}, r"loop\.group_size is 2.*made with 4"),
        ({"advantage": {"name": "reward"}}, r"advantage is .*group_normalised.*made with .*reward"),
    ],
)
def test_a_record_of_something_else_is_refused_by_the_key_that_differs(tmp_path, change, key):
    with pytest.raises(ConfigError, match=key):
        check_header(dataclasses.replace(HEADER, **change), HEADER, tmp_path)


def test_a_run_does_not_go_on_in_the_record_of_another_model(tmp_path):
    write(tmp_path, 1)
    with pytest.raises(ConfigError, match=r"vocab_size"):
        RecordWriter(tmp_path / "record", dataclasses.replace(HEADER, vocab_size=99), first_step=1)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "colour": "red"}'])
def test_a_header_that_is_none_is_an_error_that_names_the_file(tmp_path, text):
    (tmp_path / "header.json").write_text(text)
    with pytest.raises(ConfigError, match=r"header\.json is not the header of a record"):
        read_header(tmp_path)


def test_a_folder_without_a_record_is_an_error_that_says_how_to_make_one(tmp_path):
    with pytest.raises(ConfigError, match=r"no record in .*loop\.record=true"):
        open_record(tmp_path)


def test_a_step_that_cannot_be_written_is_an_error_that_names_the_file_and_leaves_none(tmp_path):
    writer = write(tmp_path, 1)
    (tmp_path / "record").rename(tmp_path / "gone")
    with pytest.raises(ForgeliteError, match=r"loop\.record=true.*step-000002\.safetensors could not be written"):
        writer.write(2, [make_group("g2")], {})
    assert open_record(tmp_path / "gone").steps == 1
