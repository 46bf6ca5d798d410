"""What may be hashed: keys of dicts, elements of sets.

Python hashes text by a secret, but numbers and tuples by rules that anybody can compute, and a
tuple's anew each time it is asked for. So a stranger could make a million keys that collide,
or a small nest of tuples that takes for ever.
"""

from __future__ import annotations

import numpy as np

from growcache.errors import FormatError

MOST_TEXT = 4096  # characters of a key: long ones that are equal are compared again and again
SHORT = 256  # characters; such text needs no further look
MOST_TUPLES = 4096  # as keys, whose collisions cannot be told beforehand
MOST_ITEMS = 64  # of a tuple as a key
_WIDE = 1 << 63  # numbers beyond would have the remainders of others as hashes
_SURE = (bool, float, type(None))


class Keys:
    """Counts what one pickle hashes."""

    __slots__ = ("_tuples",)

    def __init__(self) -> None:
        self._tuples = 0

    def check(self, key: object) -> None:
        """Refuse what may take long to hash or to compare.

        Raises:
            FormatError: not text, bytes, a number or None, or a short tuple of these.
        """
        kind = type(key)
        if (kind is str or kind is bytes) and len(key) <= MOST_TEXT:  # type: ignore[arg-type]
            return
        if not _is_plain(key) and not (kind is tuple and self._is_short(key)):
            raise FormatError(
                f"a pickle has a {kind.__name__} as key of a dict or in a set, or a very long "
                "one; expected text, numbers, or short tuples of them"
            )

    def _is_short(self, key: object) -> bool:
        self._tuples += 1
        return self._tuples <= MOST_TUPLES and _is_plain_tuple(key, 2)


def _is_plain_tuple(key: object, depth: int) -> bool:
    return (
        type(key) is tuple
        and len(key) <= MOST_ITEMS
        and all(
            _is_plain(item) or (depth > 1 and _is_plain_tuple(item, depth - 1)) for item in key
        )
    )


def _is_plain(key: object) -> bool:
    kind = type(key)
    if kind is int:
        return -_WIDE <= key < _WIDE  # type: ignore[operator]
    if kind in _SURE:
        return True
    if isinstance(key, str | bytes):  # NumPy's are Python's as well
        return len(key) <= MOST_TEXT
    return isinstance(key, np.bool_ | np.integer | np.float16 | np.float32 | np.float64)
