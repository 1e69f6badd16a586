from __future__ import annotations

import inspect
import os
import subprocess
import sys
from types import ModuleType

import pytest
from monarch.actor import Actor, endpoint

from forgelite.weights.torchstore_compat import load_torchstore, torchstore_environment


class AllAsync(Actor):
    @endpoint
    async def keys(self) -> list[str]:
        return []


def endpoints(actor: type, *, asynchronous: bool) -> set[str]:
    """The endpoints that a class itself defines."""
    return {
        name
        for name, member in vars(actor).items()
        if isinstance(member, type(AllAsync.keys)) and inspect.iscoroutinefunction(member._method) is asynchronous
    }


@pytest.fixture
def torchstore() -> ModuleType:
    return load_torchstore()


def test_the_adapter_is_still_needed_and_in_place(torchstore: ModuleType) -> None:
    shipped = torchstore.controller.Controller
    assert endpoints(shipped, asynchronous=True)
    assert endpoints(shipped, asynchronous=False), "this torchstore is all async: the adapter can go"
    assert torchstore.api.Controller.__name__ == "AsyncController"


def test_the_adapter_makes_every_sync_endpoint_async_and_no_other(torchstore: ModuleType) -> None:
    shipped, adapter = torchstore.controller.Controller, torchstore.api.Controller
    assert endpoints(adapter, asynchronous=True) == endpoints(shipped, asynchronous=False)
    assert endpoints(adapter, asynchronous=False) == set()


def test_the_adapter_steps_aside_for_a_controller_that_is_all_async(
    torchstore: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchstore.controller, "Controller", AllAsync)
    monkeypatch.setattr(torchstore.api, "Controller", AllAsync)
    load_torchstore()
    assert torchstore.api.Controller is AllAsync


def test_loading_torchstore_prints_nothing_and_leaves_the_root_logger_alone() -> None:
    program = (
        "import logging; from forgelite.weights.torchstore_compat import load_torchstore; load_torchstore(); "
        "assert not logging.root.handlers and logging.root.level == logging.WARNING"
    )
    environment = {name: value for name, value in os.environ.items() if name not in torchstore_environment()}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
