"""docs/losses.md says what the code does: its tables hold the defaults, and its blocks run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from forgelite.config import GRPOConfig, check_config
from forgelite.config.corrections import CorrectionConfig
from forgelite.config.functions import load_function
from forgelite.config.loss import LossConfig
from tests.unit.losses_configs import CORRECTIONS, SURROGATES

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/losses.md").read_text()
BLOCKS = re.findall(r"```yaml\n(.*?)```", TEXT, flags=re.DOTALL)


def _rows(title: str) -> dict[str, str]:
    """The options of each name in the table below a heading."""
    section = TEXT.split(f"\n## {title}")[1].split("\n## ")[0]
    lines = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    return {cells[1].strip(" `"): cells[3] for cells in lines}


def _documented(options: str) -> dict[str, float]:
    return {key: float(value) for key, value in re.findall(r"`(\w+)=([\d.]+)`", options)}


def test_every_loss_is_in_the_table_with_its_defaults() -> None:
    rows = _rows("Surrogates")
    assert rows.keys() == SURROGATES.keys()
    for name, config in SURROGATES.items():
        fields = type(config).model_fields
        assert _documented(rows[name]) == {key: fields[key].default for key in config.options()}, name


def test_every_correction_is_in_the_table_with_its_defaults() -> None:
    rows = _rows("Corrections")
    assert rows.keys() == CORRECTIONS.keys()
    for name, config in CORRECTIONS.items():
        fields = type(config).model_fields
        assert _documented(rows[name]) == {key: fields[key].default for key in config.options()}, name


def _toy_with(block: str) -> GRPOConfig:
    """The toy's configuration with the sections of a recipe on top."""
    tree = OmegaConf.merge(OmegaConf.load(ROOT / "configs/grpo/toy.yaml"), OmegaConf.create(block))
    return check_config(GRPOConfig, OmegaConf.to_container(tree))


@pytest.mark.parametrize("block", BLOCKS)
def test_every_recipe_is_a_valid_configuration(block: str) -> None:
    _toy_with(block)


def test_the_functions_of_the_user_take_the_arguments_of_their_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "losses.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    config = _toy_with(BLOCKS[-1])
    correction: CorrectionConfig = config.loss.corrections[0]
    loss: LossConfig = config.loss
    assert load_function(loss.path, loss.options(), "loss").__name__ == "squared"
    assert load_function(correction.path, correction.options(), "loss.corrections.0").__name__ == "recent"
    assert load_function(config.advantage.path, config.advantage.arguments, "advantage")([1.0, 2.0], best=1.0) == [0, 1]
