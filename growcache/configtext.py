"""A configuration as text: YAML files, values on the command line and in the environment."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from growcache.errors import ConfigError

MOST_VALUES, MOST_LEVELS = 100_000, 64


def refuse_monsters(values: object, label: str) -> None:
    """Refuse what is too much to be looked at: aliases of aliases of YAML, or of themselves.

    Raises:
        ConfigError: so many values, so deep, or a text that is no Unicode.
    """
    left = MOST_VALUES
    levels: list[Iterator[object]] = [iter((values,))]
    while levels:
        if (value := next(levels[-1], levels)) is levels:
            levels.pop()
            continue
        left -= 1
        if left < 0 or len(levels) > MOST_LEVELS:
            raise ConfigError(
                f"{label}: more than {MOST_VALUES:,} values, or {MOST_LEVELS} within one another; "
                "does an alias of YAML name what it is in?"
            )
        if isinstance(value, Mapping):
            levels.append(itertools.chain(value.keys(), value.values()))
        elif isinstance(value, list | tuple | set):
            levels.append(iter(value))
        elif isinstance(value, str) and not _is_text(value):
            raise ConfigError(f"{label}: expected text in UTF-8, found {value[:40]!a}")


def _is_text(value: str) -> bool:
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False


def may_tell(text: str) -> bool:
    """Whether a text on the command line may hold a secret."""
    return "storage_options" in text or "://" in text


def read_values(
    source: str | os.PathLike[str] | Mapping[str, Any],
) -> tuple[str, dict[str, Any]]:
    """Return what a configuration is called in messages, and its values.

    Raises:
        ConfigError: no file, or no mapping in it.
    """
    if isinstance(source, Mapping):
        return "config", {key: _own(value) for key, value in source.items()}
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"no config at {path}; write one with: growcache init {path}"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read the config {path}: expected UTF-8, {error}") from None
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: expected a mapping with source, sampling and cache, "
            f"found {type(values).__name__}"
        )
    return str(path), values


def _own(value: Any) -> Any:
    """Return what may be written to without a change to what the caller has."""
    if isinstance(value, Mapping):
        return dict(value)
    return [_own(one) for one in value] if isinstance(value, list | tuple) else value


def parse_yaml(text: str, label: str) -> Any:
    """Return a value as YAML has it.

    Raises:
        ConfigError: it is none; the text itself is not told, for it may be a secret.
    """
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        what = getattr(error, "problem", None) or type(error).__name__
        raise ConfigError(f"{label}{line}: not valid YAML: {_unquoted(what)}") from None
    except (ValueError, RecursionError, OverflowError) as error:  # a date without such a day
        raise ConfigError(
            f"{label}: not valid YAML: a value cannot be read ({type(error).__name__}); put "
            "quotes around text, and no brackets into a thousand others"
        ) from None


def _unquoted(problem: str) -> str:
    """Return what the parser complains about without the text it quotes: it may be a secret."""
    return re.sub(r"\s*(['\"])(?!<).{4,}\1", "", problem)


def assign(values: dict[str, Any], dotted: str, value: Any) -> None:
    """Put a value at its place, such as ``cache.max_bytes`` or ``source.0.url``.

    Raises:
        ConfigError: what is in front of the last dot is no section, or a list is shorter.
    """
    *sections, key = dotted.split(".")
    place: Any = values
    for section in sections:
        child = place.setdefault(section, {}) if isinstance(place, dict) else None
        if isinstance(place, list):
            child = place[_number(section, place, dotted)]
        if not isinstance(child, dict | list):
            raise ConfigError(f"{dotted}: {section} is not a section of the config")
        place = child
    place[_number(key, place, dotted) if isinstance(place, list) else key] = value


def _number(word: str, among: list[Any], dotted: str) -> int:
    if word.isascii() and word.isdigit() and int(word) < len(among):
        return int(word)
    raise ConfigError(
        f"{dotted}: expected a number from 0 to {len(among) - 1}, for this is a list in the "
        f"config, found {word}"
    )
