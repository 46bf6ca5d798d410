"""Notes about computed draws, so that a start need not repeat all earlier draws.

Draws are a pure function of the editions, so notes only save time. Notes about other editions
are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from growcache.cache.side_files import Edition

NOTED_POSITIONS = 1 << 22  # repeated by a start at most, which takes about a second
MOST_STRATA = 64  # in the notes


class GrownRun(NamedTuple):
    """The rest of a round after an edition that starts within it."""

    positions: int  # drawn from the previous order
    draws: int
    moved: int


class Place(NamedTuple):
    draw: int
    position: int  # after it, in the order of its round


class DrawNotes:
    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        values = values or {}
        self._own: dict[str, int] = dict(values.get("own", {}))
        self._grown: dict[str, list[int]] = dict(values.get("grown", {}))
        self._places: dict[str, list[int]] = dict(values.get("places", {}))
        self._moved: dict[str, list[int]] = dict(values.get("moved", {}))
        self._walked = 0

    @classmethod
    def of(cls, stored: Mapping[str, Any] | None, editions: Sequence[Edition]) -> DrawNotes:
        """Return the notes if they are about these editions, or the first of them; otherwise none."""
        noted = (stored or {}).get("editions", [])
        known = [list(edition.values) for edition in editions[: len(noted)]]
        return cls(stored if noted and noted == known else None)

    def values(self, editions: Sequence[Edition]) -> dict[str, Any]:
        self._walked = 0
        return {
            "editions": [list(edition.values) for edition in editions],
            "own": self._own,
            "grown": self._grown,
            "places": self._places,
            "moved": self._moved,
        }

    def walked(self, positions: int) -> None:
        self._walked += positions

    @property
    def are_due(self) -> bool:
        """Whether writing the notes costs less than repeating the draws."""
        return self._walked >= NOTED_POSITIONS

    def own(self, edition: Edition) -> int | None:
        """Return the number of this node's parts in an edition with one stratum, or None."""
        return self._own.get(_key(edition))

    def note_own(self, edition: Edition, parts: int, of: int) -> None:
        self._own[_key(edition)] = parts
        self.walked(of)

    def grown(self, stratum: int, edition: int) -> GrownRun | None:
        found = self._grown.get(f"{stratum} {edition}")
        return None if found is None else GrownRun(*found)

    def note_grown(self, stratum: int, edition: int, run: GrownRun) -> None:
        if stratum < MOST_STRATA:
            self._grown[f"{stratum} {edition}"] = list(run)

    def place(self, stratum: int, edition: int) -> Place | None:
        """Return the last noted draw of a stratum if it is from an order of this edition."""
        found = self._places.get(str(stratum))
        return Place(*found[1:]) if found and found[0] == edition else None

    def note_place(self, stratum: int, edition: int, place: Place) -> None:
        if stratum < MOST_STRATA:
            self._places[str(stratum)] = [edition, *place]

    def moved(self, stratum: int, edition: int, run: int) -> tuple[int, int] | None:
        """Return a draw of a run, and the moved parts before it. ``run`` is its first draw."""
        found = self._moved.get(f"{stratum} {edition} {run}")
        return None if found is None else (found[0], found[1])

    def note_moved(self, stratum: int, edition: int, run: int, found: tuple[int, int]) -> None:
        if stratum < MOST_STRATA:
            self._moved[f"{stratum} {edition} {run}"] = list(found)


def _key(edition: Edition) -> str:
    """Return a key with all values, because a failed edition is retried with more objects."""
    return " ".join(map(str, (edition.edition, *edition.values)))
