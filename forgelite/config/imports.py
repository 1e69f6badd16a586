"""Objects of the user that a config names as `package.module:name`."""

from __future__ import annotations

import importlib
from typing import Any

from forgelite.errors import ConfigError


def import_object(path: str, key: str) -> Any:
    """The object that `path` names.

    Args:
        path: `package.module:name`.
        key: of the config, for messages.

    Raises:
        ConfigError: the form is wrong, or there is no such module or name.
    """
    module, colon, name = path.partition(":")
    if not colon or not module or not name:
        raise ConfigError(f"{key}: {path!r} is not of the form package.module:name")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigError(f"{key}: cannot import {module}: {error}") from error
    except AttributeError:
        raise ConfigError(f"{key}: module {module} has no {name}") from None
