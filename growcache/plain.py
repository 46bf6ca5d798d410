"""Values of a configuration as JSON has them, and back.

YAML knows more than JSON: not-a-number, dates, bytes, sets, keys that are no text. Such a value
becomes a mapping with one tag, so that two values have the same JSON exactly if they are the same
to the user's code. Sequences are one kind: tuples come back as lists.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from datetime import date, datetime
from pathlib import PurePath
from typing import Any

from growcache.errors import ConfigError

MAP, FLOAT, INT, DATE, TIME, BYTES, SET = (
    "!map", "!float", "!int", "!date", "!time", "!bytes", "!set",
)  # fmt: skip
MOST_INTEGER = 1 << 63  # JSON of ours has integers of 64 bits


def to_plain(value: Any) -> Any:
    """Return a JSON value that `from_plain` makes the same value of.

    Raises:
        ConfigError: it is nothing that YAML could have said.

    >>> to_plain({"fill": float("nan"), "names": {0: "cat"}, "shape": (3, None)})
    {'fill': {'!float': 'nan'}, 'names': {'!map': [[0, 'cat']]}, 'shape': [3, None]}
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value) if -MOST_INTEGER <= value < MOST_INTEGER else {INT: str(int(value))}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {FLOAT: repr(float(value))}
    if isinstance(value, Mapping):
        return _plain_mapping(value)
    if isinstance(value, list | tuple):
        return [to_plain(one) for one in value]
    if isinstance(value, set | frozenset):
        return {SET: sorted((to_plain(one) for one in value), key=repr)}
    if isinstance(value, datetime):
        return {TIME: value.isoformat()}
    if isinstance(value, date):
        return {DATE: value.isoformat()}
    if isinstance(value, bytes):
        return {BYTES: base64.b64encode(value).decode()}
    if isinstance(value, PurePath):
        return str(value)
    raise ConfigError(
        f"config: expected values as YAML has them, found {type(value).__name__}; "
        "give numbers, text, lists and mappings, and let your code make the rest of them"
    )


def _plain_mapping(value: Mapping[Any, Any]) -> Any:
    if all(isinstance(name, str) and not name.startswith("!") for name in value):
        return {name: to_plain(inner) for name, inner in value.items()}
    pairs = ([to_plain(name), to_plain(inner)] for name, inner in value.items())
    return {MAP: sorted(pairs, key=repr)}


def from_plain(value: Any) -> Any:
    """Return the value that `to_plain` was given.

    >>> from_plain({"!map": [[0, "cat"]]}), from_plain({"!int": "36893488147419103232"})
    ({0: 'cat'}, 36893488147419103232)
    """
    if isinstance(value, list):
        return [from_plain(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    if len(value) == 1:
        ((tag, inner),) = value.items()
        if tag in _MAKERS:
            return _MAKERS[tag](inner)
    return {name: from_plain(inner) for name, inner in value.items()}


_MAKERS: dict[str, Callable[[Any], Any]] = {
    MAP: lambda pairs: {from_plain(name): from_plain(inner) for name, inner in pairs},
    FLOAT: float,
    INT: int,
    DATE: date.fromisoformat,
    TIME: datetime.fromisoformat,
    BYTES: base64.b64decode,
    SET: lambda members: set(map(from_plain, members)),
}
