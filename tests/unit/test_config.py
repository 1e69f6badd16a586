"""One typed tree: YAML, overrides, checks that name the keys."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from forgelite.config import GRPOConfig, SFTConfig, describe_keys, load_config, to_yaml
from forgelite.errors import ConfigError

ROOT = Path(__file__).parents[2]
TOY = ROOT / "configs/grpo/toy.yaml"


@pytest.mark.parametrize("path", sorted((ROOT / "configs/grpo").glob("*.yaml")), ids=lambda p: p.name)
def test_every_grpo_config_loads(path):
    assert load_config(GRPOConfig, path).loop.steps > 0


@pytest.mark.parametrize("path", sorted((ROOT / "configs/sft").glob("*.yaml")), ids=lambda p: p.name)
def test_every_sft_config_loads(path):
    assert load_config(SFTConfig, path).loop.steps > 0


def test_an_override_replaces_a_value():
    config = load_config(GRPOConfig, TOY, ["loop.depth=3", "loop.max_policy_age=5", "loss.kl_coefficient=0.5"])
    assert (config.loop.depth, config.loop.max_policy_age, config.loss.kl_coefficient) == (3, 5, 0.5)


def test_null_is_no_depth():
    assert load_config(GRPOConfig, TOY, ["loop.depth=null"]).loop.depth is None


def test_an_override_reaches_into_a_list():
    config = load_config(GRPOConfig, TOY, ["reward.functions.0.timeout_s=2.5"])
    assert config.reward.functions[0].timeout_s == 2.5


def test_an_override_reaches_engine_arguments_by_vllm_s_names():
    config = load_config(GRPOConfig, TOY, ["policy.engine.max_num_seqs=7", "policy.engine.block_size=64"])
    assert config.policy.engine["max_num_seqs"] == 7
    assert config.policy.engine["block_size"] == 64


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("loop.dpeth=1", r"loop\.dpeth: unknown key \(did you mean loop\.depth\?\)"),
        ("nonsense=1", r"nonsense: unknown key"),
        ("loop.depth=two", r"loop\.depth: .*given: 'two'"),
        ("loop.depth=-1", r"loop\.depth: .*given: -1"),
        ("trainer.optimizer.lr=fast", r"trainer\.optimizer\.lr: "),
        ("loop.sync_every=3", r"loop\.sync_every=3.*loop\.depth=1"),
        ("loop.group_size=1", r"loop\.group_size=1.*filters every group"),
        ("loss.clip_low=2", r"loss\.clip_low: .*given: 2"),
        ("loss.clipp_low=0.1", r"loss\.clipp_low: unknown key \(did you mean loss\.clip_low\?\)"),
        ("loss.name=nonsense", r"loss: .*clip"),
        ("weights.transfer_dtype=bfloat16", r"weights\.transfer_dtype=bfloat16.*policy\.engine\.dtype=float32"),
        ("policy.engine.dtype=auto", r"policy\.engine\.dtype=auto.*float32, bfloat16 or float16"),
        ("policy.sampling.top_p=0.9", r"policy\.sampling\.top_p=0\.9.*biased"),
        ("policy.sampling.top_k=5", r"policy\.sampling\.top_k=5.*biased"),
        ("policy.sampling.temperature=3", r"policy\.sampling\.temperature"),
        ("loop.steps=yes", r"loop: steps must be a number, not True"),
        ("loop.depth=80", r"loop\.max_groups_queued=1024.*loop\.depth=80.*at least 1296"),
        ("loop.batch_timeout_s=600", r"loop\.batch_timeout_s=600.*rollout\.timeout_s=600"),
        ("loop.group_deadline_s=600", r"loop\.group_deadline_s=600.*rollout\.timeout_s=600"),
        ("loop.complete_at=9", r"loop\.complete_at=9 of loop\.group_size=8"),
        ("mesh.trainer_processes=2", r"data_parallel_shard_degree=1.*mesh\.trainer_processes=2"),
        ("trainer.lr_scheduler.warmup_steps=9", r"warmup_steps=9 exceeds trainer\.lr_scheduler\.total_steps=5"),
        ("policy.sampling.max_tokens=48", r"policy\.sampling\.max_tokens=48.*trainer\.training\.seq_len=48"),
        (
            "policy.engine.max_model_len=128",
            r"policy\.engine\.max_model_len=128.*trainer\.training\.seq_len=48",
        ),
        ("weights.folder=somewhere", r"weights\.folder=somewhere is for weights\.carrier=filesystem"),
        ("weights.carrier=pigeon", r"weights\.carrier: .*'filesystem'"),
        ("loop.max_groups_queued=3", r"loop\.max_groups_queued=3.*loop\.groups_per_step=16"),
        ("model.name=qwen3", r"model.*name and .*flavor"),
        ("model.path=null", r"model"),
        ("policy.replicas=0", r"policy\.replicas: .*given: 0"),
        ("loop.steps", r"'loop\.steps' is not of the form key\.sub=value"),
        ("reward.functions.7.weight=1", r"reward\.functions\.7\.weight: 7 is not an index into a list of 1"),
        ("loop.depth.deeper=1", r"loop\.depth is a value"),
    ],
)
def test_a_wrong_key_or_value_is_one_error_that_names_it(override, message):
    given = {  # what the key contradicts, where that is not in the file
        "mesh.trainer_processes=2": ["trainer.parallelism.data_parallel_shard_degree=1"],
        "trainer.lr_scheduler.warmup_steps=9": ["trainer.lr_scheduler.total_steps=5"],
    }.get(override, [])
    with pytest.raises(ConfigError, match=message):
        load_config(GRPOConfig, TOY, [*given, override])


def test_a_surplus_that_a_later_version_trains_needs_a_loss_that_accounts_for_it():
    with pytest.raises(
        ConfigError, match=r"loop\.oversample=1\.5 with loop\.max_policy_age=1 trains on samples of older"
    ):
        load_config(GRPOConfig, TOY, ["loop.depth=0", "loop.oversample=1.5", "loss.name=reinforce"])
    load_config(
        GRPOConfig, TOY, ["loop.depth=0", "loop.oversample=1.5", "loop.max_policy_age=0", "loss.name=reinforce"]
    )


def test_weights_that_do_not_lie_in_shared_memory_cannot_be_used_in_place():
    with pytest.raises(ConfigError, match=r"weights\.swap=zero_copy with weights\.carrier=filesystem"):
        load_config(GRPOConfig, TOY, ["weights.swap=zero_copy", "weights.carrier=filesystem"])


def test_a_kl_term_without_a_reference_is_refused():
    with pytest.raises(ConfigError, match=r"loss\.kl_coefficient=0\.1 needs reference\.enabled=true"):
        load_config(GRPOConfig, TOY, ["loss.kl_coefficient=0.1", "reference.enabled=false"])


def test_a_missing_key_is_named(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("run: {dir: x}\n")
    with pytest.raises(ConfigError, match=r"loop: missing"):
        load_config(GRPOConfig, path)


@pytest.mark.parametrize("text", ["- 1", "a: [", "a: {b: 1", "\x00"])
def test_a_file_that_is_not_a_mapping_is_an_error_that_names_it(tmp_path, text):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"broken\.yaml"):
        load_config(GRPOConfig, path)


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"no configuration file nowhere\.yaml"):
        load_config(GRPOConfig, "nowhere.yaml")


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=30))
def test_a_text_value_may_hold_any_character(text):
    """`=`, `:`, `{`, `${x}`, quotes, backslashes, new lines: a value of a text key is taken letter by letter."""
    assert load_config(GRPOConfig, TOY, [f"run.dir={text}"]).run.dir == text


@settings(deadline=None)
@given(st.text(st.sampled_from("\\${}a=:"), max_size=12))
def test_a_saved_config_reads_back_equal(text):
    config = load_config(GRPOConfig, TOY, [f"run.dir={text}"])
    path = Path(f"/dev/shm/forgelite-test-config-{abs(hash(text))}.yaml")
    try:
        path.write_text(to_yaml(config))
        assert load_config(GRPOConfig, path) == config
    finally:
        path.unlink()


def test_a_value_may_refer_to_another_key(tmp_path):
    tree = yaml.safe_load(TOY.read_text())
    tree["model"]["path"] = "${run.dir}/start"
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(tree))
    assert load_config(GRPOConfig, path, ["run.dir=runs/x"]).model.path == "runs/x/start"


@pytest.mark.parametrize("schema", [GRPOConfig, SFTConfig])
def test_every_key_says_what_it_means(schema):
    keys = list(describe_keys(schema))
    assert {"run.dir", "loss.name", "trainer.optimizer.lr"} <= {key for key, *_ in keys}
    assert [key for key, *_, meaning in keys if not meaning] == []


def test_gpus_that_do_not_divide_among_the_replicas_are_refused():
    assert load_config(GRPOConfig, TOY, ["mesh.policy_gpus=0,1,2,3", "policy.replicas=2"]).policy.replicas == 2
    with pytest.raises(ConfigError, match=r"mesh\.policy_gpus=0,1,2 names 3 GPUs.*policy\.replicas=2"):
        load_config(GRPOConfig, TOY, ["mesh.policy_gpus=0,1,2", "policy.replicas=2"])


def test_a_decay_that_ends_before_the_run_is_refused():
    with pytest.raises(ConfigError, match=r"total_steps=10 ends the decay before loop\.steps=40"):
        load_config(GRPOConfig, TOY, ["trainer.lr_scheduler.total_steps=10", "trainer.lr_scheduler.decay_ratio=0.5"])


def test_weights_travel_in_the_policy_s_dtype():
    assert load_config(GRPOConfig, TOY).transfer_dtype == "float32"
    assert load_config(GRPOConfig, TOY, ["policy.engine.dtype=half"]).transfer_dtype == "float16"


@pytest.mark.parametrize("key", ["run.resume", "eval.timeout_s", "mesh.policy_gpus", "metrics.rollouts_per_step"])
def test_sft_knows_no_key_that_it_would_not_use(key):
    with pytest.raises(ConfigError, match=f"{key}: unknown key"):
        load_config(SFTConfig, ROOT / "configs/sft/toy.yaml", [f"{key}=1"])


def test_a_number_may_be_written_with_an_exponent():
    config = load_config(GRPOConfig, TOY, ["policy.engine.gpu_memory_utilization=9e-1", "trainer.optimizer.lr=1e-5"])
    assert config.policy.engine["gpu_memory_utilization"] == 0.9
    assert config.trainer.optimizer.lr == 1e-5
