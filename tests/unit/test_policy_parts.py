"""The small parts of the policy: seeds, the environment, the schema of a checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from forgelite.config import SamplingConfig, UpdateConfig
from forgelite.errors import ConfigError, WeightMismatch
from forgelite.policy.engine import build_engine
from forgelite.policy.environment import policy_environment
from forgelite.policy.seeds import MemberSeeds, continued
from forgelite.policy.weights_loading import read_schema
from forgelite.types import GroupRequest, SamplingParams


def request(request_id: str = "g", *, n: int = 4, seed: int | None = None) -> GroupRequest:
    sampling = SamplingParams(max_tokens=1, seed=seed)
    return GroupRequest(request_id=request_id, prompt_ids=(1,), sampling=sampling, n=n)


@given(seed=st.integers(-(2**63), 2**63 - 1), engine_seed=st.integers(0, 2**32))
def test_a_given_seed_repeats_everywhere_as_one_that_torch_takes(seed: int, engine_seed: int) -> None:
    seeds = MemberSeeds(engine_seed).of(request("here", seed=seed), version=0)

    assert MemberSeeds(0).of(request("there", seed=seed), version=7) == seeds
    for each in seeds:
        torch.Generator().manual_seed(each)


def test_members_of_groups_with_neighbouring_seeds_share_no_seed() -> None:
    source = MemberSeeds(0)
    seeds = {each for seed in range(100) for each in source.of(request(n=16, seed=seed), version=0)}

    assert len(seeds) == 1600


def test_a_drawn_seed_differs_by_engine_seed_version_id_and_repetition() -> None:
    def drawn(engine_seed: int) -> list[int]:
        source = MemberSeeds(engine_seed)
        return [
            *source.of(request("a"), version=0),
            *source.of(request("b"), version=0),
            *source.of(request("a"), version=0),
            *source.of(request("a"), version=1),
        ]

    assert len({*drawn(0), *drawn(1)}) == 32
    assert drawn(0) == drawn(0)


def test_drawn_seeds_go_on_differing_when_too_many_ids_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forgelite.policy.seeds._MOST_IDS", 3)
    source = MemberSeeds(0)
    seeds = [source.of(request(name, n=1), version=0)[0] for name in "abcdabcdaaaa"]

    assert len(set(seeds)) == 12


def test_drawn_seeds_do_not_depend_on_the_order_of_arrival() -> None:
    first, second = MemberSeeds(0), MemberSeeds(0)
    a, b = first.of(request("a"), version=0), first.of(request("b"), version=0)

    assert second.of(request("b"), version=0) == b
    assert second.of(request("a"), version=0) == a


def test_a_continuation_has_a_seed_for_each_place_at_which_it_can_begin() -> None:
    seeds = [continued(7, tokens) for tokens in range(100)]

    assert seeds[0] == 7
    assert len(set(seeds)) == 100
    assert seeds == [continued(7, tokens) for tokens in range(100)]
    for each in seeds:
        torch.Generator().manual_seed(each)


@pytest.mark.parametrize("mode", ["drain", "abort", "barrier"])
def test_keys_are_kept_in_flight_only(mode: str) -> None:
    assert UpdateConfig(mode="in_flight", kv="keep").kv == "keep"
    assert UpdateConfig(mode=mode).kv == "recompute"
    with pytest.raises(ValueError, match=f"policy.update.kv=keep means nothing with policy.update.mode={mode}"):
        UpdateConfig(mode=mode, kv="keep")


def test_an_empty_stop_text_is_refused_in_the_configuration() -> None:
    assert SamplingConfig(max_tokens=4, stop=["END"]).stop == ["END"]
    with pytest.raises(ValueError, match=r"policy\.sampling\.stop holds an empty text"):
        SamplingConfig(max_tokens=4, stop=["END", ""])


def test_the_environment_differs_by_device_and_refuses_an_unknown_one() -> None:
    assert policy_environment("cpu")["TORCH_COMPILE_DISABLE"] == "1"
    assert "TORCH_COMPILE_DISABLE" not in policy_environment("cuda")
    with pytest.raises(ValueError, match="tpu"):
        policy_environment("tpu")


def test_an_engine_is_not_built_in_a_process_without_that_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    with pytest.raises(ConfigError, match=r"spawn it with .*policy_environment\(\)"):
        build_engine(tmp_path, engine={}, seed=0)


def test_the_client_and_the_loop_import_neither_torch_nor_vllm_nor_monarch() -> None:
    program = (
        "import sys, forgelite.policy.client, forgelite.policy.engine_loop, forgelite.policy.environment\n"
        "print({'torch', 'vllm', 'monarch'} & set(sys.modules))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "set()"


@pytest.fixture
def folder(tmp_path):
    tensors = {"model.embed_tokens.weight": torch.ones(4, 2), "model.norm.weight": torch.ones(2)}
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    return tmp_path


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {
        "model.embed_tokens.weight": torch.ones(4, 2, dtype=dtype),
        "model.norm.weight": torch.ones(2, dtype=dtype),
    }


def test_weights_may_come_in_the_dtype_of_the_engine_or_of_the_checkpoint_and_no_other(folder) -> None:
    schema = read_schema(folder, tied_head=False, engine_dtype=torch.float32)
    schema.check(tensors(torch.float32))
    schema.check(tensors(torch.bfloat16))
    with pytest.raises(WeightMismatch, match=r"model\.norm\.weight is torch\.float16"):
        schema.check(tensors(torch.float16))


def test_a_tied_head_may_be_sent_along_when_it_is_the_embedding(folder) -> None:
    schema = read_schema(folder, tied_head=True, engine_dtype=torch.float32)
    schema.check(tensors())
    schema.check(tensors() | {"lm_head.weight": torch.ones(4, 2)})
    with pytest.raises(WeightMismatch, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        schema.check(tensors() | {"lm_head.weight": torch.zeros(4, 2)})


def test_an_untied_model_takes_no_head_that_its_checkpoint_does_not_have(folder) -> None:
    schema = read_schema(folder, tied_head=False, engine_dtype=torch.float32)
    with pytest.raises(WeightMismatch, match=r"unexpected: lm_head.weight"):
        schema.check(tensors() | {"lm_head.weight": torch.ones(4, 2)})


def test_all_faults_of_a_set_are_listed_at_once_and_long_lists_are_cut(folder) -> None:
    schema = read_schema(folder, tied_head=False, engine_dtype=torch.float32)
    wrong = {f"stranger.{index}": torch.ones(1) for index in range(12)}
    wrong["model.embed_tokens.weight"] = torch.ones(4, 3)
    with pytest.raises(WeightMismatch) as raised:
        schema.check(wrong)
    message = str(raised.value)
    assert "missing: model.norm.weight" in message
    assert "and 4 more" in message
    assert "model.embed_tokens.weight is (4, 3), not (4, 2)" in message


def test_a_folder_without_safetensors_is_a_configuration_error(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"holds no \*.safetensors"):
        read_schema(tmp_path, tied_head=False, engine_dtype=torch.float32)


def test_quantised_weights_are_a_configuration_error(tmp_path) -> None:
    save_file({"w": torch.ones(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="not quantised"):
        read_schema(tmp_path, tied_head=False, engine_dtype=torch.float32)
