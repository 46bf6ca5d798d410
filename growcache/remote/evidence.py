"""Which keys a store answered for last: whether a failure is one key's, or the whole store's."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from growcache.remote.store import Entry


@dataclass(frozen=True, slots=True)
class Answered:
    """A read that succeeded.

    Attributes:
        entry: the object.
        at: when, monotonic seconds.
    """

    entry: Entry
    at: float


class Evidence:
    """The last successful reads of one store in this process.

    Two reads of different keys are enough: one of them is not the key in question. Reads may end
    in several threads; a race loses one of two successes that came together.
    """

    def __init__(self) -> None:
        self._last: Answered | None = None
        self._before: Answered | None = None  # the last one of another key

    def answered(self, entry: Entry) -> None:
        """Note a successful read."""
        last = self._last
        if last is not None and last.entry.key != entry.key:
            self._before = last
        self._last = Answered(entry, time.monotonic())

    def others_since(self, key: str, since: float) -> bool:
        """Return whether the store answered for another key.

        Args:
            key: the one that failed.
            since: when its request began, monotonic seconds.
        """
        return any(one.at >= since for one in self._others(key))

    def witnesses(self, key: str) -> list[Entry]:
        """Return objects other than ``key`` that could be read, the last one first."""
        return [one.entry for one in self._others(key)]

    def _others(self, key: str) -> list[Answered]:
        found = (self._last, self._before)
        return [one for one in found if one is not None and one.entry.key != key]
