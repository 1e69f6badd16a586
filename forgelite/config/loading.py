"""From a YAML file and `key.sub=value` overrides to a checked tree, or to one error that names the keys."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, Tag, ValidationError
from pydantic.fields import FieldInfo

from forgelite.errors import ConfigError

T = TypeVar("T", bound=BaseModel)

_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")


def load_config(schema: type[T], path: str | Path, overrides: Sequence[str] = ()) -> T:
    """Read `path`, put `overrides` on top, and check the result against `schema`.

    Args:
        schema: the app's configuration class.
        path: a YAML file; `${a.b}` in it stands for the value of another key.
        overrides: `key.sub=value`. What follows the first `=` is the value, whatever it holds: for a key that
            takes text it is taken letter by letter, for any other key it is read as YAML.

    Raises:
        ConfigError: a key is unknown, has the wrong type or contradicts another; the message names the keys.
    """
    return check_config(schema, _with_overrides(schema, _read(path), overrides), source=str(path))


def check_config(schema: type[T], tree: Any, source: str = "the configuration") -> T:
    """Check a plain tree against `schema`; raises ConfigError."""
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join([f"{source}:", *(f"  {line}" for line in _explain(schema, error))])) from None


def to_yaml(config: BaseModel) -> str:
    """The whole tree, defaults included, in a form that `load_config` reads back to an equal one."""
    # A dollar sign that came out of the resolved tree must not be taken for an interpolation when read again.
    return yaml.safe_dump(_map_text(config.model_dump(), _escaped), sort_keys=False, allow_unicode=True)


def describe_keys(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield (key, type, default, meaning) for every key of `schema`, depth first; `N` stands for a list index."""
    for name, field in schema.model_fields.items():
        key = prefix + name
        variants = _sections(field.annotation)
        if not variants:
            yield key, _type_name(field.annotation), _default_text(field), field.description or ""
        elif get_origin(field.annotation) is list:
            yield key, "list", _default_text(field), field.description or ""
            key += ".N"
        seen: set[str] = set()  # variants of a section share some of their keys
        for variant in variants:
            for row in describe_keys(variant, key + "."):
                if row[0] not in seen:
                    seen.add(row[0])
                    yield row


def _read(path: str | Path) -> dict[str, Any]:
    try:
        loaded = OmegaConf.load(path)
    except FileNotFoundError:
        raise ConfigError(f"no configuration file {path}") from None
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not readable as YAML: {error}") from None
    tree = OmegaConf.to_container(loaded, resolve=False)
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of keys, not {type(tree).__name__}")
    return tree


def _with_overrides(schema: type[BaseModel], tree: dict[str, Any], overrides: Sequence[str]) -> Any:
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip("."):
            raise ConfigError(f"override {override!r} is not of the form key.sub=value")
        _assign(tree, key, _value(_annotation(schema, key.split(".")), text))
    try:
        return OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"cannot resolve the configuration: {error}") from None


def _assign(tree: Any, key: str, value: Any) -> None:
    *parents, last = key.split(".")
    node = tree
    for at, name in enumerate(parents):
        node = _child(node, name, key, create=True)
        if not isinstance(node, dict | list):
            raise ConfigError(f"{key}: {'.'.join(parents[: at + 1])} is a value and has no keys below it")
    if isinstance(node, list):
        node[_index(node, last, key)] = value
    else:
        node[last] = value


def _child(node: Any, name: str, key: str, create: bool) -> Any:
    if isinstance(node, list):
        return node[_index(node, name, key)]
    if create and node.get(name) is None:
        node[name] = {}
    return node[name]


def _index(node: list[Any], name: str, key: str) -> int:
    if not name.isdecimal() or int(name) >= len(node):
        raise ConfigError(f"{key}: {name} is not an index into a list of {len(node)}")
    return int(name)


