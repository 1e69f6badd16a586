"""Functions of the user's that a configuration names as `package.module:function`.

A path and no registry: stations are processes of their own, and what a program registers is not known there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from forgelite.config.imports import import_object
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
    function = import_object(path, f"{key}.path")
    if not callable(function):
        raise ConfigError(f"{key}.path: {path} is not a function")
    try:
        inspect.signature(function).bind(None, **arguments)
    except TypeError as error:
        raise ConfigError(f"{key}.arguments={dict(arguments)} do not fit {path}: {error}") from None
    return function
