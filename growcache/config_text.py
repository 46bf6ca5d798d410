"""A configuration as text: YAML, variables, ``--set`` and JSON, and messages about its errors.

JSON has no not-a-number, dates, bytes, sets, or keys other than text. Such a value becomes a
mapping with one tag. So two values have the same JSON exactly if they are equal. Tuples become
lists.
"""

from __future__ import annotations

import base64
import difflib
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, datetime
from pathlib import Path, PurePath
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from growcache.config import (
    ONE_SOURCE,
    SEVERAL_SOURCES,
    CacheConfig,
    Config,
    SamplingConfig,
    SplitConfig,
    StrataConfig,
)
from growcache.config_ray import RayConfig
from growcache.config_source import FieldConfig, LabelsConfig, ManifestConfig, WeightedSource
from growcache.errors import ConfigError, ErrorCode
from growcache.schema import is_utf8
from growcache.secrecy import (
    hide_secrets,
    remember_secrets,
    url_without_secrets,
    without_userinfo,
)

ENVIRONMENT_PREFIX = "GROWCACHE_"


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any] | Config,
    overrides: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Config:
    """Return the checked configuration.

    Args:
        source: Path of a YAML file, or its content as a mapping. A `Config` is returned
            unchanged.
        overrides: Texts ``section.key=value`` with values in YAML. They take precedence over
            everything else.
        environment: Variables such as ``os.environ``. Those named ``GROWCACHE_SECTION__KEY``
            take precedence over the file. None uses no variables.

    A relative ``cache.path`` is relative to the working directory, also in a file.

    Returns:
        The checked, frozen configuration.

    Raises:
        ConfigError: The file cannot be read, a key is unknown (the message names the nearest
            known one), or a value is not valid.

    Example::

        config = growcache.load_config("growcache.yaml", ["cache.max_bytes=50GB"])
    """
    if isinstance(source, Config):
        return source
    label, values = read_values(source)
    # A section whose lines are all comments counts as absent.
    values = {name: value for name, value in values.items() if value is not None}
    for name, text in sorted((environment or {}).items()):
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name:
            dotted = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            assign_dotted(values, dotted, parse_yaml(text, name))
    for text in overrides:
        dotted, equals, value = text.partition("=")
        if not equals:
            found = "a key without a value" if may_hold_secret(text) else repr(text)
            raise ConfigError(f"--set expects key=value, found {found}", code="GC105")
        assign_dotted(values, dotted.strip(), parse_yaml(value, f"--set {dotted.strip()}"))
    refuse_oversized(values, label)
    remember_secrets(values)  # before any message about a value
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        unknown = error.errors()[0]["type"] == "extra_forbidden"
        code: ErrorCode = "GC102" if unknown else "GC101"
        raise ConfigError(explain_validation_error(error, label), code=code) from None


MODELS_BY_PLACE: dict[tuple[int | str, ...], type[BaseModel]] = {
    (): Config,
    ("source",): WeightedSource,
    ("split",): SplitConfig,
    ("sampling",): SamplingConfig,
    ("cache",): CacheConfig,
    ("source", "labels"): LabelsConfig,
    ("source", "manifest"): ManifestConfig,
    ("source", "fields"): FieldConfig,
    ("sampling", "strata"): StrataConfig,
    ("sampling", "ray"): RayConfig,
}


MAX_VALUES, MAX_LEVELS = 100_000, 64


def refuse_oversized(values: object, label: str) -> None:
    """Raise ConfigError for too large a configuration.

    Aliases of YAML can multiply values, or contain themselves.
    """
    left = MAX_VALUES
    levels: list[Iterator[object]] = [iter((values,))]
    while levels:
        if (value := next(levels[-1], levels)) is levels:
            levels.pop()
            continue
        left -= 1
        if left < 0 or len(levels) > MAX_LEVELS:
            raise ConfigError(
                f"{label}: more than {MAX_VALUES:,} values, or {MAX_LEVELS} nested levels; "
                "does a YAML alias contain itself?",
                code="GC104",
            )
        if isinstance(value, Mapping):
            levels.append(itertools.chain(value.keys(), value.values()))
        elif isinstance(value, list | tuple | set):
            levels.append(iter(value))
        elif isinstance(value, str) and not is_utf8(value):
            raise ConfigError(
                f"{label}: expected text in UTF-8, found {value[:40]!a}", code="GC104"
            )


def may_hold_secret(text: str) -> bool:
    """Whether a text on the command line may hold a secret."""
    return "storage_options" in text or "://" in text