def _value(annotation: Any, text: str) -> Any:
    options = get_args(annotation) if _is_union(annotation) else (annotation,)
    if str in options:
        return None if text == "null" and type(None) in options else _escaped(text)
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return _escaped(text)
    return _number_or_text(value) if isinstance(value, str) else value


def _number_or_text(text: str) -> float | str:
    """`9e-1` is a number to everybody but YAML 1.1, which wants `9.0e-1`."""
    return float(text) if _EXPONENT.fullmatch(text) else _escaped(text)


def _escaped(text: str) -> str:
    """`text` such that OmegaConf gives it back as it is."""
    if "${" not in text:
        return text
    # OmegaConf reads a run of backslashes before `${` as escapes: double each, and add one for the `$` itself.
    out, run = [], 0
    for at, char in enumerate(text):
        if char == "\\":
            run += 1
            continue
        interpolation = char == "$" and text[at + 1 : at + 2] == "{"
        out.append("\\" * (2 * run + 1 if interpolation else run) + char)
        run = 0
    return "".join(out) + "\\" * run


def _map_text(tree: Any, change: Any) -> Any:
    if isinstance(tree, dict):
        return {k: _map_text(v, change) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return [_map_text(v, change) for v in tree]
    return change(tree) if isinstance(tree, str) else tree


def _annotation(schema: type[BaseModel], keys: Sequence[str]) -> Any:
    """The declared type of a key, or Any where nothing is declared (the check names it later)."""
    here: Any = schema
    for key in keys:
        if get_origin(here) is list:
            here = get_args(here)[0]
            continue
        fields = [v.model_fields[key] for v in _sections(here) if key in v.model_fields]
        if not fields:
            return Any
        here = fields[0].annotation
    return here


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """The sections that an annotation allows: itself, the variants of a union, the elements of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is Annotated or get_origin(annotation) is list or _is_union(annotation):
        return [section for part in get_args(annotation) for section in _sections(part)]
    return []


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " | ".join(map(str, get_args(annotation)))
    if _is_union(annotation):
        return " | ".join("null" if part is type(None) else _type_name(part) for part in get_args(annotation))
    return str(annotation).replace("typing.", "") if get_args(annotation) else annotation.__name__


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True, validated_data={})
    return "null" if default is None else str(default)


def _explain(schema: type[BaseModel], error: ValidationError) -> Iterator[str]:
    known = [key for key, *_ in describe_keys(schema)]
    for item in error.errors(include_url=False):
        key = ".".join(_path(schema, item["loc"]))
        if item["type"] == "extra_forbidden":
            if re.sub(r"\.\d+\.", ".N.", key) in known:  # of another variant of the same section
                yield f"{key}: not a key of the given {key.rpartition('.')[0]}.name"
                continue
            near = difflib.get_close_matches(key, known, n=1)
            yield f"{key}: unknown key" + (f" (did you mean {near[0]}?)" if near else "")
        elif item["type"] == "missing":
            yield f"{key}: missing"
        else:
            message = item["msg"].removeprefix("Value error, ")
            given = "" if isinstance(item["input"], dict | BaseModel) else f" (given: {item['input']!r})"
            yield f"{key}: {message}{given}" if key else message


def _path(schema: type[BaseModel], location: Sequence[str | int]) -> Iterator[str]:
    """The keys of a location. pydantic also puts the tag of the chosen variant there, which no user wrote."""
    here: Any = schema
    for part in location:
        if get_origin(here) is list:
            here = get_args(here)[0]
            if get_origin(here) is Annotated:  # around a union of sections, of which pydantic names the tag next
                here = get_args(here)[0]
        elif fields := [v.model_fields[part] for v in _sections(here) if part in v.model_fields]:
            here = fields[0].annotation
        elif _is_union(here) and part in _tags(here):
            continue
        else:
            here = Any
        yield str(part)


def _tags(union: Any) -> list[str]:
    return [m.tag for part in get_args(union) for m in getattr(part, "__metadata__", ()) if isinstance(m, Tag)]
