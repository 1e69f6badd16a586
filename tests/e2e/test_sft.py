"""The SFT app as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from apps.toy.task import problems
from forgelite.observe.metrics import read_metrics
from tests.apps import run_app

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_the_held_out_loss_falls_and_is_in_the_summary(warm_start: Path):
    summary = json.loads((warm_start / "summary.json").read_text())
    assert summary["exit_reason"] == "completed"
    assert summary["steps"] == 300
    assert summary["eval/loss"]["after"] < 0.4 < 3.0 < summary["eval/loss"]["before"]


def test_every_step_has_a_line_of_metrics(warm_start: Path):
    lines = read_metrics(warm_start)
    assert [line["step"] for line in lines] == list(range(301))
    assert all(line["loss/cross_entropy"] > 0 for line in lines[1:])


def test_the_model_loads_in_transformers_and_has_learned_three_answers(warm_start: Path):
    folder = warm_start / "checkpoints" / "hf"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    rows = problems(200, seed=99)
    prompts = torch.tensor([tokenizer.encode(row["prompt"], add_special_tokens=False) for row in rows])
    generated = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=6, do_sample=False)
    answers = [tokenizer.decode(g[6:], skip_special_tokens=True) for g in generated]
    known = [
        answer in (row["answer"], row["prompt"][:-1], row["prompt"][4::-1])
        for answer, row in zip(answers, rows, strict=True)
    ]
    assert sum(known) > 0.8 * len(rows)
    assert sum(answer == row["answer"] for answer, row in zip(answers, rows, strict=True)) < 0.4 * len(rows)


def test_a_model_by_name_with_random_weights_gets_the_tokenizer_it_was_given(toy_base: Path, tmp_path: Path):
    finished = run_app(
        "apps.sft.main",
        *("--config", "configs/sft/toy.yaml", f"run.dir={tmp_path / 'run'}", "model.path=null"),
        *("model.name=qwen3", "model.flavor=debugmodel", f"model.tokenizer={toy_base}"),
        *("loop.steps=1", "loop.batch_size=8", "eval.max_prompts=8"),
    )
    assert finished.returncode == 0, finished.output
    folder = tmp_path / "run" / "checkpoints" / "hf"
    assert AutoTokenizer.from_pretrained(folder).encode("abc", add_special_tokens=False) == [2, 3, 4]
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3"
