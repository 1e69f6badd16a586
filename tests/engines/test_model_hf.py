"""Models from Hugging Face folders: the same numbers as transformers, the same tensors back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from forgelite.config import ModelConfig
from forgelite.errors import ConfigError, WeightMismatch
from forgelite.model.device import prepare_torchtitan
from tests.engines.tiny import VOCAB, model_config, save_llama, save_qwen3, save_qwen3_moe

pytestmark = pytest.mark.engine

CPU = torch.device("cpu")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FOLDERS: dict[str, Callable[[Path], Path]] = {
    "llama": save_llama,
    "llama tied": lambda folder: save_llama(folder, tie_word_embeddings=True),
    "llama head_dim": lambda folder: save_llama(folder, head_dim=32, rms_norm_eps=1e-3),
    "llama scaled rope": lambda folder: save_llama(folder, rope_parameters=LLAMA3_ROPE),
    "qwen3 tied": save_qwen3,
    "qwen3 untied": lambda folder: save_qwen3(folder, tie_word_embeddings=False),
}


@pytest.fixture(scope="module", autouse=True)
def _torchtitan() -> None:
    prepare_torchtitan()


@pytest.fixture(scope="module", params=list(FOLDERS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FOLDERS[request.param](tmp_path_factory.mktemp("model"))


def _define(config: ModelConfig):
    from forgelite.model.spec import define_model

    return define_model(config, device=CPU, max_seq_len=64)


def _built(folder: Path):
    from forgelite.model.build import build_model

    definition = _define(model_config(folder))
    return definition, build_model(definition, 0, CPU)


def test_logits_are_those_of_transformers(folder: Path) -> None:
    from forgelite.model.attention import attention_masks

    _, model = _built(folder)
    tokens = torch.randint(0, VOCAB, (3, 40), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(40).expand(3, 40)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        hidden = model(tokens, positions=positions, attention_masks=attention_masks(model, positions))
        torch.testing.assert_close(model.lm_head(hidden), theirs(tokens).logits, rtol=0, atol=1e-4)


def test_exported_tensors_are_the_loaded_ones_bit_for_bit(folder: Path) -> None:
    from forgelite.model.hf import export_hf

    definition, model = _built(folder)
    exported = dict(export_hf(model, definition.spec))
    original = load_file(folder / "model.safetensors")
    assert exported.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(exported[name], tensor), name


def test_a_written_folder_loads_in_transformers_with_the_same_weights(folder: Path, tmp_path: Path) -> None:
    from forgelite.model.hf import export_hf, write_hf_folder

    definition, model = _built(folder)
    (folder / "tokenizer.json").write_text("{}")
    write_hf_folder(tmp_path / "out", definition, export_hf(model, definition.spec))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    first = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert again.keys() == first.keys()
    assert all(torch.equal(again[name], first[name]) for name in first)
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_mixture_of_experts_comes_back_bit_for_bit_and_computes_the_same_in_bfloat16(
    tmp_path: Path,
) -> None:
    from forgelite.model.attention import attention_masks
    from forgelite.model.hf import export_hf

    definition, model = _built(save_qwen3_moe(tmp_path))
    exported, original = dict(export_hf(model, definition.spec)), load_file(tmp_path / "model.safetensors")
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], original[name]) for name in original)
    tokens = torch.randint(0, VOCAB, (3, 40), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(40).expand(3, 40)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        hidden = model(tokens, positions=positions, attention_masks=attention_masks(model, positions))
        difference = (model.lm_head(hidden) - theirs(tokens).logits).abs()
    assert difference.mean() < 0.02  # torchtitan's experts compute in bfloat16, a few tokens are routed otherwise


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


def test_a_failed_write_leaves_the_folder_as_it_was(llama: Path, tmp_path: Path) -> None:
    from forgelite.model.hf import write_hf_folder

    definition = _define(model_config(llama))

    def failing():
        yield "model.norm.weight", torch.ones(4)
        raise RuntimeError("disk full")

    write_hf_folder(tmp_path / "out", definition, [("model.norm.weight", torch.zeros(4))])
    with pytest.raises(RuntimeError, match="disk full"):
        write_hf_folder(tmp_path / "out", definition, failing())
    assert load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"].tolist() == [0.0] * 4
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_weights_in_several_files_are_read_as_one(llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from forgelite.model import hf

    definition, model = _built(llama)
    monkeypatch.setattr(hf, "_SHARD_BYTES", 50_000)
    hf.write_hf_folder(tmp_path / "out", definition, hf.export_hf(model, definition.spec))
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    again, first = hf.read_hf(tmp_path / "out"), hf.read_hf(llama)
    assert again.keys() == first.keys()
    assert all(torch.equal(again[name], first[name]) for name in first)
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "missing model.norm.weight"),
        (lambda t: t.update({"model.layers.2.foo": torch.ones(1)}), "unexpected model.layers.2.foo"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(3)}),
            r"model.norm.weight is \(3,\), not \(64,\)",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_an_error_that_names_the_tensor(
    llama: Path, tmp_path: Path, change: Callable[[dict], object], message: str
) -> None:
    tensors = load_file(llama / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    with pytest.raises(WeightMismatch, match=message):
        _built(tmp_path)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("architectures", ["GPT2LMHeadModel"], "GPT2LMHeadModel is not supported"),
        ("attention_bias", True, "attention_bias=True"),
        ("mlp_bias", True, "mlp_bias=True"),
        ("hidden_act", "gelu", "hidden_act='gelu'"),
        ("use_sliding_window", True, "use_sliding_window=True"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}, "rope scaling 'yarn'"),
        ("rope_scaling", {"type": "dynamic", "factor": 2.0}, "rope scaling 'dynamic'"),
        ("quantization_config", {"quant_method": "fp8"}, "quantization_config"),
    ],
)
def test_what_cannot_be_reproduced_is_refused_by_name(
    llama: Path, tmp_path: Path, option: str, value: object, message: str
) -> None:
    config = json.loads((llama / "config.json").read_text())
    if option == "rope_scaling":
        del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config | {option: value}))
    with pytest.raises(ConfigError, match=message):
        _define(model_config(tmp_path))


def test_older_config_files_with_rope_theta_give_the_same_model(llama: Path, tmp_path: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": theta, "rope_scaling": None}))
    assert _define(model_config(tmp_path)).arch == _define(model_config(llama)).arch


def test_a_folder_that_is_not_the_named_model_is_refused_with_the_differences(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not model\.name=llama3 model\.flavor=1B.*dim: 64 against 2048"):
        _define(ModelConfig(path=str(llama), name="llama3", flavor="1B"))


@pytest.mark.parametrize(
    ("name", "flavor", "message"),
    [
        ("gpt_oss", "20b", "model.name=gpt_oss"),
        ("qwen3", "7B", "model.flavor=7B is not one of qwen3's: debugmodel"),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(name: str, flavor: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _define(ModelConfig(name=name, flavor=flavor, tokenizer="unused"))


def test_a_sequence_longer_than_the_model_allows_is_refused(llama: Path) -> None:
    from forgelite.model.spec import define_model

    with pytest.raises(ConfigError, match="seq_len=129 exceeds the model's 128 positions"):
        define_model(model_config(llama), device=CPU, max_seq_len=129)


@pytest.mark.parametrize(
    ("name", "flavor"), [("llama3", "debugmodel"), ("llama3", "1B"), ("qwen3", "0.6B"), ("qwen3", "30B-A3B")]
)
def test_a_named_model_survives_the_way_through_a_config_file(name: str, flavor: str) -> None:
    from forgelite.model.hf_config import architecture_of

    definition = _define(ModelConfig(name=name, flavor=flavor, tokenizer="unused"))
    assert architecture_of(definition.hf_config, "here") == definition.arch


def test_the_same_seed_gives_the_same_random_weights() -> None:
    from forgelite.model.build import starting_weights

    definition = _define(ModelConfig(name="llama3", flavor="debugmodel", tokenizer="unused"))
    first, again, other = (starting_weights(definition, seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
