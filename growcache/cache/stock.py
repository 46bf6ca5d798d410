"""The shards that the cache holds, and their sums, which are kept as shards come and go.

A cache may hold tens of thousands, so nothing that happens at every commit walks them.
"""

from __future__ import annotations

from collections.abc import Iterable

from growcache.cache.index import ShardState, StockRow


class Stock:
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
        self.live: dict[int, StockRow] = {}
        self.retired: dict[int, StockRow] = {}
        self.live_samples = self.live_bytes = self.retired_bytes = 0

    def __contains__(self, number: object) -> bool:
        return number in self.live or number in self.retired

    @property
    def bytes(self) -> int:
        """Allocated by all of them."""
        return self.live_bytes + self.retired_bytes

    def add(self, rows: Iterable[StockRow]) -> None:
        """Take shards in, each younger than those before it."""
        for row in rows:
            if row.state == ShardState.RETIRED:
                self.retired[row.number] = row
                self.retired_bytes += row.allocated
            else:
                self.live[row.number] = row
                self.live_samples += row.samples
                self.live_bytes += row.allocated

    def retire(self, rows: Iterable[StockRow]) -> None:
        """Move live shards to the retired ones."""
        for row in rows:
            del self.live[row.number]
            self.live_samples -= row.samples
            self.live_bytes -= row.allocated
            self.add([row._replace(state=ShardState.RETIRED)])

    def revive(self, rows: Iterable[StockRow]) -> None:
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