def read_values(
    source: str | os.PathLike[str] | Mapping[str, Any],
) -> tuple[str, dict[str, Any]]:
    """Return the name of a configuration for messages, and its values."""
    if isinstance(source, Mapping):
        return "config", {key: _copy_nested(value) for key, value in source.items()}
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"no config at {path}; write one with: growcache init {path}", code="GC104"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot read the config {path}: {error.strerror}", code="GC104"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"cannot read the config {path}: expected UTF-8, {error}", code="GC104"
        ) from None
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: expected a mapping with source, sampling and cache, "
            f"found {type(values).__name__}",
            code="GC104",
        )
    return str(path), values


def _copy_nested(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return [_copy_nested(one) for one in value] if isinstance(value, list | tuple) else value


def parse_yaml(text: str, label: str) -> Any:
    """Return the value of a YAML text.

    A ConfigError leaves the text out, because it may be a secret.
    """
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        what = getattr(error, "problem", None) or type(error).__name__
        raise ConfigError(
            f"{label}{line}: not valid YAML: {_without_quoted_text(what)}", code="GC104"
        ) from None
    except (
        ValueError,
        RecursionError,
        OverflowError,
    ) as error:  # a date with an impossible day
        raise ConfigError(
            f"{label}: not valid YAML: a value cannot be read ({type(error).__name__}); put "
            "quotes around text, and do not nest brackets a thousand times",
            code="GC104",
        ) from None


def _without_quoted_text(problem: str) -> str:
    """Return the parser's complaint without quoted text, which may be a secret."""
    return re.sub(r"\s*(['\"])(?!<).{4,}\1", "", problem)


def assign_dotted(values: dict[str, Any], dotted: str, value: Any) -> None:
    """Set the value at a dotted place such as ``cache.max_bytes`` or ``source.0.url``."""
    *sections, key = dotted.split(".")
    place: Any = values
    for section in sections:
        child = place.setdefault(section, {}) if isinstance(place, dict) else None
        if isinstance(place, list):
            child = place[_list_index(section, place, dotted)]
        if not isinstance(child, dict | list):
            raise ConfigError(
                f"{dotted}: {section} is not a section of the config", code="GC102"
            )
        place = child
    place[_list_index(key, place, dotted) if isinstance(place, list) else key] = value


def _list_index(word: str, among: list[Any], dotted: str) -> int:
    if word.isascii() and word.isdigit() and int(word) < len(among):
        return int(word)
    raise ConfigError(
        f"{dotted}: expected a number from 0 to {len(among) - 1}, because the config has a "
        f"list there, found {word}"
    )


def explain_validation_error(error: ValidationError, label: str) -> str:
    """Return a line per wrong key, at most two. ``label`` is the configuration's name."""
    found: dict[str, list[ErrorDetails]] = {}
    for item in error.errors():
        found.setdefault(_dotted_place(item["loc"]) or "config", []).append(item)
    lines = [f"{label}: {_explain_items(dotted, items)}" for dotted, items in found.items()]
    return "\n".join(line[:300] for line in lines[:2])


def _dotted_place(loc: tuple[int | str, ...]) -> str:
    if loc[:1] == ("source",) and loc[1:2] in ((ONE_SOURCE,), (SEVERAL_SOURCES,)):
        loc = loc[:1] + loc[2:]
    place = _without_source_number(loc)
    # Parts after section, key and place in a list name the branch of a union. Mappings with
    # keys of their own are the exception.
    most = 2
    if len(place) > 1 and place[:2] in MODELS_BY_PLACE:
        most = 4 if place[:2] == ("source", "fields") else 3
    most += len(loc) - len(place)
    parts = (str(part) for n, part in enumerate(loc) if n < most or type(part) is int)
    return ".".join(parts)


def _without_source_number(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    several = len(loc) > 1 and loc[0] == "source" and str(loc[1]).isdigit()
    return loc[:1] + loc[2:] if several else loc


def _explain_items(dotted: str, items: list[ErrorDetails]) -> str:
    kind = items[0]["type"]
    if kind == "extra_forbidden":
        where = _without_source_number(tuple(dotted.split(".")))
        return f"unknown key {dotted}{_nearest_key_hint([str(part) for part in where])}"
    if kind == "missing":
        return f"{dotted} is missing"
    if isinstance(items[0]["input"], Mapping):  # the errors inside say more
        deepest = max(len(item["loc"]) for item in items)
        items = [item for item in items if len(item["loc"]) == deepest]
    said = [item["msg"].removeprefix("Value error, ") for item in items]
    said = [re.sub("^Input should be ", "expected " * (n == 0), m) for n, m in enumerate(said)]
    if kind == "value_error" and "." not in dotted:  # an error about several settings together
        return said[0] if dotted == "config" else f"{dotted}: {said[0]}"
    said = [re.sub(r"a valid dictionary( or instance of \w+)?", "a mapping", m) for m in said]
    value = items[0]["input"]
    shown = _show_without_secrets(dotted, value)
    choices = [
        word
        for item in items
        for word in re.findall(r"'([^']*)'", item["msg"])
        if item["type"] == "literal_error"
    ]
    close = difflib.get_close_matches(str(value), choices, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{dotted}: {' or '.join(said)}, found {shown}{hint}"


def _show_without_secrets(dotted: str, value: object) -> str:
    """Return a value for a message, or only its type if it may be a credential."""
    section, key, *_ = (*_without_source_number(tuple(dotted.split("."))), "", "")
    secret = (section, key) == ("source", "storage_options")
    if secret or isinstance(value, Mapping | list | tuple):
        kinds = {"dict": "a mapping", "str": "text", "list": "a list", "NoneType": "nothing"}
        kind = type(value).__name__
        return kinds.get(kind, f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}")
    return (
        repr(without_userinfo(url_without_secrets(hide_secrets(value))))
        if isinstance(value, str)
        else repr(value)
    )


def _nearest_key_hint(where: list[str]) -> str:
    """Return a hint with the nearest known key, first of its section and then of any."""
    inside = (
        MODELS_BY_PLACE[()]
        if len(where) == 1
        else MODELS_BY_PLACE.get((where[0],), MODELS_BY_PLACE[()])
    )
    inside = MODELS_BY_PLACE.get(tuple(where[:2]), inside) if len(where) > 2 else inside
    sections = {place[0]: model for place, model in MODELS_BY_PLACE.items() if len(place) == 1}
    known = list(inside.model_fields)
    everywhere = {key: name for name, model in sections.items() for key in model.model_fields}
    for choices in (known, list(everywhere)):
        if close := difflib.get_close_matches(where[-1], choices, n=1):
            place = f"{everywhere[close[0]]}." if choices is not known else ""
            return f"; did you mean {place}{close[0]}?"
    return f"; known are {', '.join(known)}"


MAP_TAG, FLOAT_TAG, INT_TAG, DATE_TAG, TIME_TAG, BYTES_TAG, SET_TAG = (
    "!map", "!float", "!int", "!date", "!time", "!bytes", "!set",
)  # fmt: skip
INTEGER_BOUND = 1 << 63  # our JSON has integers of 64 bits


def to_json_value(value: Any) -> Any:
    """Return a JSON value that `from_json_value` reverses.

    Raises:
        ConfigError: YAML cannot express the value.

    >>> to_json_value({"fill": float("nan"), "names": {0: "cat"}, "shape": (3, None)})
    {'fill': {'!float': 'nan'}, 'names': {'!map': [[0, 'cat']]}, 'shape': [3, None]}
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return (
            int(value)
            if -INTEGER_BOUND <= value < INTEGER_BOUND
            else {INT_TAG: str(int(value))}
        )
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {FLOAT_TAG: repr(float(value))}
    if isinstance(value, Mapping):
        return _mapping_to_json_value(value)
    if isinstance(value, list | tuple):
        return [to_json_value(one) for one in value]
    if isinstance(value, set | frozenset):
        return {SET_TAG: sorted((to_json_value(one) for one in value), key=repr)}
    if isinstance(value, datetime):
        return {TIME_TAG: value.isoformat()}
    if isinstance(value, date):
        return {DATE_TAG: value.isoformat()}
    if isinstance(value, bytes):
        return {BYTES_TAG: base64.b64encode(value).decode()}
    if isinstance(value, PurePath):
        return str(value)
    raise ConfigError(
        f"config: expected values that YAML can hold, found {type(value).__name__}; give "
        "numbers, text, lists and mappings, and let your code convert them",
        code="GC104",
    )


def _mapping_to_json_value(value: Mapping[Any, Any]) -> Any:
    if all(isinstance(name, str) and not name.startswith("!") for name in value):
        return {name: to_json_value(inner) for name, inner in value.items()}
    pairs = ([to_json_value(name), to_json_value(inner)] for name, inner in value.items())
    return {MAP_TAG: sorted(pairs, key=repr)}


def from_json_value(value: Any) -> Any:
    """Return the value that `to_json_value` converted.

    >>> from_json_value({"!map": [[0, "cat"]]}), from_json_value({"!int": "36893488147419103232"})
    ({0: 'cat'}, 36893488147419103232)
    """
    if isinstance(value, list):
        return [from_json_value(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    if len(value) == 1:
        ((tag, inner),) = value.items()
        if tag in _TAG_DECODERS:
            return _TAG_DECODERS[tag](inner)
    return {name: from_json_value(inner) for name, inner in value.items()}


_TAG_DECODERS: dict[str, Callable[[Any], Any]] = {
    MAP_TAG: lambda pairs: {
        from_json_value(name): from_json_value(inner) for name, inner in pairs
    },
    FLOAT_TAG: float,
    INT_TAG: int,
    DATE_TAG: date.fromisoformat,
    TIME_TAG: datetime.fromisoformat,
    BYTES_TAG: base64.b64decode,
    SET_TAG: lambda members: set(map(from_json_value, members)),
}
