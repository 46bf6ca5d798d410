"""What lies beside the shards, so that a lost index is made again and draws nothing twice.

The supervisor writes these small files, each before what it counts: the editions of the
listing, the highest group that a permit was ever given out for, and which visits were set aside.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from growcache.cache.deferrals import Deferrals
from growcache.cache.files import Layout, write_atomic
from growcache.cache.guarded import guarded, unguarded
from growcache.cache.index import Contents, Edition

EDITIONS, ISSUED, DEFERRALS = "editions", "issued", "deferrals"


def write_editions(layout: Layout, editions: Iterable[Edition]) -> None:
    """Keep the editions beside the index too: without them its shards name nothing."""
    rows = [[e.edition, e.objects, e.digest, e.first_group] for e in editions]
    write_atomic(layout.editions, guarded({EDITIONS: rows}))


def read_editions(layout: Layout) -> list[Edition] | None:
    """Return the editions that were recorded; None where the file is damaged."""
    try:
        rows = unguarded(layout.editions.read_bytes())[EDITIONS]
        return [Edition(*row) for row in rows]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, KeyError):
        return None


def write_issued(layout: Layout, group: int) -> None:
    """Note, durably, the highest group that a permit was issued for."""
    write_atomic(layout.issued, guarded({ISSUED: group}))


def read_issued(layout: Layout) -> int | None:
    """Return the highest group a permit was issued for; -1 if none, None if damaged."""
    try:
        return int(unguarded(layout.issued.read_bytes())[ISSUED])
    except FileNotFoundError:
        return -1
    except (ValueError, TypeError, KeyError, OverflowError):
        return None


def write_deferrals(layout: Layout, deferrals: Deferrals) -> None:
    """Keep the record of what was set aside beside the index too."""
    write_atomic(layout.deferrals, guarded({DEFERRALS: deferrals.to_values()}))


def read_deferrals(layout: Layout) -> Deferrals | None:
    """Return the record of what was set aside; None where it is damaged."""
    try:
        return Deferrals.from_values(unguarded(layout.deferrals.read_bytes())[DEFERRALS])
    except FileNotFoundError:
        return Deferrals()
    except (ValueError, TypeError, KeyError):
        return None


def deferrals_of(meta: Mapping[str, Any]) -> Deferrals:
    """Return the record of what was set aside, as an index notes it."""
    values = meta.get(DEFERRALS)
    return Deferrals() if values is None else Deferrals.from_values(values)


def write_beside(
    layout: Layout, editions: Sequence[Edition], issued: int | None, contents: Contents
) -> None:
    """Write again what was lost or is less than an index has rows of.

    Args:
        layout: of the cache.
        editions: as they must be.
        issued: as it was noted; None where that was damaged.
        contents: of the index.
    """
    if read_editions(layout) != editions:
        write_editions(layout, editions)
    deferrals = deferrals_of(contents.meta)
    if read_deferrals(layout) != deferrals:
        write_deferrals(layout, deferrals)
    groups = (*deferrals.numbers, *(row.group for row in contents.rows))
    last = max([-1 if issued is None else issued, *groups])
    if last != (-1 if not layout.issued.exists() else issued):
        write_issued(layout, last)


def editions_of(table: Sequence[Sequence[Any]]) -> list[Edition]:
    """Return the editions that a shard's description names, from the first one on."""
    return [Edition(i, int(o), str(d), int(first)) for i, (o, d, first) in enumerate(table)]


def longest(tables: Iterable[Sequence[Edition]]) -> list[Edition]:
    """Return the longest table that all agree with as far as they go; earlier ones count more.

    >>> a, b = Edition(0, 9, "a", 0), Edition(1, 18, "b", 4)
    >>> longest([[a], [a, b], [b]]) == [a, b]
    True
    """
    best: list[Edition] = []
    for table in tables:
        if len(table) > len(best) and list(table[: len(best)]) == best:
            best = list(table)
    return best
