"""Which group is filled next: what readers wish for, what was left open, then a new one."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 60.0
LONGEST_DISK_SECONDS = 2.0


@dataclass(slots=True)
class _Open:
    tries: int = 0
    due: float = 0.0  # monotonic seconds
    suspicion: int = 0
    set_aside: bool = False


class Book:
    """The groups that were issued and are not committed, and the number of the next one.

    Beside them it keeps the order of the groups that readers wish for. These are open ones,
    committed ones that are filled *again*, and such as were never issued.

    Args:
        next_new: the first group that was never issued.
        unfinished: issued by an earlier run, but not committed.
    """

    def __init__(self, next_new: int, unfinished: Iterable[int]) -> None:
        self.next_new = next_new
        self._untried = sorted(unfinished)  # a heap, for there may be very many
        self._tried_early: set[int] = set()  # of the untried, and still among them
        self._open: dict[int, _Open] = {}
        self._filling: dict[int, _Open] = {}
        self._wished: dict[int, None] = {}
        self._again: dict[int, _Open] = {}
        self._filled_again: set[int] = set()

    @property
    def filling(self) -> int:
        """How many groups samplers work on."""
        return len(self._filling)

    @property
    def settled(self) -> bool:
        """Whether every group that was issued is committed."""
        return not self.behind and not self._open and self._filling.keys() <= self._filled_again

    @property
    def behind(self) -> bool:
        """Whether a group was issued that this run did not try yet."""
        while self._untried and self._untried[0] in self._tried_early:
            self._tried_early.remove(heapq.heappop(self._untried))
        return bool(self._untried)

    @property
    def failing(self) -> int:
        """How many groups failed and wait for another try, but for those that are set aside."""
        return sum(1 for entry in self._open.values() if entry.tries and not entry.set_aside)

    @property
    def only_set_aside(self) -> bool:
        """Whether every group that is not committed was tried, and is set aside."""
        return not (self.behind or self._filling) and all(
            entry.set_aside for entry in self._open.values()
        )

    def due(self, now: float) -> int | None:
        """Return the lowest open group whose time has come; None where there is none."""
        ready = [group for group, entry in self._open.items() if entry.due <= now]
        return min(ready + (self._untried[:1] if self.behind else []), default=None)

    def wish(self, groups: Iterable[int]) -> None:
        """Note the groups that are wished for now, those to be filled first in front."""
        self._wished = dict.fromkeys(groups)
        self._again = {g: entry for g, entry in self._again.items() if g in self._wished}

    def due_wish(self, now: float, *, issued: bool = False) -> int | None:
        """Return the first group wished for that nobody fills and whose time has come.

        Args:
            now: monotonic seconds.
            issued: leave out groups that were never issued.
        """
        for group in self._wished:
            entry = self._entry(group)
            due = group not in self._filling and (entry is None or entry.due <= now)
            if due and not (issued and group >= self.next_new):
                return group
        return None

    @property
    def urgent(self) -> int:
        """How many groups are wished for and did not fail yet; new ones come after them."""
        entries = map(self._entry, self._wished)
        return sum(1 for entry in entries if entry is None or not entry.tries)

    def _entry(self, group: int) -> _Open | None:
        for entries in (self._filling, self._open, self._again):
            if group in entries:
                return entries[group]
        return None

    def start(self, group: int, *, again: bool = False) -> int:
        """Note that a sampler fills the group now; return the number of this try, from 0.

        Args:
            group: an open one, one that was never issued, or one that was committed before.
            again: whether it was committed before. Where it is skipped to, the groups in
                front of it are open from now on.
        """
        entry = (self._again if again else self._open).pop(group, None)
        if again:
            self._filled_again.add(group)
        elif entry is None:
            self._begin(group)
        self._filling[group] = entry or _Open()
        return self._filling[group].tries

    def _begin(self, group: int) -> None:
        if group >= self.next_new:
            self._untried.extend(range(self.next_new, group))  # larger than all: still a heap
            self.next_new = group + 1
        else:
            self._tried_early.add(group)

    def done(self, group: int) -> None:
        """Note that the group is committed."""
        del self._filling[group]
        self._filled_again.discard(group)

    def failed(self, group: int, now: float, *, disk: bool = False) -> None:
        """Note that the group must be filled again, each time later than the last.

        Args:
            group: that failed.
            now: monotonic seconds.
            disk: it was the local disk that failed. While it is known to be full groups wait
                in memory, so that to try again soon costs little.
        """
        entry = self._filling[group]
        tries = entry.tries + 1
        longest = LONGEST_DISK_SECONDS if disk else LONGEST_DELAY_SECONDS
        delay = min(longest, FIRST_DELAY_SECONDS * 2 ** (tries - 1))
        self._reopen(group, _Open(tries, now + delay, entry.suspicion))

    def set_aside(self, group: int, due: float) -> None:
        """Note that all objects of a makeup group still fail, and when it is tried again."""
        entry = self._filling[group]
        self._reopen(group, _Open(entry.tries + 1, due, entry.suspicion, set_aside=True))

    def returned(self, group: int) -> None:
        """Note that nothing was tried in truth: the group is filled again as if it never was."""
        entry = self._filling[group]
        self._reopen(group, _Open(entry.tries, 0.0, entry.suspicion))

    def abandoned(self, group: int, suspicion: int = 1) -> int:
        """Note that the group's sampler died: it is filled again at once.

        Args:
            group: that it filled.
            suspicion: how much this death speaks against the group.

        Returns:
            The group's suspicion by now.
        """
        entry = self._filling[group]
        self._reopen(group, _Open(entry.tries, 0.0, entry.suspicion + suspicion))
        return entry.suspicion + suspicion

    def _reopen(self, group: int, entry: _Open) -> None:
        again = group in self._filled_again
        self.done(group)
        (self._again if again else self._open)[group] = entry
