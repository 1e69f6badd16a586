"""The one place that knows about torchstore's versions.

torchstore 0.1.2, the only release, was written for an older Monarch: its controller mixes async and sync
endpoints, which Monarch 0.7 refuses at spawn. `load_torchstore` puts a subclass with async endpoints in its
place. A newer torchstore has only async endpoints, and is then used as it is.
"""

from __future__ import annotations

import importlib
import inspect
import os
from types import ModuleType


def torchstore_environment() -> dict[str, str]:
    """Variables for processes that use torchstore, set before Monarch starts them.

    Without this one torchstore warns at import, sets it itself, and turns the root logger's output to stdout.
    """
    return {"HYPERACTOR_CODEC_MAX_FRAME_LENGTH": "910737418240"}  # torchstore's own value


def load_torchstore() -> ModuleType:
    """torchstore, able to run on the installed Monarch. To be used in every process, and before any other
    call.

    Sets the variables of `torchstore_environment` where they are missing, as torchstore would.
    """
    for name, value in torchstore_environment().items():
        os.environ.setdefault(name, value)
    api = importlib.import_module("torchstore.api")
    controller = importlib.import_module("torchstore.controller")
    if _has_sync_endpoints(controller.Controller):
        adapter = importlib.import_module("forgelite.weights.torchstore_controller")
        api.Controller = adapter.AsyncController
    return importlib.import_module("torchstore")


def _has_sync_endpoints(actor: type) -> bool:
    # Here and not above, so that the arena can be used without Monarch.
    from monarch._src.actor.endpoint import EndpointProperty

    return any(
        isinstance(member, EndpointProperty) and not inspect.iscoroutinefunction(member._method)
        for member in vars(actor).values()
    )
