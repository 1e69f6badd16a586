"""What `import forgelite` gives, and what it does not load."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import forgelite


@pytest.mark.parametrize("name", forgelite.__all__)
def test_every_public_name_is_there_and_documented(name):
    assert getattr(forgelite, name).__doc__
    assert not isinstance(getattr(forgelite, name), ModuleType)  # a module of the same name would hide it


def test_the_names_that_type_checkers_see_are_those_that_are_there():
    tree = ast.parse(Path(forgelite.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    assert sorted(alias.asname for node in block.body for alias in node.names) == forgelite.__all__


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = forgelite.nothing


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_forgelite_loads_no_engine():
    assert not {"torch", "vllm", "torchtitan", "monarch", "transformers"} & loaded_by("import forgelite")


def test_checking_a_config_loads_no_engine():
    loaded = loaded_by("from forgelite.command import run_app")
    assert not {"torch", "vllm", "torchtitan", "monarch", "transformers"} & loaded


def test_a_reward_process_loads_no_torch():
    assert "torch" not in loaded_by("import forgelite.scoring.reward_actor, forgelite.scoring.rewards")


def test_launching_loads_no_engine_into_the_controller():
    assert not {"vllm", "torchtitan"} & loaded_by("import forgelite.launching, forgelite.loop, forgelite.preparation")
