"""Which objects keep failing while others answer, and when each is tried again. Pure.

Parts of such an object are set aside without a try, until a makeup group found that it answers
again; that group tries it now and then, ever more seldom.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from growcache.cache.deferrals import Place

Name: TypeAlias = tuple[int, str]  # of an object: its store and key

FIRST_SECONDS = 30.0  # until the first try; less where `timeout_seconds` is below a third of it
LONGEST_SECONDS = 600.0
MAKEUP_SECONDS = 10.0  # at least between two makeup groups that are not full
EARLIER = "set aside by an earlier run"


@dataclass(slots=True)
class Failing:
    """One object that keeps failing.

    Attributes:
        reason: why, as its last visit said.
        due: when it is to be tried again, monotonic seconds.
        tries: how often it was tried again in this run, in vain.
    """

    reason: str
    due: float
    tries: int = 0


class Setbacks:
    """The failing objects, and the pending places of each.

    Args:
        timeout_seconds: for so long an object has failed when it is noted.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._first = min(FIRST_SECONDS, 3 * timeout_seconds)
        self._longest = min(LONGEST_SECONDS, 60 * timeout_seconds)
        self.failing: dict[Name, Failing] = {}
        self._between = min(MAKEUP_SECONDS, timeout_seconds)
        self._pending: dict[Name, list[Place]] = {}
        self._made_up_at = float("-inf")

    def known(self, name: Name, now: float) -> None:
        """Note an object of which an earlier run set parts aside: it is due at once."""
        self.failing.setdefault(name, Failing(EARLIER, now))

    def failed(self, name: Name, reason: str, now: float, *, again: bool) -> None:
        """Note that a visit to an object was given up, while others answered.

        Args:
            name: of the object.
            reason: why.
            now: monotonic seconds.
            again: whether it was tried again; else it only failed in one more group, mostly.
        """
        found = self.failing.get(name)
        if found is None:
            self.failing[name] = Failing(reason, now + self._first)
            return
        found.reason = reason
        if again and found.due <= now:
            found.tries += 1
            found.due = now + min(self._longest, self._first * 2**found.tries)

    def answered(self, name: Name) -> None:
        """Note that a failing object was read: all that waits for it is due."""
        self.failing.pop(name, None)

    def wait(self, places: Mapping[Place, Name]) -> None:
        """Take over which places are pending, and of which object each is."""
        self._pending = {}
        for place, name in places.items():
            self._pending.setdefault(name, []).append(place)

    def due(
        self, now: float, most: int, trying: Collection[Name] = (), *, idle: bool = False
    ) -> list[Place]:
        """Return the places for the next makeup group; none before its time.

        Args:
            now: monotonic seconds.
            most: how many there may be.
            trying: objects that another makeup group tries.
            idle: whether there is nothing else to draw.
        """
        found: list[Place] = []
        waiting = 0  # parts of groups that outgrew what they may take: no object failed
        for name, places in self._pending.items():
            failing = self.failing.get(name)
            if name not in trying and (failing is None or failing.due <= now):
                found += places
                waiting += len(places) if failing is None else 0
        soon = len(found) >= most or 2 * waiting >= most or (idle and waiting)
        if not soon and now < self._made_up_at + self._between:
            return []
        return sorted(found)[:most]

    def made_up(self, now: float) -> None:
        """Note that a makeup group was made."""
        self._made_up_at = now

    def next_try(self, names: Iterable[Name]) -> float:
        """Return when the first of some failing objects is tried again; infinity for none."""
        return min(
            (self.failing[n].due for n in names if n in self.failing), default=float("inf")
        )

    def tried(self, trying: Collection[Name]) -> bool:
        """Whether every object of which parts wait failed again since it was set aside.

        Args:
            trying: objects of which makeup groups hold parts.
        """
        names = {*self._pending, *trying}
        return all(n in self.failing and self.failing[n].tries for n in names)
