"""What is checked before an endpoint is opened, and what its guide says."""

from __future__ import annotations

import ast
import logging
import re
from pathlib import Path

import pytest

from forgelite.config import EndpointConfig, GRPOConfig, ServeConfig, describe_keys, load_config
from forgelite.errors import ConfigError
from forgelite.policy.openai.app import create_app
from forgelite.serving import open_endpoint
from forgelite.types import SamplingParams
from tests.unit.openai_fakes import make_endpoint

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "endpoint.md").read_text()


def serve_config(*overrides: str) -> ServeConfig:
    return load_config(ServeConfig, ROOT / "configs/serve/toy.yaml", overrides)


def test_the_toy_is_served_to_this_machine_only_unless_told_otherwise():
    config = serve_config()
    assert (config.endpoint.host, config.endpoint.port, config.endpoint.api_key_env) == ("127.0.0.1", 8000, None)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("endpoint.port=70000", r"endpoint\.port"),
        ("endpoint.key=x", r"endpoint\.key: unknown key"),
        ("mesh.trainer_gpus=0", r"mesh\.trainer_gpus: unknown key"),
        ("policy.update.mode=drain", r"policy\.update: unknown key"),
        ("policy.sampling.temperature=0.005", r"temperature=0\.005 is below 0\.01"),
    ],
)
def test_a_wrong_key_is_one_error_that_names_it(override: str, message: str):
    with pytest.raises(ConfigError, match=message):
        serve_config(override)


def test_who_only_serves_may_sample_greedily_and_from_a_truncated_distribution():
    sampling = serve_config("policy.sampling.temperature=0", "policy.sampling.top_p=0.9").policy.sampling
    assert (sampling.temperature, sampling.top_p) == (0.0, 0.9)
    for override in ("policy.sampling.temperature=0", "policy.sampling.top_p=0.9"):
        with pytest.raises(ConfigError, match=override.partition("=")[0].replace(".", r"\.")):
            load_config(GRPOConfig, ROOT / "configs/grpo/toy.yaml", [override])


def test_gpus_that_do_not_divide_among_the_replicas_are_refused():
    with pytest.raises(ConfigError, match=r"mesh\.policy_gpus=0,1,2 names 3 GPUs"):
        serve_config("mesh.policy_gpus=0,1,2", "policy.replicas=2")


def test_a_rollout_is_played_by_an_environment_or_by_a_harness():
    overrides = ["rollout.environment=a:b", "rollout.harness=c:d"]
    with pytest.raises(ConfigError, match=r"rollout\.environment=a:b and rollout\.harness=c:d"):
        load_config(GRPOConfig, ROOT / "configs/grpo/toy.yaml", overrides)


def test_a_key_that_is_not_in_the_environment_is_an_error(monkeypatch: pytest.MonkeyPatch, toy_folder: Path):
    from forgelite.preparation import prepare_serving

    config = serve_config("endpoint.api_key_env=FORGELITE_TEST_KEY", f"model.path={toy_folder}")
    monkeypatch.delenv("FORGELITE_TEST_KEY", raising=False)
    with pytest.raises(ConfigError, match="FORGELITE_TEST_KEY"):
        prepare_serving(config)
    monkeypatch.setenv("FORGELITE_TEST_KEY", "secret")
    tokenizer, sampling, key = prepare_serving(config)
    assert key == "secret"
    assert sampling == SamplingParams(max_tokens=16, stop_token_ids=(tokenizer.eos_token_id,))


@pytest.fixture
def toy_folder(tmp_path: Path) -> Path:
    from apps.toy.main import VOCABULARY, build_tokenizer

    build_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(f'{{"vocab_size": {len(VOCABULARY)}}}')
    return tmp_path


@pytest.mark.parametrize(("host", "key", "warned"), [("0.0.0.0", None, 1), ("0.0.0.0", "k", 0), ("127.0.0.1", None, 0)])
async def test_an_open_door_is_warned_of(host: str, key: str | None, warned: int, caplog: pytest.LogCaptureFixture):
    fake = make_endpoint()
    with caplog.at_level(logging.WARNING, logger="forgelite.serving"):
        async with open_endpoint(
            fake.policy,
            settings=EndpointConfig(host=host, port=0),
            tokenizer=fake.policy.tokenizer,
            sampling=SamplingParams(max_tokens=4),
            max_model_len=64,
            api_key=key,
            request_timeout_s=5.0,
        ) as endpoint:
            assert endpoint.base_url.startswith(f"http://{host}:")
    assert caplog.text.count("asks for no key") == warned


def test_the_guide_names_every_route():
    app = create_app(None)  # type: ignore[arg-type]
    paths = {r.path for r in app.routes if r.path.startswith(("/v1", "/health"))}
    assert {p.replace("{session_id:path}", "<id>") for p in paths} == set(re.findall(r"`\w+ (/[\w/<>]+)`", GUIDE))


def test_the_guide_names_keys_that_exist():
    known = {key for schema in (GRPOConfig, ServeConfig) for key, *_ in describe_keys(schema)}
    named = set(re.findall(r"\b(?:endpoint|policy|rollout|loop|run)\.[a-z_]+(?:\.[a-z_]+)?\b", GUIDE))
    sections = {"policy.sampling"}
    assert named - sections <= known


def test_the_programs_in_the_guide_are_valid():
    for program in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL):
        ast.parse(program)
