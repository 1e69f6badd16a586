"""Agents that talk to the endpoint: what they say is recorded token by token, and training on it is on policy."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import BadRequestError, OpenAI
from transformers import AutoModelForCausalLM

from forgelite.observe.metrics import read_metrics
from tests.apps import RunningApp, run_app, running_app
from tests.e2e.tool_model import CALL, FOUND, QUESTIONS, save_tool_model

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TOOLS = [
    {
        "type": "function",
        "function": {"name": "lookup", "parameters": {"type": "object", "properties": {"key": {"type": "string"}}}},
    }
]


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tool_model(tmp_path_factory.mktemp("tool") / "model")


def config(folder: Path, tree: dict[str, Any]) -> Path:
    path = folder / "config.yaml"
    path.write_text(json.dumps(tree))  # JSON is YAML
    return path


POLICY = {"sampling": {"max_tokens": 12}, "engine": {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 32}}


def test_an_agent_of_the_agents_sdk_is_trained_on_the_tokens_it_sampled(tool_model: Path, tmp_path: Path):
    run = tmp_path / "run"
    written = config(
        tmp_path,
        {
            "run": {"dir": str(run)},
            "model": {"path": str(tool_model)},
            "data": {"train": "tests.e2e.tool_model:rows"},
            "rollout": {"harness": "tests.e2e.agent_harness:play", "timeout_s": 60},
            "loop": {
                **{"steps": 2, "depth": 0, "max_policy_age": 0, "groups_per_step": 2, "group_size": 4},
                "filter_zero_variance": False,
            },
            "policy": POLICY,
            "reward": {"functions": [{"path": "forgelite.scoring.rewards:environment_reward"}]},
            "advantage": {"name": "reward"},
            "trainer": {"training": {"seq_len": 256, "local_batch_size": 2}, "optimizer": {"lr": 1.0e-4}},
            "metrics": {"tensorboard": False, "rollouts_per_step": None},
        },
    )
    finished = run_app("apps.grpo.main", "--config", str(written))
    assert finished.returncode == 0, finished.output
    steps = [line for line in read_metrics(run) if "tokens/trained" in line]
    assert len(steps) == 2
    for line in steps:
        assert line["mismatch/logprob_abs_max"] < 1e-4
        assert line["ratio/max"] == pytest.approx(1, abs=1e-4)
        assert line["age/max"] == 0
        assert line["ledger/failed"] == 0
    rollouts = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    assert len(rollouts) == 16
    assert sum(r["completion"] == CALL + FOUND and r["reward"] == 1.0 for r in rollouts) >= 8  # both turns in one


@pytest.fixture(scope="module")
def served(tool_model: Path, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("serve")
    written = config(folder, {"model": {"path": str(tool_model)}, "policy": POLICY, "endpoint": {"port": 0}})
    with running_app(folder / "log", "apps.serve.main", "--config", str(written)) as app:
        app.wait_for_output("serving ")
        yield app


def client_of(app: RunningApp, **headers: str) -> OpenAI:
    (address,) = re.findall(r"at (http://\S+/v1)", app.output)
    return OpenAI(base_url=address, api_key="none", default_headers=headers, max_retries=0)


def test_the_openai_client_plays_two_turns_with_a_tool_and_they_are_recorded_exactly(
    served: RunningApp, tool_model: Path
):
    with client_of(served, **{"X-Session-Id": "two turns"}) as client:
        messages: list[Any] = [{"role": "user", "content": QUESTIONS[0]}]
        asked = client.chat.completions.create(
            model="policy", messages=messages, tools=TOOLS, temperature=1.0, seed=3, logprobs=True
        )
        (choice,) = asked.choices
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("lookup", {"key": "it"})
        messages += [choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "7"}]
        stream = client.chat.completions.create(
            model="policy", messages=messages, tools=TOOLS, temperature=0, stream=True
        )
        said = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert said == FOUND
        recorded = client.get("/sessions/two turns", cast_to=object)
    (trajectory,) = recorded["trajectories"]
    trained = [i for i, m in enumerate(trajectory["loss_mask"]) if m]
    assert trajectory["completion_text"] == CALL + FOUND
    assert [p.logprob for p in choice.logprobs.content] == [trajectory["logprobs"][i] for i in trained[:2]]
    assert largest_gap(tool_model, trajectory, trained[:2]) < 1e-4  # those of the greedy turn have logprob 0


@torch.no_grad()
def largest_gap(folder: Path, trajectory: dict[str, Any], places: list[int]) -> float:
    """Between the recorded logprobs and those of a fresh forward pass."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([trajectory["token_ids"]])
    logprobs = model(ids).logits[0].log_softmax(-1)
    fresh = [logprobs[i - 1, trajectory["token_ids"][i]].item() for i in places]
    return max(abs(a - trajectory["logprobs"][i]) for a, i in zip(fresh, places, strict=True))


def test_the_engine_samples_as_it_is_told(served: RunningApp):
    with client_of(served) as client:
        (model,) = client.models.list()
        assert (model.id, model.max_model_len) == ("policy", 256)
        ask = client.completions.create
        whole = ask(model="policy", prompt="ab", max_tokens=8, n=2, seed=1, temperature=1.5, extra_body=IDS)
        again = ask(model="policy", prompt="ab", max_tokens=8, n=2, seed=1, temperature=1.5, extra_body=IDS)
        assert [c.token_ids for c in whole.choices] == [c.token_ids for c in again.choices]
        assert whole.choices[0].token_ids != whole.choices[1].token_ids
        assert whole.choices[0].prompt_token_ids == whole.choices[1].prompt_token_ids
        long = ask(model="policy", prompt="ab", max_tokens=9, extra_body=IDS | {"ignore_eos": True}).choices[0]
        assert (len(long.token_ids), long.finish_reason) == (9, "length")
        assert long.weight_versions == [{"version": 0, "start": 0, "end": 9}]
        greedy = ask(model="policy", prompt="ab", max_tokens=9, temperature=0, extra_body=IDS)
        top_1 = ask(model="policy", prompt="ab", max_tokens=9, extra_body=IDS | {"top_k": 1})
        assert greedy.choices[0].token_ids == top_1.choices[0].token_ids
        with pytest.raises(BadRequestError, match="leaves no room") as refused:
            ask(model="policy", prompt="a" * 256)
        assert refused.value.code == "context_length_exceeded"


IDS = {"return_token_ids": True}


def test_a_stop_text_ends_the_engine_and_the_text_before_it(served: RunningApp):
    with client_of(served) as client:
        call = {"id": "c", "type": "function", "function": {"name": "lookup", "arguments": '{"key": "it"}'}}
        asked = client.chat.completions.create(
            model="policy",
            messages=[
                {"role": "user", "content": QUESTIONS[0]},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": "7"},
            ],
            tools=TOOLS,
            temperature=0,
            stop=[" is"],
            extra_body=IDS,
        )
        (choice,) = asked.choices
        assert (choice.message.content, choice.finish_reason) == ("it", "stop")
        assert len(choice.token_ids) == len("it is")  # a token a byte, those of the stop text included


def test_ctrl_c_ends_the_endpoint_cleanly(served: RunningApp):
    """The last test of this process."""
    served.process.send_signal(signal.SIGINT)
    assert served.wait(30) == 130, served.output
    assert "Traceback" not in served.output
    assert "Unhandled" not in served.output
