"""What was computed of the draws, so that a start need not walk through all that were made before.

Draws are a pure function of the editions, so a note only saves time. Notes of other editions are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from growcache.cache.side_files import Edition

NOTED_POSITIONS = 1 << 22  # that a start walks through again, at most; a second or so
MOST_STRATA = 64  # that are noted


class GrownRun(NamedTuple):
    """What an edition that begins within a round makes of the rest of it."""

    positions: int  # drawn from the order before
    draws: int
    moved: int


class Place(NamedTuple):
    draw: int
    position: int  # behind it, in the order of its round


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
        """Return the notes if they are of these editions, or of the first of them; else none."""
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
        """Whether to write them costs less than to walk again."""
        return self._walked >= NOTED_POSITIONS

    def own(self, edition: Edition) -> int | None:
        """Return the parts of the only stratum that are this node's, in an edition."""
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
        """Return the last noted draw of a stratum if it is of an order of this edition."""
        found = self._places.get(str(stratum))
        return Place(*found[1:]) if found and found[0] == edition else None

    def note_place(self, stratum: int, edition: int, place: Place) -> None:
        if stratum < MOST_STRATA:
            self._places[str(stratum)] = [edition, *place]

    def moved(self, stratum: int, edition: int, run: int) -> tuple[int, int] | None:
        """Return a draw of a run, and the moved parts before it; ``run``: its first draw."""
        found = self._moved.get(f"{stratum} {edition} {run}")
        return None if found is None else (found[0], found[1])

    def note_moved(self, stratum: int, edition: int, run: int, found: tuple[int, int]) -> None:
        if stratum < MOST_STRATA:
            self._moved[f"{stratum} {edition} {run}"] = list(found)


def _key(edition: Edition) -> str:
    """All of an edition, because one that could not be recorded is tried again with more objects."""
    return " ".join(map(str, (edition.edition, *edition.values)))
