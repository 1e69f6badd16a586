"""The program in the README runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.apps import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_the_program_in_the_readme_trains(warm_start: Path, tmp_path: Path):
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    overrides = ["loop.steps=2", f"model.path={warm_start / 'checkpoints' / 'hf'}", f"run.dir={tmp_path / 'run'}"]
    program = program.replace('["loop.steps=5"]', repr(overrides)).replace("runs/mine/hf", str(tmp_path / "hf"))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    (trained,) = re.findall(r"'ledger/trained': (\d+)", done.stdout)
    assert int(trained) > 64
    assert (tmp_path / "hf" / "model.safetensors").exists()
