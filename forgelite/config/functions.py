"""Functions of the user's that a configuration names as `package.module:function`.

A path and no registry: stations are processes of their own, and what a program registers is not known there.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from forgelite.errors import ConfigError


def load_function(path: str, arguments: Mapping[str, Any], key: str) -> Callable[..., Any]:
    """The function at `path`.

    Args:
        path: `package.module:function`.
        arguments: keyword arguments that it will be called with, after one positional argument.
        key: the section of the configuration that names it, such as `loss`, for messages.

    Raises:
        ConfigError: the module or the function is missing, or the function does not take these arguments.
    """
    module, colon, name = path.partition(":")
    if not colon or not module or not name:
        raise ConfigError(f"{key}.path: {path!r} is not of the form package.module:function")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key}.path: cannot import {path}: {error}") from error
    if not callable(function):
        raise ConfigError(f"{key}.path: {path} is not a function")
    try:
        inspect.signature(function).bind(None, **arguments)
    except TypeError as error:
        raise ConfigError(f"{key}.arguments={dict(arguments)} do not fit {path}: {error}") from None
    return function
