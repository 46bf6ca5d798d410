"""The index as its writer changes it: within its budget, and on a full disk too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from growcache.cache.ballast import Ballast
from growcache.cache.files import Layout
from growcache.cache.index import Index
from growcache.cache.room import Room
from growcache.errors import CacheFullError


class Ledger:
    """The index and the ballast that its transactions fall back on.

    Attributes:
        index: to be read as one likes, and changed inside `write` only.
        log_is_short: False while a reader keeps the log from being cut. It must grow
            slowly then, so what can wait should.
    """

    def __init__(self, layout: Layout, room: Room) -> None:
        self._room = room
        self._ballast = Ballast(layout.ballast, room.budget.ballast)
        self._sums: dict[str, int] | None = None
        self._pages_bytes = 0
        self.log_is_short = True
        self.index = self._open(layout)

    def _open(self, layout: Layout) -> Index:
        try:
            return Index.open(layout)
        except CacheFullError:
            if not self._ballast.drop():
                raise
            return Index.open(layout)

    def close(self) -> None:
        """Close the index."""
        self.index.close()

    def abandon(self) -> None:
        """Leave the index as a crash would."""
        self.index.abandon()

    def write(self, change: Callable[[], None]) -> None:
        """Change the index in one transaction, if need be in the ballast's room.

        Raises:
            CacheFullError: not even that was enough; nothing was changed.
        """
        self._cut_log()
        try:
            self._transact(change)
        except CacheFullError:
            if not self._ballast.drop():
                raise
            self._transact(change)

    def _transact(self, change: Callable[[], None]) -> None:
        self._sums = None
        with self.index.transaction():
            change()

    def _cut_log(self) -> None:
        if self.index.wal_bytes() > self._room.budget.wal or not self.log_is_short:
            self.log_is_short = self.index.checkpoint()

    def sums(self) -> dict[str, int]:
        """Return what was ever counted, by name."""
        if self._sums is None:
            self._sums = self.index.totals()
        return self._sums

    @property
    def ok(self) -> bool:
        """Whether the index kept within its budget at the last `maintain`."""
        return self.log_is_short and self._pages_bytes <= self._room.budget.pages

    def maintain(self) -> None:
        """Keep index and log within their budget, and the ballast in place."""
        budget, index = self._room.budget, self.index
        self._cut_log()
        if self.log_is_short:
            self.write(lambda: index.prune_deleted(budget.kept_deleted))
            if index.pages_bytes() > budget.pages:
                self.write(index.drop_samples)
            self._compact()
        self._pages_bytes = index.pages_bytes()
        self._ballast.size = budget.ballast
        self._ballast.restore()

    def _compact(self) -> None:
        """Make the index file smaller if it is larger than a bound that was lowered leaves it."""
        room, index = self._room, self.index
        spare = index.free_bytes() > room.budget.wal
        if spare and room.index_overflows and index.pages_bytes() <= room.slack():
            self.log_is_short = index.compact()

    def append_history(self, record: dict[str, Any]) -> None:
        """Add a JSON record to the history, unless the log has to stay as it is."""
        keep = self._room.budget.kept_history
        if self.log_is_short:
            self.write(lambda: self.index.append_history(record, keep))
