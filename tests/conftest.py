"""What tests share: the toy's starting model, and its warm start, built once a session as a user builds them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from tests.apps import run_app

# On two busy cores an example may take any time; the session's own timeout bounds a test.
settings.register_profile("forgelite", deadline=None)
settings.load_profile("forgelite")


@pytest.fixture(scope="session")
def toy_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy with random weights."""
    folder = tmp_path_factory.mktemp("toy") / "base"
    finished = run_app("apps.toy.main", str(folder))
    assert finished.returncode == 0, finished.output
    return folder


@pytest.fixture(scope="session")
def warm_start(toy_base: Path) -> Path:
    """The run folder of the SFT app on the toy; the model is in checkpoints/hf."""
    folder = toy_base.parent / "sft"
    finished = run_app(
        "apps.sft.main", "--config", "configs/sft/toy.yaml", f"run.dir={folder}", f"model.path={toy_base}"
    )
    assert finished.returncode == 0, finished.output
    return folder
