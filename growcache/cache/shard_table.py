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
    """The shards on disk: ``live`` by number, oldest first, ``retired``, and their sums."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.live: dict[int, ShardTableRow] = {}
        self.retired: dict[int, ShardTableRow] = {}
        self.live_samples = self.live_bytes = self.retired_bytes = 0

    def __contains__(self, number: object) -> bool:
        return number in self.live or number in self.retired

    @property
    def bytes(self) -> int:
        return self.live_bytes + self.retired_bytes

    def add(self, rows: Iterable[ShardTableRow]) -> None:
        """Add shards, each younger than those before it."""
        for row in rows:
            if row.state == ShardState.RETIRED:
                self.retired[row.number] = row
                self.retired_bytes += row.allocated
            else:
                self.live[row.number] = row
                self.live_samples += row.samples
                self.live_bytes += row.allocated

    def retire(self, rows: Iterable[ShardTableRow]) -> None:
        for row in rows:
            del self.live[row.number]
            self.live_samples -= row.samples
            self.live_bytes -= row.allocated
            self.add([row._replace(state=ShardState.RETIRED)])

    def revive(self, rows: Iterable[ShardTableRow]) -> None:
        for row in rows:
            self.remove([row.number])
            self.add([row._replace(state=ShardState.LIVE)])
        self.live = dict(sorted(self.live.items(), key=lambda item: item[1].seq))

    def remove(self, numbers: Iterable[int]) -> None:
        """Forget retired shards whose files are gone."""
        for number in numbers:
            self.retired_bytes -= self.retired.pop(number).allocated

    def use(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            for rows in (self.live, self.retired):
                if row := rows.get(number):
                    rows[number] = row._replace(uses=row.uses + 1)


class KnownHole(NamedTuple):
    """A visit that yielded nothing. ``version`` is the object's, if it is not the listed one."""

    shard: int
    key: str
    part: int
    version: str = ""


def known_holes(
    layout: CacheLayout, rows: Iterable[ShardTableRow], others: Iterable[tuple[int, str, int]]
) -> list[KnownHole]:
    """Return the known holes, without those of visits that yielded samples too.

    ``rows`` are the shards on disk; ``others`` are (shard, key, part) of holes in the index.
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
