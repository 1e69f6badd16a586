"""Rows, prompts, and the order in which they come."""

from __future__ import annotations

import json
from functools import partial
from itertools import cycle

import pytest

from forgelite.errors import ConfigError
from forgelite.rollout.dataset import PromptStream, check_column, load_rows
from forgelite.rollout.demonstration import Demonstrations, demonstration
from forgelite.rollout.tokenizer import load_tokenizer, prompt_maker, read_vocab_size
from forgelite.types import Prompt
from tests.unit.fakes import CharTokenizer


def stream(count: int = 5, *, seed: int = 0, shuffle: bool = True) -> PromptStream:
    return PromptStream(
        [{"prompt": str(i)} for i in range(count)],
        to_prompt=prompt_maker(CharTokenizer(), "prompt"),
        seed=seed,
        shuffle=shuffle,
    )


def take(prompts: PromptStream, count: int) -> list[str]:
    return [next(prompts).text for _ in range(count)]


def test_every_epoch_holds_every_row_once_in_an_order_of_its_own():
    epochs = [take(prompts, 20) for prompts in [stream(20)] for _ in range(3)]
    assert all(sorted(e, key=int) == [str(i) for i in range(20)] for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_depends_on_the_seed_alone():
    assert take(stream(20, seed=1), 40) == take(stream(20, seed=1), 40)
    assert take(stream(20, seed=1), 20) != take(stream(20, seed=2), 20)
    assert take(stream(4, shuffle=False), 6) == ["0", "1", "2", "3", "0", "1"]


def test_a_walk_can_be_taken_up_at_any_place():
    first = stream(7)
    take(first, 10)
    first.give_back(Prompt(prompt_id="3", text="3", token_ids=(1,)))
    second = stream(7)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert take(second, 12) == take(first, 12)


def test_a_prompt_that_is_given_back_comes_first():
    prompts = stream(5)
    prompt = next(prompts)
    prompts.give_back(prompt)
    assert next(prompts) == prompt


def test_rows_come_from_a_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    assert load_rows(str(path), {}, "data.train") == [{"prompt": "a"}, {"prompt": "b"}]


def test_rows_come_from_a_function():
    assert len(load_rows("apps.toy.task:problems", {"count": 3, "seed": 0}, "data.train")) == 3


def test_an_empty_dataset_is_an_error_that_names_the_key(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n")
    with pytest.raises(ConfigError, match=r"data\.train: .*has no rows"):
        load_rows(str(path), {}, "data.train")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.jsonl", "cannot read"),
        ("no.module:f", "cannot import"),
        ("apps.toy.task:nothing", "has no nothing"),
    ],
)
def test_a_source_that_is_not_there_is_named(source, message):
    with pytest.raises(ConfigError, match=rf"data\.train: .*{message}"):
        load_rows(source, {}, "data.train")


def test_a_line_that_is_not_json_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt"\n')
    with pytest.raises(ConfigError, match="line 2"):
        load_rows(str(path), {}, "data.train")


def test_a_row_without_a_prompt_is_named():
    with pytest.raises(ConfigError, match=r"row 4 has NoneType in column 'prompt'"):
        prompt_maker(CharTokenizer(), "prompt")("4", {"text": "a"})


def test_a_model_folder_that_is_missing_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path: there is no folder"):
        load_tokenizer(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"model\.path: there is no model"):
        read_vocab_size(tmp_path)


def test_a_demonstration_trains_the_answer_and_its_end_alone():
    prompt = Prompt(prompt_id="0", text="ab", token_ids=(7, 8), row={"answer": "cd"})
    trajectory = demonstration(prompt, tokenizer=CharTokenizer(), column="answer", max_tokens=8)
    assert trajectory.token_ids == [7, 8, ord("c") % 50, ord("d") % 50, 1]
    assert trajectory.loss_mask == [False, False, True, True, True]


def test_demonstrations_that_do_not_fit_are_left_out_and_counted():
    prompts = [Prompt(prompt_id=str(i), text="ab", token_ids=(7, 8), row={"answer": "c" * i}) for i in range(4)]
    make = partial(demonstration, tokenizer=CharTokenizer(), column="answer", max_tokens=4)
    stream = Demonstrations(cycle(prompts), make, rows=4)
    assert [next(stream).trajectory_id for _ in range(4)] == ["0", "1", "0", "1"]
    assert stream.skipped == 2


def test_a_dataset_of_which_nothing_fits_is_an_error_that_names_the_key():
    prompts = [Prompt(prompt_id="0", text="ab", token_ids=(7, 8), row={"answer": "cdef"})]
    make = partial(demonstration, tokenizer=CharTokenizer(), column="answer", max_tokens=4)
    with pytest.raises(ConfigError, match=r"not one of 1 demonstrations fits trainer\.training\.seq_len"):
        next(Demonstrations(cycle(prompts), make, rows=1))


def test_every_row_is_checked_before_a_run_starts():
    rows = [{"prompt": "a"}, {"prompt": 3}]
    with pytest.raises(ConfigError, match=r"data\.prompt: row 1 has int in column 'prompt', not str or list"):
        check_column(rows, "prompt", (str, list), "data.prompt")
