"""Choose the records of a history to keep: all of the last hour, and ever fewer before. Pure.

Time is divided into slots, whose width grows with the age in powers of two. Each slot keeps its
first record. A wider slot consists of whole narrower ones, so records are not thinned unevenly
later. A record has only the jobs that changed, so the jobs of a dropped record move to the next
one that stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import Any

FINE_SECONDS = 3600.0  # age up to which every record stays, if half of the room suffices
UNIT_SECONDS = 10.0  # between two records; also the narrowest slot
KEPT_SHARE = 0.9  # of the room is used after thinning, so that not every record needs one
GROWTH_STEP = 1.25
LEAST_FINE_SECONDS = 0.01
MOST_JOBS = 16  # of a record, including those that moved into it


def records_to_drop(times: Sequence[float], now: float, keep: int) -> list[int]:
    """Return the indices of records to drop, so that at most ``keep`` remain, with some spare room.

    Args:
        times: Times of the records, in any order.
        now: Time from which ages are counted.
        keep: Number of records that may remain. The first and the last always do.
    """
    if len(times) <= keep:
        return []
    now = max(now, *times)  # the clock may have been set back
    fine = min(FINE_SECONDS, UNIT_SECONDS * keep / 2)
    span = max(math.e, (now - min(times)) / fine)
    growth, most = math.log(span) / max(1, keep / 2), int(max(2, KEPT_SHARE * keep))
    while len(kept := _kept(times, now, fine, growth)) > most:
        growth *= GROWTH_STEP
        if growth > 1:  # records are denser than a service writes them
            fine /= 2
        if fine < LEAST_FINE_SECONDS:
            kept = _evenly_spread(times, most)
            break
    return sorted(set(range(len(times))) - kept)


def _evenly_spread(times: Sequence[float], most: int) -> set[int]:
    """Return ``most`` indices by rank, because age does not separate records of the same time."""
    order = sorted(range(len(times)), key=times.__getitem__)
    return {order[i * (len(order) - 1) // (most - 1)] for i in range(most)}


def _kept(times: Sequence[float], now: float, fine: float, growth: float) -> set[int]:
    order = sorted(range(len(times)), key=times.__getitem__)
    first_of_slot: dict[tuple[float, float], int] = {}
    for index in order:
        at = times[index]
        width = slot_width(now - at, fine, growth)
        first_of_slot.setdefault((width, at // width if width else index), index)
    return {order[0], order[-1], *first_of_slot.values()}


def slot_width(age: float, fine: float, growth: float) -> float:
    """Return the width of a slot in seconds; 0 keeps every record.

    >>> [slot_width(age, 3600.0, 0.01) for age in (60.0, 7200.0, 86400.0)]
    [0.0, 80.0, 1280.0]
    """
    if age <= fine:
        return 0.0
    steps = math.ceil(math.log2(max(1.0, growth * age / UNIT_SECONDS)))
    return UNIT_SECONDS * 2.0 ** min(steps, 60)


def move_jobs_on(
    rows: Sequence[tuple[float, object]], dropped: Set[int]
) -> dict[int, dict[str, Any]]:
    """Return the records that change when others are dropped, by index.

    Args:
        rows: Times and records, in any order. A record of another version may be anything.
        dropped: Indices of the records that are dropped.

    >>> move_jobs_on([(0, {"jobs": {"a": 1, "b": 1}}), (10, {"jobs": {"a": 2}})], {0})
    {1: {'jobs': {'b': 1, 'a': 2}}}
    """
    changed: dict[int, dict[str, Any]] = {}
    moving: dict[str, Any] = {}
    for index in sorted(range(len(rows)), key=lambda index: rows[index][0]):
        record = rows[index][1]
        if not isinstance(record, dict):
            continue
        jobs = record.get("jobs")
        jobs = jobs if isinstance(jobs, dict) else {}
        older = {job: one for job, one in moving.items() if job not in jobs}
        moving = older | jobs
        if index in dropped:
            continue
        if older:
            changed[index] = record | {"jobs": dict([*moving.items()][-MOST_JOBS:])}
        moving = {}
    return changed
