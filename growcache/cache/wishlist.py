"""What readers wish for now, and what was refused them; noted in the index for them to see."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from growcache.cache.index import ShardState, StockRow
from growcache.cache.leases import LeaseView
from growcache.cache.ledger import Ledger
from growcache.cache.stock import Stock
from growcache.cache.wishes import REFUSED_META, by_age, pending, refused_meta, settled


class Wishlist:
    """Follows the leases.

    Attributes:
        pending: digests of the shards to be drawn again, by number, in the order to do so.
        wanted: every shard that an open lease wishes for and has not read, there or not.
    """

    def __init__(self, ledger: Ledger, stock: Stock) -> None:
        self._ledger = ledger
        self._stock = stock
        self._leases: list[LeaseView] = []
        self.pending: dict[int, str] = {}
        self.wanted: frozenset[int] = frozenset()
        # A new service tries again what an earlier one refused: why may have changed.
        self._refused: dict[tuple[int, str], str] = {}
        self._noted = ledger.index.meta(REFUSED_META) or {}
        self._note()

    def follow(self, leases: Iterable[LeaseView]) -> None:
        """Take up what the leases say now; retired shards that are wished for live again."""
        self._leases = by_age(leases)
        wished = {number for lease in self._leases for number in lease.wishing}
        self.wanted = frozenset(wished)
        if not wished and not self._refused and not self.pending:
            return
        self._revive()
        self._settle()

    def start_afresh(self) -> None:
        """Follow the index: everything it noted was forgotten."""
        self._refused, self._noted, self.pending = {}, {}, {}

    def refuse(self, reasons: Mapping[int, str]) -> None:
        """Grant these pending wishes never; say why."""
        for number, reason in reasons.items():
            if number in self.pending:
                self._refused[number, self.pending[number]] = reason
        self._settle()

    def shards_came(self) -> None:
        """Follow the stock."""
        if self.pending:
            self._settle()

    def _settle(self) -> None:
        there = {
            number: row.digest
            for rows in (self._stock.live, self._stock.retired)
            for number in self.wanted
            if (row := rows.get(number)) is not None
        }
        self._refused = settled(self._leases, there, self._refused)
        self.pending = pending(self._leases, there, self._refused)
        self._note()

    def _note(self) -> None:
        meta = refused_meta(self._refused)
        if meta != self._noted:
            self._ledger.write(lambda: self._ledger.index.set_meta(REFUSED_META, meta))
            self._noted = meta

    def _revive(self) -> None:
        rows = [row for row in self._stock.retired.values() if self._wants(row)]
        if not rows:
            return
        index = self._ledger.index

        def note() -> None:
            index.set_state([row.number for row in rows], ShardState.LIVE)
            samples = sum(row.samples for row in rows)
            index.add_totals(evicted_shards=-len(rows), evicted_samples=-samples)

        self._ledger.write(note)
        self._stock.revive(rows)

    def _wants(self, row: StockRow) -> bool:
        return row.number in self.wanted and any(
            lease.wishing.get(row.number) == row.digest for lease in self._leases
        )
