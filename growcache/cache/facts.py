"""What is true of a cache as a whole: whose it is, what was drawn so far, is it complete."""

from __future__ import annotations

from typing import Any

from growcache.cache import ownership
from growcache.cache.ballast import full_disk_named
from growcache.cache.beside import (
    DEFERRALS,
    deferrals_of,
    read_issued,
    write_deferrals,
    write_editions,
    write_issued,
)
from growcache.cache.deferrals import Deferrals
from growcache.cache.files import Layout
from growcache.cache.identity import Identity, read_identity
from growcache.cache.index import LEASE_BYTES_META, Edition
from growcache.cache.ledger import Ledger
from growcache.cache.opening import rebuild
from growcache.cache.ownership import is_initialised, mark_initialised


class Facts:
    """The facts in memory, each as it is on disk.

    Attributes:
        identity: what the cache is of; None before the first sample was measured.
        issued: the highest group that a permit was ever issued for; -1 if none.
        complete: whether the whole population is cached.
        editions: the recorded editions, in order.
        deferrals: which visits were set aside, and which groups make up for them.
    """

    def __init__(self, layout: Layout, ledger: Ledger) -> None:
        self._layout = layout
        self._ledger = ledger
        self.identity = read_identity(layout.root)
        self._load()

    def _load(self) -> None:
        index = self._ledger.index
        # What is committed was issued, even where the file that says so is lost.
        noted = read_issued(self._layout)
        self.deferrals = deferrals_of({DEFERRALS: index.meta(DEFERRALS)})
        known = (index.last_group(), *self.deferrals.numbers[-1:])
        self.issued = max(-1 if noted is None else noted, *known)
        self.complete = bool(index.meta("complete", False))
        self.editions = index.editions()
        self._population = (index.meta("population"), index.meta("population_samples"))

    def claim(self, parts: dict[str, Any], drawn: int) -> bool:
        """Say what is wanted; True where a cache without samples was emptied for it."""
        index = self._ledger.index
        emptied = ownership.claim(self._layout, index, self.identity, parts, drawn)
        if emptied:
            self._forget()
        return emptied

    def set_identity(self, identity: Identity, drawn: int) -> bool:
        """Say what the cache is of; True where it holds something else since.

        One without samples of this identity was emptied for it, or one whose index and
        identity were lost has its shards again.
        """
        index, ledger = self._ledger.index, self._ledger
        with full_disk_named(str(self._layout.identity)):
            settled = ownership.settle_identity(
                self._layout, index, self.identity, identity, drawn
            )
        anew = not is_initialised(index)
        if anew:
            rebuild(self._layout, index, ledger.write, settled)
            self._load()
        self.identity = settled
        return anew

    def _forget(self) -> None:
        """Follow what `ownership` did on disk."""
        for path in (self._layout.editions, self._layout.deferrals):
            path.unlink(missing_ok=True)
        self._ledger.write(lambda: mark_initialised(self._ledger.index))
        self.identity, self.issued, self.complete = None, -1, False
        self.editions, self._population = [], (None, None)
        self.deferrals = Deferrals()

    def add_edition(self, edition: Edition) -> None:
        """Record the next edition, durably."""
        with full_disk_named(str(self._layout.editions)):
            write_editions(self._layout, [*self.editions, edition])
        self._ledger.write(lambda: self._ledger.index.insert_edition(edition))
        self.editions.append(edition)

    def set_deferrals(self, deferrals: Deferrals, *, retried: int = 0) -> None:
        """Record, durably, what was set aside: before the commit or the issue that relies on it.

        Args:
            deferrals: the record.
            retried: holes that are none for now, nor visits that were made.
        """
        with full_disk_named(str(self._layout.deferrals)):
            write_deferrals(self._layout, deferrals)
        values = deferrals.to_values()
        index = self._ledger.index

        def note() -> None:
            index.set_meta(DEFERRALS, values)
            if retried:
                totals = index.totals()
                less = {n: -min(retried, totals.get(n, 0)) for n in ("holes", "drawn_parts")}
                index.add_totals(**less)

        self._ledger.write(note)
        self.deferrals = deferrals

    def issue(self, group: int) -> None:
        """Note, durably, that a permit for the group is about to be given out."""
        if group <= self.issued:
            return
        with full_disk_named(str(self._layout.issued)):
            write_issued(self._layout, group)
        self.issued = group

    def set_complete(self, complete: bool) -> None:
        """Say whether the whole population is cached."""
        if complete != self.complete:
            self._ledger.write(lambda: self._ledger.index.set_meta("complete", complete))
            self.complete = complete

    def set_reuse(self, most: int | None, reaction: str) -> None:
        """Say how often a job may use a shard, and what it does when all are used so often."""
        index = self._ledger.index
        wanted = {"max_reuse": most, "on_max_reuse": reaction}
        if most is None and index.meta("max_reuse") is None:
            return
        if any(index.meta(name) != value for name, value in wanted.items()):

            def note() -> None:
                for name, value in wanted.items():
                    index.set_meta(name, value)

            self._ledger.write(note)

    def set_lease_bytes(self, nbytes: int) -> None:
        """Say how much readers' leases may take: readers have no configuration."""
        index = self._ledger.index
        if index.meta(LEASE_BYTES_META) != nbytes:
            self._ledger.write(lambda: index.set_meta(LEASE_BYTES_META, nbytes))

    def set_population(self, parts: int | None, samples: float | None) -> None:
        """Say how large the source is, in parts and in samples (estimated)."""
        if (parts, samples) == self._population:
            return

        def note() -> None:
            self._ledger.index.set_meta("population", parts)
            self._ledger.index.set_meta("population_samples", samples)

        self._ledger.write(note)
        self._population = (parts, samples)
