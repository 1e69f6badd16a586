"""Which losses and corrections go together, as a user of the configuration meets it."""

from __future__ import annotations

from pathlib import Path

import pytest

from forgelite.config import GRPOConfig, load_config, to_yaml
from forgelite.config.corrections import TokenTIS, Veto
from forgelite.errors import ConfigError

TOY = Path(__file__).parents[2] / "configs/grpo/toy.yaml"
NAMES = (
    *("clip", "grpo", "dapo", "decoupled_ppo", "dual_clip", "cispo", "gspo", "gmpo", "sapo", "topr", "kimi"),
    *("dppo_tv", "dppo_kl", "ipo"),
)


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_is_chosen_by_its_name_and_may_train_on_older_samples(name: str) -> None:
    config = load_config(GRPOConfig, TOY, [f"loss.name={name}", "loop.depth=2", "loop.max_policy_age=2"])
    assert config.loss.name == name
    assert config.loss.corrects_gap


def test_corrections_are_a_list() -> None:
    overrides = ["loss={name: reinforce, corrections: [{name: token_tis, cap: 3}, {name: veto}]}"]
    assert load_config(GRPOConfig, TOY, overrides).loss.corrections == [TokenTIS(cap=3.0), Veto()]


def test_a_config_with_corrections_reads_back_equal(tmp_path: Path) -> None:
    config = load_config(GRPOConfig, TOY, ["loss.name=decoupled_ppo"])
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert load_config(GRPOConfig, path) == config


def test_the_presets_are_what_their_papers_say() -> None:
    def loss(*overrides: str) -> dict:
        return load_config(GRPOConfig, TOY, overrides).loss.model_dump()

    shared = {"clip_low": 0.2, "clip_high": 0.2, "anchor": "behaviour", "corrections": [], "whiten_advantages": False}
    assert shared.items() <= loss("loss.name=grpo").items()
    assert loss("loss.name=grpo")["aggregation"] == "sequence_mean"
    dr_grpo = loss("loss.name=dr_grpo", "loss.constant_length=6", "advantage.name=group_centred")
    assert (dr_grpo["aggregation"], dr_grpo["constant_length"]) == ("constant", 6)
    assert (shared | {"clip_high": 0.28, "aggregation": "token_mean"}).items() <= loss("loss.name=dapo").items()
    whitened = loss("loss.name=reinforce_plus_plus", "advantage.name=reward")
    assert (shared | {"whiten_advantages": True}).items() <= whitened.items()
    assert loss("loss.name=decoupled_ppo")["corrections"] == [{"name": "token_tis", "cap": 5.0}]
    assert (loss("loss.name=cispo")["clip_low"], loss("loss.name=cispo")["clip_high"]) == (1.0, 4.0)
    assert (loss("loss.name=gspo")["clip_low"], loss("loss.name=gspo")["clip_high"]) == (3e-4, 4e-4)


