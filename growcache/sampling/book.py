"""Which group is filled next: what a crash or a failure left open, then a new one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 60.0


@dataclass(slots=True)
class _Open:
    tries: int
    due: float  # monotonic seconds
    suspicion: int = 0


class Book:
    """The groups that were issued and are not committed, and the number of the next one.

    Args:
        next_new: the first group that was never issued.
        unfinished: issued by an earlier run, but not committed.
    """

    def __init__(self, next_new: int, unfinished: Iterable[int]) -> None:
        self.next_new = next_new
        self._open = {group: _Open(0, 0.0) for group in unfinished}
        self._filling: dict[int, _Open] = {}

    @property
    def filling(self) -> int:
        """How many groups samplers work on."""
        return len(self._filling)

    @property
    def settled(self) -> bool:
        """Whether every group that was issued is committed."""
        return not self._open and not self._filling

    @property
    def failing(self) -> int:
        """How many groups failed and wait for another try."""
        return sum(1 for entry in self._open.values() if entry.tries)

    def due(self, now: float) -> int | None:
        """Return the lowest open group whose time has come; None where there is none."""
        return min((g for g, entry in self._open.items() if entry.due <= now), default=None)

    def start(self, group: int) -> int:
        """Note that a sampler fills the group now; return the number of this try, from 0."""
        entry = self._open.pop(group, _Open(0, 0.0))
        self._filling[group] = entry
        self.next_new = max(self.next_new, group + 1)
        return entry.tries

    def done(self, group: int) -> None:
        """Note that the group is committed."""
        del self._filling[group]

    def failed(self, group: int, now: float) -> None:
        """Note that the group must be filled again, each time later than the last."""
        entry = self._filling.pop(group)
        tries = entry.tries + 1
        delay = min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2 ** (tries - 1))
        self._open[group] = _Open(tries, now + delay, entry.suspicion)

    def abandoned(self, group: int, suspicion: int = 1) -> int:
        """Note that the group's sampler died: it is filled again at once.

        Args:
            group: that it filled.
            suspicion: how much this death speaks against the group.

        Returns:
            The group's suspicion by now.
        """
        entry = self._filling.pop(group)
        self._open[group] = _Open(entry.tries, 0.0, entry.suspicion + suspicion)
        return entry.suspicion + suspicion
