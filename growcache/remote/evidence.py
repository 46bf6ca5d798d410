"""Which keys a store answered for last: whether a failure is one key's, or the whole store's."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from growcache.remote.store import Entry

LASTS = (
    2.0  # times `timeout_seconds`: for so long an object that was given up is tried only once
)
MOST_GIVEN_UP = 10_000  # objects that are remembered


# A successful read: the object, when it was asked for, and when all of it was there (monotonic
# seconds). One is made for every read, and a tuple is made five times as fast as an object.
_Answered: TypeAlias = "tuple[Entry, float, float]"


class Evidence:
    """The last successful reads of one store in this process.

    Two reads of different keys are enough: one of them is not the key in question. Reads may end
    in several threads; a race loses one of two successes that came together.
    """

    def __init__(self) -> None:
        self._last: _Answered | None = None
        self._before: _Answered | None = None  # the last one of another key

    def answered(self, entry: Entry, began: float) -> None:
        """Note a successful read.

        Args:
            entry: the object.
            began: when it was asked for, monotonic seconds.
        """
        last = self._last
        if last is not None and last[0].key != entry.key:
            self._before = last
        self._last = (entry, began, time.monotonic())

    def others_since(self, key: str, since: float) -> bool:
        """Return whether the store answered for another key.

        Args:
            key: the one that failed.
            since: when its request began, monotonic seconds.
        """
        return any(at >= since for _, _, at in self._others(key))

    def others_asked_since(self, key: str, since: float) -> bool:
        """Return whether the store answered for another key that was asked for since then.

        What was asked for before may have been let in before who asks was refused.
        """
        return any(began >= since for _, began, _ in self._others(key))

    def witnesses(self, key: str) -> list[Entry]:
        """Return objects other than ``key`` that could be read, the last one first."""
        return [entry for entry, _, _ in self._others(key)]

    def _others(self, key: str) -> list[_Answered]:
        found = (self._last, self._before)
        return [one for one in found if one is not None and one[0].key != key]


class GivenUp:
    """The objects of one store that kept failing while others answered.

    Args:
        timeout_seconds: after which a read that keeps failing is given up.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._lasts = LASTS * timeout_seconds
        self._at: dict[str, float] = {}

    def note(self, key: str) -> None:
        """Note that an object was given up now."""
        now = time.monotonic()
        if len(self._at) >= MOST_GIVEN_UP:
            self._at = {k: at for k, at in self._at.items() if at + self._lasts > now}
        if len(self._at) < MOST_GIVEN_UP:
            self._at[key] = now

    def since(self, key: str, moment: float = 0.0) -> bool:
        """Whether an object was given up lately, and after a moment, monotonic seconds."""
        at = self._at.get(key)
        return at is not None and at >= moment and at + self._lasts > time.monotonic()
