"""Deferrals: the visits that were set aside, and the makeup groups that have their parts. Pure.

A *place* is a visit of a group: (group, number of the visit in the group). A *deferred* place
yields nothing to its group. A *makeup group* draws its part later. Makeup groups have numbers
of their own and take nothing from the order of the draws. So a part is drawn once, whenever it
is deferred, and no committed shard changes.

Holes that are *retried* are deferred afterwards. From then on the group is filled without them,
as it was, and a makeup group reads the current version of the object.

The record is written into the index and into a file before a group that lacks visits is
committed, and before a makeup group is issued.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any, Self, TypeAlias

Place: TypeAlias = tuple[int, int]  # group, number of the visit in the group
Places: TypeAlias = Mapping[int, frozenset[int]]

MOST_MAKEUPS = 2000  # groups; each sidecar lists all earlier ones
_MOST = 1 << 62


@dataclass(frozen=True)
class Deferrals:
    deferred: Places = field(default_factory=dict)  # set aside, by group
    retried: Places = field(default_factory=dict)  # holes that are retried, by group
    # Places of each makeup group, as first drawn; empty if they were lost.
    makeups: Mapping[int, tuple[Place, ...]] = field(default_factory=dict)
    given_up: int = 0  # lost makeup groups may have places of groups below this one
    serial: int = 0  # number of changes so far

    # --- numbers ---

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        return tuple(sorted(self.makeups))

    def before(self, group: int) -> tuple[int, ...]:
        return self.numbers[: bisect_left(self.numbers, group)]

    def draw_number(self, group: int) -> int:
        """Return the number of earlier groups that are not makeup groups; it orders the draws.

        >>> [Deferrals(makeups={2: (), 3: ()}).draw_number(group) for group in range(6)]
        [0, 1, 2, 2, 2, 3]
        """
        return group - bisect_left(self.numbers, group)

    def last_drawn(self, stop: int) -> int:
        """Return the last group below ``stop`` that is not a makeup group, or -1."""
        while stop and stop - 1 in self.makeups:
            stop -= 1
        return stop - 1

    # --- places ---

    def left_out(self, group: int) -> frozenset[int]:
        nothing: frozenset[int] = frozenset()
        return self.deferred.get(group, nothing) | self.retried.get(group, nothing)

    @cached_property
    def _renewed(self) -> Mapping[Place, int]:
        """The places that were holes, as first drawn, each with the first makeup group after it."""
        found: dict[Place, int] = {}
        for group in sorted(self.retried, reverse=True):
            found.update((self.first_drawn((group, at)), group) for at in self.retried[group])
        return found

    def renews(self, first: Place, number: int) -> bool:
        """Whether a place was a hole before makeup group ``number``, so its object may have changed."""
        return self._renewed.get(first, number) < number

    def first_drawn(self, place: Place) -> Place:
        held = self.makeups.get(place[0])
        return place if held is None else held[place[1]]

    @cached_property
    def pending(self) -> tuple[Place, ...]:
        """The places whose parts no makeup group has, as first drawn."""
        waits = {
            (group, place): group >= self.given_up
            for group in {*self.deferred, *self.retried} - self.makeups.keys()
            for place in self.left_out(group)
        }
        for number in self.numbers:
            left = self.left_out(number)
            for at, first in enumerate(self.makeups[number]):
                waits[first] = at in left and number >= self.given_up
        return tuple(sorted(place for place, waiting in waits.items() if waiting))

    @cached_property
    def size(self) -> int:
        lists = [*self.deferred.values(), *self.retried.values(), *self.makeups.values()]
        return sum(map(len, lists))

    def __bool__(self) -> bool:
        return bool(self.deferred or self.retried or self.makeups)

    # --- changes ---

    def deferring(self, group: int, places: Iterable[int]) -> Self:
        return self._changed(deferred=_with(self.deferred, group, places))

    def retrying(self, group: int, places: Iterable[int]) -> Self:
        return self._changed(retried=_with(self.retried, group, places))

    def making_up(self, number: int, places: Iterable[Place]) -> Self:
        """Return the record with another makeup group, with the highest number, for pending places."""
        held = tuple(sorted(places))
        if number <= max(self.numbers, default=-1) or not set(held) <= set(self.pending):
            raise ValueError(f"group {number} cannot make up for {held[:5]}")
        return self._changed(makeups={**self.makeups, number: held})

    def forgetting(self, stop: int) -> Self:
        """Return the record without the contents of committed makeup groups below ``stop``.

        Their numbers stay. A part that one of them deferred counts as deferred in the group
        that first drew it.
        """
        kept = {n: () if n < stop else held for n, held in self.makeups.items()}
        gone = {first for held in self.makeups.values() for first in held}
        gone -= {*self.pending, *(first for held in kept.values() for first in held)}
        retried = self.retried
        for n in (n for n in self.numbers if n < stop):
            again = {self.makeups[n][at] for at in self.retried.get(n, ())} - gone
            for group, place in again:
                retried = _with(retried, group, [place])
            gone |= {(n, at) for at in self.left_out(n)}
        return self._changed(
            deferred=_without(self.deferred, gone),
            retried=_without(retried, gone),
            makeups=kept,
        )

    def _changed(self, **values: Any) -> Self:
        return replace(self, **values, serial=self.serial + 1)

    # --- JSON ---

    def to_values(self) -> dict[str, Any]:
        return {
            "deferred": [
                [group, sorted(self.deferred[group])] for group in sorted(self.deferred)
            ],
            "retried": [[group, sorted(self.retried[group])] for group in sorted(self.retried)],
            "makeups": [[n, _packed(self.makeups[n])] for n in self.numbers],
            "given_up": self.given_up,
            "serial": self.serial,
        }

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """Return the record that `to_values` described.

        Raises ValueError, TypeError or KeyError if the values are damaged.
        """
        return cls(
            {number(group): _numbers(places) for group, places in values["deferred"]},
            {number(group): _numbers(places) for group, places in values["retried"]},
            {number(group): _unpacked(held) for group, held in values["makeups"]},
            number(values["given_up"]),
            number(values["serial"]),
        )


@dataclass(frozen=True, slots=True)
class ShardDeferrals:
    group: int
    left_out: tuple[int, ...] = ()  # deferred visits of this shard
    makeups: tuple[int, ...] = ()  # earlier makeup groups
    # Group and place where first drawn; 1: a hole.
    made_up: tuple[tuple[int, int, int], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.left_out or self.makeups or self.made_up)


def from_shards(deferral_notes: Iterable[ShardDeferrals], last: int, issued: int) -> Deferrals:
    """Return the record that shards alone imply if the record is lost. Nothing is drawn twice.

    The contents of an evicted makeup group are unknown, so earlier deferrals are given up.
    ``last`` is the highest group on disk, and ``issued`` the highest with a permit.
    """
    deferred: dict[int, set[int]] = {}
    retried: dict[int, set[int]] = {}
    makeups: dict[int, tuple[Place, ...]] = {}
    for one in deferral_notes:
        deferred.setdefault(one.group, set()).update(one.left_out)
        for number_ in one.makeups:
            makeups.setdefault(number_, ())
        if one.made_up:
            makeups[one.group] = tuple((group, place) for group, place, _ in one.made_up)
        for group, place, was_hole in one.made_up:
            (retried if was_hole else deferred).setdefault(group, set()).add(place)
    places = {
        group: frozenset(found - retried.get(group, set())) for group, found in deferred.items()
    }
    unknown = [n for n, held in makeups.items() if not held]
    unknown += [issued] if issued > last else []
    return Deferrals(
        {group: found for group, found in places.items() if found},
        {group: frozenset(found) for group, found in retried.items()},
        makeups,
        max(unknown, default=-1) + 1,
    )


def newest(records: Iterable[Deferrals | None]) -> Deferrals | None:
    kept = [record for record in records if record is not None and record.serial]
    return max(kept, key=lambda record: record.serial, default=None)


def number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError("not a number")
    return value


def _with(places: Places, group: int, more: Iterable[int]) -> Places:
    return {**places, group: places.get(group, frozenset()) | frozenset(more)}


def _without(places: Places, gone: set[Place]) -> Places:
    kept = {
        group: frozenset(place for place in found if (group, place) not in gone)
        for group, found in places.items()
    }
    return {group: found for group, found in kept.items() if found}


def _numbers(values: Sequence[Any]) -> frozenset[int]:
    return frozenset(map(number, values))


def _packed(held: Sequence[Place]) -> list[Any]:
    grouped = groupby(held, key=lambda place: place[0])
    return [[group, [place for _, place in places]] for group, places in grouped]


def _unpacked(values: Sequence[Any]) -> tuple[Place, ...]:
    return tuple((number(group), number(place)) for group, places in values for place in places)
