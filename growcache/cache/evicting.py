"""How shards leave the cache without a reader losing one it may still open.

COMMIT retired → read the leases → unlink what none holds → row says deleted
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from growcache.cache.eviction import Candidate
from growcache.cache.files import Layout
from growcache.cache.folders import remove_shard
from growcache.cache.foreign_leases import ForeignLease
from growcache.cache.index import FinishedLease, ShardState, StockRow
from growcache.cache.jobs import JOBS_META, JobSums, noted_jobs, with_finished
from growcache.cache.leases import LeaseView, lease_path
from growcache.cache.ledger import Ledger
from growcache.cache.readers import Kept, Readers
from growcache.cache.room import Room
from growcache.cache.stock import Stock
from growcache.cache.wishlist import Wishlist
from growcache.errors import CacheFullError

POSTPONED_LEASES = 16


class Evictor:
    """Counts what readers used, and takes shards off the stock.

    Attributes:
        wishlist: what readers wish for.
    """

    def __init__(
        self,
        layout: Layout,
        ledger: Ledger,
        stock: Stock,
        room: Room,
        resume_seconds: float,
    ) -> None:
        self._layout = layout
        self._ledger = ledger
        self._stock = stock
        self._readers = Readers(layout, resume_seconds, ledger.index.uses(), stock, room)
        self._finished = ledger.index.finished_leases()
        self._jobs = noted_jobs(ledger.index.meta(JOBS_META))
        self.wishlist = Wishlist(ledger, stock)
        self._candidates: dict[int, Candidate] = {}
        self._deleted: list[int] = []  # whose rows do not say so yet
        self._as_of = -1  # the readers' version that the candidates were made from

    @property
    def leases(self) -> list[LeaseView]:
        """The unfinished leases, as of the last poll or eviction."""
        return self._readers.leases

    @property
    def kept(self) -> frozenset[int]:
        """Shards that readers who died hold, as of the last poll or eviction."""
        return self._readers.kept

    @property
    def kept_for(self) -> list[Kept]:
        """What is kept for which reader who died, as of then."""
        return self._readers.kept_for()

    @property
    def foreign(self) -> list[ForeignLease]:
        """What lies among the leases and cannot be read, as of then."""
        return self._readers.foreign

    @property
    def jobs(self) -> dict[str, JobSums]:
        """What each job received under leases that are finished."""
        return self._jobs

    def poll(self, now: float) -> None:
        """Count the uses of finished leases, delete retired shards that were let go."""
        finished = self._readers.refresh(now)
        try:
            # A log that cannot be cut must grow slowly: then many leases make one transaction.
            if finished and (self._ledger.log_is_short or len(finished) >= POSTPONED_LEASES):
                self._count_uses(finished)
            self._follow_wishes()
        except CacheFullError:
            self._delete_unheld()  # that makes room
            raise
        self._delete_unheld()

    def _follow_wishes(self) -> None:
        retired = len(self._stock.retired)
        self.wishlist.follow(self._readers.leases)
        if len(self._stock.retired) != retired:
            self._as_of = -1  # some of them live again

    def _count_uses(self, finished: Sequence[LeaseView]) -> None:
        # The names go into the transaction of the uses, so that a crash before the unlink
        # does not count them twice. They are forgotten once the files are gone.
        index = self._ledger.index
        names = {lease.name for lease in finished}
        new = [lease for lease in finished if lease.name not in self._finished]
        gone = self._finished - names
        if new:

            def note() -> None:
                index.forget_leases(gone)
                index.finish_leases(counted, time.time())
                index.set_meta(JOBS_META, {job: sums.to_json() for job, sums in jobs.items()})

            counted = [
                FinishedLease(lease.name, lease.job, lease.used(), lease.delivered)
                for lease in new
            ]
            jobs = with_finished(self._jobs, new, self._stock)
            self._ledger.write(note)
            self._jobs = jobs
            self._finished = (self._finished - gone) | names
            self._stock.use(self._readers.count(new, self._stock))
        for name in names:
            with suppress(
                PermissionError
            ):  # another user's folder; that it is counted is noted
                lease_path(self._layout, name).unlink(missing_ok=True)

    def candidates(self) -> list[Candidate]:
        """Return the live shards as the eviction policies see them, oldest first."""
        if self._as_of != self._readers.version:
            self._candidates = {}
            self._as_of = self._readers.version
            self.admit(self._stock.live.values())
        return list(self._candidates.values())

    def admit(self, rows: Iterable[StockRow]) -> None:
        """Follow the stock: these shards are live now."""
        if self._as_of == self._readers.version:
            self._candidates.update((c.number, c) for c in self._readers.candidates(rows))

    def start_afresh(self) -> None:
        """Follow the stock: the cache was emptied."""
        self._readers.uses.clear()
        self._jobs = {}
        self._deleted.clear()
        self.wishlist.start_afresh()
        self._as_of = -1

    def retire(self, numbers: Iterable[int]) -> None:
        """Take live shards out of all new snapshots; those that are wished for stay."""
        live, index = self._stock.live, self._ledger.index
        going = [n for n in dict.fromkeys(numbers) if n not in self.wishlist.wanted]
        rows = [live[number] for number in going if number in live]
        if not rows:
            return

        def note() -> None:
            index.set_state([row.number for row in rows], ShardState.RETIRED)
            samples = sum(row.samples for row in rows)
            index.add_totals(evicted_shards=len(rows), evicted_samples=samples)

        self._ledger.write(note)
        self._stock.retire(rows)
        for row in rows:
            self._candidates.pop(row.number, None)

    def evict(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Retire live shards; return what could be deleted, of all retired ones."""
        self.retire(numbers)
        self._readers.refresh()  # the next poll counts those that are found finished here
        return self._delete_unheld()

    def _delete_unheld(self) -> tuple[int, ...]:
        """Delete retired shards, by leases that were read after they were retired."""
        held = self._readers.held
        free = tuple(number for number in self._stock.retired if number not in held)
        for number in free:
            remove_shard(self._layout, number)
            self._stock.remove([number])
            self._deleted.append(number)
        self._readers.forget(free)
        if self._deleted:
            # On a full disk this may fail, although there is room now: others take it, too.
            index, gone = self._ledger.index, tuple(self._deleted)
            self._ledger.write(lambda: index.set_state(gone, ShardState.DELETED))
            self._deleted.clear()
        return free