REFUSED = {
    "an asynchronous run without any correction": (
        ["loss.name=reinforce"],
        r"loop\.depth=1 with loop\.max_policy_age=1 trains on samples of older versions.*loss\.name=reinforce",
    ),
    "an unbounded stream without any correction": (
        ["loss.name=reinforce", "loop.depth=null"],
        r"loop\.depth=null with loop\.max_policy_age=1",
    ),
    "a proximal anchor without its weight": (
        ["loss={anchor: proximal}"],
        r"loop\.depth=1.*loss\.name=clip with loss\.anchor=proximal",
    ),
    "a decoupled loss whose weight was taken away": (
        ["loss={name: decoupled_ppo, corrections: [{name: veto}]}"],
        r"loop\.depth=1.*loss\.name=decoupled_ppo",
    ),
    "a ratio to the behaviour policy and a weight": (
        ["loss={corrections: [{name: token_tis}]}"],
        r"loss\.corrections\.0\.name=token_tis would count the gap.*twice.*loss\.name=clip.*loss\.anchor=proximal",
    ),
    "a trust region and a weight": (
        ["loss={name: dppo_tv, corrections: [{name: veto}, {name: icepop}]}"],
        r"loss\.corrections\.1\.name=icepop would count the gap.*loss\.name=dppo_tv",
    ),
    "two weights": (
        ["loss={name: reinforce, corrections: [{name: token_tis}, {name: sequence_tis}]}"],
        r"loss\.corrections\.0\.name=token_tis and loss\.corrections\.1\.name=sequence_tis are both",
    ),
    "a correction that is there twice": (
        ["loss={corrections: [{name: opsm}, {name: opsm}]}"],
        r"loss\.corrections: opsm is there twice",
    ),
    "two corrections of one name in the metrics": (
        ["loss={corrections: [{name: veto}, {name: custom, path: 'a:veto', weighs: false}]}"],
        r"loss\.corrections: veto is there twice",
    ),
    "a factor for each token of a loss of sequences": (
        ["loss={name: gspo, anchor: proximal, corrections: [{name: token_tis}]}"],
        r"loss\.corrections\.0\.name=token_tis has a factor for each token, loss\.name=gspo",
    ),
    "a proximal anchor where none is used": (
        ["loss={name: topr, anchor: proximal}"],
        r"loss\.anchor=proximal does not apply to loss\.name=topr",
    ),
    "a loss of sequences weighed by length": (
        ["loss={name: gspo, aggregation: token_mean}"],
        r"loss\.name=gspo.*loss\.aggregation=token_mean",
    ),
    "a constant without its length": (
        ["loss={aggregation: constant}"],
        r"loss\.aggregation=constant.*needs loss\.constant_length",
    ),
    "a length without the constant": (
        ["loss={constant_length: 9}"],
        r"loss\.constant_length=9 has no effect with loss\.aggregation=token_mean",
    ),
    "k1 as a loss": (
        ["loss={kl_coefficient: 0.1, kl_estimator: k1}"],
        r"loss\.kl_coefficient=0\.1 with loss\.kl_estimator=k1",
    ),
    "a divergence in the loss and in the reward": (
        ["loss.kl_coefficient=0.1", "advantage.kl_coefficient=0.2"],
        r"loss\.kl_coefficient=0\.1 and advantage\.kl_coefficient=0\.2",
    ),
    "a divergence in the reward without a reference": (
        ["advantage.kl_coefficient=0.2", "reference.enabled=false"],
        r"advantage\.kl_coefficient=0\.2 needs reference\.enabled=true",
    ),
    "unbiased k3 in the reward, where the ratio is 1": (
        ["advantage.kl_estimator=k3_unbiased"],
        r"advantage\.kl_estimator: .*'k1', 'k2' or 'k3'",
    ),
    "a deviation divided by twice": (
        ["loss.name=reinforce_plus_plus"],
        r"loss\.whiten_advantages=true \(loss\.name=reinforce_plus_plus\) with advantage\.name=group_normalised",
    ),
    "Dr.GRPO with a deviation": (
        ["loss={name: dr_grpo, constant_length: 6}"],
        r"loss\.name=dr_grpo .*advantage\.name=group_centred",
    ),
    "a baseline of a group of one": (
        ["loop.group_size=1", "loop.filter_zero_variance=false"],
        r"loop\.group_size=1 with advantage\.name=group_normalised",
    ),
    "demonstrations as rewards": (["loss.name=cross_entropy"], r"loss\.name=cross_entropy is for demonstrations"),
    "an option of another loss": (
        ["loss={name: topr, clip_low: 0.1}"],
        r"loss\.clip_low: not a key of the given loss\.name",
    ),
    "an option of another correction": (
        ["loss={corrections: [{name: opsm, cap: 2}]}"],
        r"loss\.corrections\.0\.cap: not a key of the given loss\.corrections\.0\.name",
    ),
    "a misspelt option of a correction": (
        ["loss={name: reinforce, corrections: [{name: token_tis, kap: 3}]}"],
        r"loss\.corrections\.0\.kap: unknown key \(did you mean loss\.corrections\.N\.cap\?\)",
    ),
    "an unknown correction": (["loss={corrections: [{name: tis}]}"], r"loss\.corrections\.0: .*'token_tis'"),
    "a band that holds no ratio of one": (
        ["loss={name: reinforce, corrections: [{name: icepop, low: 1.5}]}"],
        r"loss\.corrections\.0\.low: .*less than or equal to 1",
    ),
    "a custom advantage without its path": (["advantage.name=custom"], r"advantage\.name=custom needs advantage\.path"),
    "a path without a custom advantage": (["advantage.path=a:b"], r"advantage\.path=a:b .*advantage\.name=custom"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_makes_no_sense_is_refused_with_both_keys_named(case: str) -> None:
    overrides, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        load_config(GRPOConfig, TOY, overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss.name=reinforce", "loop.depth=0"],
        ["loss.name=reinforce", "loop.max_policy_age=0"],
        ["loss={name: reinforce, corrections: [{name: token_tis}]}"],
        ["loss={name: reinforce, corrections: [{name: opsm}]}"],
        ["loss={anchor: proximal}", "loop.depth=0"],
        ["loss={anchor: proximal, corrections: [{name: icepop}]}"],
        ["loss={corrections: [{name: opsm}, {name: veto}, {name: geometric_rejection}]}"],
        ["loss={name: gspo, anchor: proximal, corrections: [{name: sequence_tis}, {name: opsm}]}"],
        ["loss={name: custom, path: 'a:b', uses_ratio: true}"],
        ["loss={kl_estimator: k1}"],
        ["advantage={name: leave_one_out, kl_coefficient: 0.1}"],
    ],
)
def test_what_makes_sense_is_accepted(overrides: list[str]) -> None:
    load_config(GRPOConfig, TOY, overrides)
