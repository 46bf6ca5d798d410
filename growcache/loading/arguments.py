"""Single arguments of a loader, refused in one line where they cannot be meant."""

from __future__ import annotations

import operator
import os
from pathlib import Path
from typing import Any

import numpy as np

from growcache.errors import ConfigError


def whole_number(name: str, value: Any, least: int | None = None) -> int:
    """Return a whole number, whatever type it has, NumPy's or torch's.

    Raises:
        ConfigError: it is none, or less than ``least``.

    >>> whole_number("batch_size", np.int64(8), 1)
    8
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        above = "" if least is None else f" above {least - 1}"
        raise ConfigError(f"{name} must be a whole number{above}, found {value!r}")
    return number


def flag(name: str, value: Any) -> bool:
    """Return a truth value.

    Raises:
        ConfigError: it is none: ``"no"`` would count as true.
    """
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{name} must be True or False, found {value!r}")
    return bool(value)


def refuse_no_directory(path: str | os.PathLike[str]) -> None:
    """Refuse what cannot become a cache, however long a loader waits for it.

    Raises:
        ConfigError: an address, or a file.
    """
    if "://" in str(path):
        raise ConfigError(
            f"path expected as the local directory of a cache, found {path!r}; where objects "
            "are is said in the config, as source.url"
        )
    if Path(path).is_file():
        raise ConfigError(f"path expected as the directory of a cache, found a file: {path}")
