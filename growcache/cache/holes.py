"""The holes of a cache that are known one by one: those of its shards, and the last of others."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from growcache.cache.files import Layout
from growcache.cache.index import StockRow
from growcache.cache.sidecar import Sidecar
from growcache.errors import CorruptShardError


class NotedHole(NamedTuple):
    """A visit that yielded nothing.

    Attributes:
        shard: that the visit is counted to.
        key: of the object; of several the first.
        part: of the object.
        version: of the object, where that is another than the listed one; else empty.
    """

    shard: int
    key: str
    part: int
    version: str = ""


def noted_holes(
    layout: Layout, rows: Iterable[StockRow], others: Iterable[tuple[int, str, int]]
) -> list[NotedHole]:
    """Return the holes that are known; not such as lie beside samples of the same visit.

    Args:
        layout: of the cache.
        rows: of the shards that lie there.
        others: shard, key and part of holes that the index notes, of whatever shard.
    """
    rows = list(rows)
    here = {row.number for row in rows}
    with_holes = {row.group for row in rows if row.holes}
    found = [NotedHole(*other) for other in others if other[0] not in here]
    brought: set[tuple[int, str, int]] = set()
    groups: dict[int, int] = {}
    for row in rows:
        groups[row.number] = row.group
        if row.group not in with_holes:
            continue
        with suppress(CorruptShardError, OSError):  # `check` names those
            sidecar = Sidecar.from_bytes(layout.sidecar(row.number).read_bytes())
            found += [NotedHole(row.number, h.key, h.part, h.version) for h in sidecar.holes]
            o = sidecar.origins
            parts = zip(o.object, o.part, strict=True)
            brought.update((row.group, o.keys[at], part) for at, part in parts)
    return [h for h in found if (groups.get(h.shard, -1), h.key, h.part) not in brought]
