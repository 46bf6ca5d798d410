"""Build NumPy dtypes from their pickled state, with checks that NumPy does not make."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from growcache.errors import FormatError

MOST_FIELDS = 1024  # of a record
OBJECT_ARRAY_MESSAGE = (
    "a pickle has an array of Python objects, and only arrays of numbers, dates and text are "
    "read from pickles; store one array per value, or a list of arrays"
)
_PLAIN = re.compile(r"b1|[iu][1248]|f(2|4|8|16)|c(8|16|32)|[SUV][0-9]{1,9}")
_DATE = re.compile(r"[mM]8")
_UNITS = ("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as")
_ALIGNED = 0x80  # of the flags
_MOST_COUNT = 1 << 31  # most units in one step of a date


def dtype_from_state(name: str, state: Any, spend: Callable[[int], None]) -> np.dtype[Any]:
    """Return the dtype of a pickled state.

    ``spend`` is called with the number of fields of a record.
    """
    version, order, inner, names, fields, size, _alignment, flags, *more = state
    if version not in (3, 4) or order not in ("<", ">", "|", "="):
        raise ValueError
    if name.startswith("O"):
        raise FormatError(OBJECT_ARRAY_MESSAGE, code="GC304")
    if _DATE.fullmatch(name):
        return np.dtype(f"{order}{name}{_unit(more)}")
    if not _PLAIN.fullmatch(name):
        raise FormatError(
            f"a pickle has an array of dtype {ascii(name)[:40]}; refused", code="GC304"
        )
    if name.startswith("V") and inner is not None:
        found = _array_of(*inner)
    elif name.startswith("V") and names is not None:
        spend(len(names))
        found = _record(names, fields, size, flags)
    else:
        return _plain(name, order)
    if found.hasobject:
        raise FormatError(OBJECT_ARRAY_MESSAGE, code="GC304")
    return found


@functools.lru_cache(maxsize=256)
def _plain(name: str, order: Any) -> np.dtype[Any]:
    return np.dtype(name).newbyteorder(order)


def _unit(more: list[Any]) -> str:
    """Return the unit of a date, as in ``M8[25s]``."""
    if not more:
        return ""
    unit, count, *_ = more[0][1]
    unit = unit if type(unit) is str else unit.decode("ascii")
    if unit == "generic":
        return ""
    if unit not in _UNITS or type(count) is not int or not 0 < count < _MOST_COUNT:
        raise ValueError
    return f"[{count}{unit}]"


def _array_of(base: Any, shape: Any) -> np.dtype[Any]:
    sizes = shape if type(shape) is tuple else (shape,)
    if not isinstance(base, np.dtype) or not all(type(n) is int and n >= 0 for n in sizes):
        raise TypeError
    return np.dtype((base, sizes))


def _record(names: Any, fields: Any, size: Any, flags: Any) -> np.dtype[Any]:
    if type(names) is not tuple or len(names) > MOST_FIELDS or type(fields) is not dict:
        raise TypeError
    described = [fields[name] for name in names]
    titles = [one[2] if len(one) == 3 else None for one in described]
    for one in described:
        if not isinstance(one[0], np.dtype) or type(one[1]) is not int:
            raise TypeError
    if not all(type(text) is str for text in (*names, *filter(None, titles))):
        raise TypeError
    if type(size) is not int:
        raise TypeError
    return np.dtype(
        {
            "names": list(names),
            "formats": [one[0] for one in described],
            "offsets": [one[1] for one in described],
            "titles": titles,
            "itemsize": size,
        },
        align=bool(flags & _ALIGNED),
    )
