"""Options that say by name what is taken of an object: fields, columns, features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from growcache.errors import ConfigError


def different_names(option: str, value: object, of: str = "names") -> tuple[str, ...] | None:
    """Return a list of names; None where all are meant.

    Args:
        option: of ``source.options``.
        value: of it.
        of: what the names are, in words.

    Raises:
        ConfigError: it is something else, or has a name twice.
    """
    if value is None:
        return None
    if isinstance(value, list | tuple) and value:
        plain = all(type(name) is str and name for name in value)
        if plain and len(set(value)) == len(value):
            return tuple(value)
    raise ConfigError(
        f"source.options.{option}: expected a list of different {of}, found {value!r}"
    )


def names_and_more(option: str, value: object, such_as: str) -> Mapping[str, Any] | None:
    """Return names with what each of them shall be, None as it is found; None: all are meant.

    Args:
        option: of ``source.options``.
        value: of it: a list of names, or a mapping.
        such_as: a mapping, for whoever gave something else.

    Raises:
        ConfigError: it is neither.
    """
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return dict.fromkeys(different_names(option, value) or ())
    if not isinstance(value, Mapping) or not value:
        raise ConfigError(
            f"source.options.{option}: expected a list of names, or a mapping such as {such_as}, "
            f"found {value!r}"
        )
    for name in value:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"source.options.{option}: expected names, found {name!r}")
    return value
