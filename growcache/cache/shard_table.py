"""The shards of the cache with their sums, and the holes that they and the index name.

A cache may hold tens of thousands of shards, so nothing that happens at every commit walks them.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from growcache.cache.files import CacheLayout
from growcache.cache.index.schema import ShardState, ShardTableRow
from growcache.cache.sidecar import Sidecar
from growcache.errors import CorruptShardError


class ShardTable:
    """The shards whose files lie in the directory.

    Attributes:
        live: by number, oldest first.
        retired: by number; they go when their last reader lets go.
        live_samples: in live shards.
        live_bytes: allocated by live shards and their sidecars.
        retired_bytes: allocated by retired ones.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin anew with nothing."""
        self.live: dict[int, ShardTableRow] = {}
        self.retired: dict[int, ShardTableRow] = {}
        self.live_samples = self.live_bytes = self.retired_bytes = 0

    def __contains__(self, number: object) -> bool:
        return number in self.live or number in self.retired

    @property
    def bytes(self) -> int:
        """Allocated by all of them."""
        return self.live_bytes + self.retired_bytes

    def add(self, rows: Iterable[ShardTableRow]) -> None:
        """Take shards in, each younger than those before it."""
        for row in rows:
            if row.state == ShardState.RETIRED:
                self.retired[row.number] = row
                self.retired_bytes += row.allocated
            else:
                self.live[row.number] = row
                self.live_samples += row.samples
                self.live_bytes += row.allocated

    def retire(self, rows: Iterable[ShardTableRow]) -> None:
        """Move live shards to the retired ones."""
        for row in rows:
            del self.live[row.number]
            self.live_samples -= row.samples
            self.live_bytes -= row.allocated
            self.add([row._replace(state=ShardState.RETIRED)])

    def revive(self, rows: Iterable[ShardTableRow]) -> None:
        """Move retired shards back to the live ones."""
        for row in rows:
            self.remove([row.number])
            self.add([row._replace(state=ShardState.LIVE)])
        self.live = dict(sorted(self.live.items(), key=lambda item: item[1].seq))

    def remove(self, numbers: Iterable[int]) -> None:
        """Forget retired shards, whose files are gone."""
        for number in numbers:
            self.retired_bytes -= self.retired.pop(number).allocated

    def use(self, numbers: Iterable[int]) -> None:
        """Count one use for each."""
        for number in numbers:
            for rows in (self.live, self.retired):
                if row := rows.get(number):
                    rows[number] = row._replace(uses=row.uses + 1)


class KnownHole(NamedTuple):
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


def known_holes(
    layout: CacheLayout, rows: Iterable[ShardTableRow], others: Iterable[tuple[int, str, int]]
) -> list[KnownHole]:
    """Return the holes that are known; not such as lie beside samples of the same visit.

    Args:
        layout: of the cache.
        rows: of the shards that lie there.
        others: shard, key and part of holes that the index notes, of whatever shard.
    """
    rows = list(rows)
    here = {row.number for row in rows}
    with_holes = {row.group for row in rows if row.holes}
    found = [KnownHole(*other) for other in others if other[0] not in here]
    brought: set[tuple[int, str, int]] = set()
    groups: dict[int, int] = {}
    for row in rows:
        groups[row.number] = row.group
        if row.group not in with_holes:
            continue
        with suppress(CorruptShardError, OSError):  # `check` names those
            sidecar = Sidecar.from_bytes(layout.sidecar(row.number).read_bytes())
            found += [KnownHole(row.number, h.key, h.part, h.version) for h in sidecar.holes]
            o = sidecar.origins
            parts = zip(o.object, o.part, strict=True)
            brought.update((row.group, o.keys[at], part) for at, part in parts)
    return [h for h in found if (groups.get(h.shard, -1), h.key, h.part) not in brought]
