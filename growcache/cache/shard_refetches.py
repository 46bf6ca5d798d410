"""Refetches: shards that a lease lists although they are not in the cache (protocol 24).

A checkpoint has the shards of its epoch with their digests, and a reader that resumes it takes
a lease on them. Missing shards are drawn again before anything new, under their old numbers. A
shard is committed only if its digest is the one in the lease. Otherwise the refetch is refused,
and the index keeps the reason as long as a lease asks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from growcache.cache.index.reader import IndexView
from growcache.cache.index.schema import ShardState, ShardTableRow
from growcache.cache.lease_views import LeaseView

if TYPE_CHECKING:
    from growcache.cache.index.writer import IndexWriter
    from growcache.cache.space import ShardTable


REFUSED_META = "refused_wishes"  # {shard: {digest: reason}}, in the index
PURGE_META = "purging"  # a `PurgeProgress`, in the index
MOST_REASON_CHARACTERS = 300  # characters
MOST_REFUSED = 1000  # recorded at a time; the others follow as readers give these up

RefusedRefetches = Mapping[tuple[int, str], str]


@dataclass(frozen=True, slots=True)
class PurgeProgress:
    """Progress of the purge list. Shards of both sets are retired and stay so."""

    size: int = 0  # bytes of the list whose objects no live shard contains
    rewrite: frozenset[int] = frozenset()  # return after no living reader holds them
    drop: frozenset[int] = frozenset()  # had already been evicted

    @property
    def numbers(self) -> frozenset[int]:
        return self.rewrite | self.drop

    def to_meta(self) -> dict[str, Any]:
        return {"size": self.size, "rewrite": sorted(self.rewrite), "drop": sorted(self.drop)}


def purge_progress(meta: Mapping[str, Any]) -> PurgeProgress:
    """Return the progress from the notes of an index."""
    said = meta.get(PURGE_META) or {}
    rewrite, drop = (frozenset(map(int, said.get(name, ()))) for name in ("rewrite", "drop"))
    return PurgeProgress(int(said.get("size", 0)), rewrite, drop)


@dataclass(frozen=True, slots=True)
class RefetchOutcome:
    state: Literal["live", "pending", "refused"]
    reason: str = ""


LIVE, PENDING = RefetchOutcome("live"), RefetchOutcome("pending")


def refetch_outcomes(view: IndexView, wishes: Mapping[int, str]) -> dict[int, RefetchOutcome]:
    """Return the outcome of each refetch.

    The caller holds the lease, and read ``view`` after making it.
    """
    there = {row.number: row.digest for row in view.shards if row.number in wishes}
    noted = refused_in_index(view.meta.get(REFUSED_META))
    return {
        number: refetch_outcome(number, digest, there.get(number), noted)
        for number, digest in wishes.items()
    }


def refetch_outcome(
    number: int, digest: str, found: str | None, refused: RefusedRefetches
) -> RefetchOutcome:
    """Return the outcome of a refetch of ``digest``. ``found`` is the live shard's digest."""
    if found is not None and is_wished(found, digest):
        return LIVE
    if found is not None:
        return RefetchOutcome("refused", other_bytes_reason(number))
    reason = refused.get((number, digest))
    return PENDING if reason is None else RefetchOutcome("refused", reason)


def is_wished(found: str, wished: str) -> bool:
    """Whether a shard's digest is the wished one.

    A reader may know only its start, or nothing.
    """
    return bool(found) and found.startswith(wished)


def other_bytes_reason(number: int) -> str:
    return (
        f"shard {number} of this cache has other bytes: objects were rewritten or purged since, or "
        "this machine's listing grew in other steps"
    )


def redrawn_differently_reason(number: int, holes: Sequence[str]) -> str:
    why = f"objects of shard {number} were rewritten, removed or purged since it was drawn"
    return short_reason(f"{why}: {'; '.join(holes[:2])}" if holes else why)


def short_reason(text: str) -> str:
    """Return the reason shortened for the index.

    >>> len(short_reason("x" * 1000)) == MOST_REASON_CHARACTERS
    True
    """
    return (
        text
        if len(text) <= MOST_REASON_CHARACTERS
        else text[: MOST_REASON_CHARACTERS - 1] + "…"
    )


def refused_in_index(meta: Any) -> dict[tuple[int, str], str]:
    return {
        (int(number), digest): reason
        for number, reasons in (meta or {}).items()
        for digest, reason in reasons.items()
    }


def refused_meta(refused: RefusedRefetches) -> dict[str, dict[str, str]]:
    """Return refused refetches in the form of the index, at most `MOST_REFUSED`."""
    meta: dict[str, dict[str, str]] = {}
    for (number, digest), reason in list(refused.items())[:MOST_REFUSED]:
        meta.setdefault(str(number), {})[digest] = reason
    return meta


def refetching_leases(leases: Iterable[LeaseView]) -> list[LeaseView]:
    """Return the leases with refetches that their readers have not read yet, oldest first."""
    wishing = [lease for lease in leases if lease.wishing]
    return sorted(wishing, key=lambda lease: (lease.created, lease.name))


def pending_refetches(
    leases: Iterable[LeaseView], there: Collection[int], refused: RefusedRefetches
) -> dict[int, str]:
    """Return digests to refetch, in order.

    The older of two leases wins. ``there`` are on disk.
    """
    found: dict[int, str] = {}
    for lease in refetching_leases(leases):
        for number, digest in lease.wishing.items():
            if number not in there and (number, digest) not in refused:
                found.setdefault(number, digest)
    return found


def still_refused(
    leases: Iterable[LeaseView], there: Mapping[int, str], refused: RefusedRefetches
) -> dict[tuple[int, str], str]:
    """Return refused refetches that a lease still lists, and those that ``there`` refuses."""
    found: dict[tuple[int, str], str] = {}
    for lease in refetching_leases(leases):
        for wish in lease.wishing.items():
            number, digest = wish
            if wish in refused:
                found[wish] = refused[wish]
            elif number in there and not is_wished(there[number], digest):
                found[wish] = other_bytes_reason(number)
    return found


@dataclass(frozen=True, slots=True)
class WrittenShards:
    fresh: frozenset[int]  # never committed before
    returned: frozenset[int]  # evicted before, with the digest in a lease
    denied: frozenset[int]  # evicted before, with another digest


def judge_written(
    written: Mapping[int, str], known: Collection[int], wishes: Mapping[int, str]
) -> WrittenShards:
    """Return the outcome of written shards. Those in no set stay unchanged."""
    again = {number for number in written if number in known and number in wishes}
    returned = frozenset(n for n in again if is_wished(written[n], wishes[n]))
    return WrittenShards(
        frozenset(written).difference(known), returned, frozenset(again - returned)
    )


def never_fits(
    lease: LeaseView, sizes: Mapping[int, int], capacity: int
) -> tuple[int, int] | None:
    """Return (bytes of the refetches, bytes of all held shards) if these can never fit, else None."""
    wishing = lease.wishing
    wished = sum(sizes[number] for number in wishing)
    held = sum(sizes[number] for number in lease.holding())
    return (wished, held) if held > capacity else None


def number_list(numbers: Iterable[int], most: int = 5) -> str:
    """Return the first few numbers as text.

    >>> number_list([1, 2, 3, 4, 5, 6, 7])
    '1, 2, 3, 4, 5, …'
    """
    shown = list(map(str, numbers))
    return ", ".join(shown[:most] + ["…"] * (len(shown) > most))


class RefetchQueue:
    """The shards to refetch. ``wanted`` are those that open leases list and have not read."""

    def __init__(self, index_writer: IndexWriter, shard_table: ShardTable) -> None:
        self._index_writer = index_writer
        self._shard_table = shard_table
        self._leases: list[LeaseView] = []
        self.pending: dict[int, str] = {}
        self.purging: frozenset[int] = frozenset()  # no reader may have these any more
        self.wanted: frozenset[int] = frozenset()
        # A new service retries refused refetches, because the cause may have changed.
        self._refused: dict[tuple[int, str], str] = {}
        self._noted = index_writer.index.meta(REFUSED_META) or {}
        self._note()

    def update_from_leases(self, leases: Iterable[LeaseView]) -> None:
        """Apply the leases. Retired shards that a lease lists become live again."""
        self._leases = refetching_leases(leases)
        wished = {number for lease in self._leases for number in lease.wishing}
        self.wanted = frozenset(wished)
        if not wished and not self._refused and not self.pending:
            return
        self._revive()
        self._settle()

    def lengths(self, numbers: Iterable[int]) -> dict[int, int]:
        """Return the samples of shards to refetch, as far as leases have them."""
        said = [lease.lengths for lease in self._leases]
        return {n: one[n] for n in numbers for one in said if n in self.pending and n in one}

    def start_afresh(self) -> None:
        self._refused, self._noted, self.pending = {}, {}, {}

    def forget_reasons(self) -> None:
        """Forget the reasons for refusals, because they contain keys."""
        self._refused = {}
        self._settle()

    def refuse(self, reasons: Mapping[int, str]) -> None:
        for number, reason in reasons.items():
            if number in self.pending:
                self._refused[number, self.pending[number]] = reason
        self._settle()

    def shards_came(self) -> None:
        if self.pending:
            self._settle()

    def _settle(self) -> None:
        there = {
            number: "" if number in self.purging else row.digest
            for rows in (self._shard_table.live, self._shard_table.retired)
            for number in self.wanted
            if (row := rows.get(number)) is not None
        }
        self._refused = still_refused(self._leases, there, self._refused)
        self.pending = pending_refetches(self._leases, there, self._refused)
        self._note()

    def _note(self) -> None:
        meta = refused_meta(self._refused)
        if meta != self._noted:
            self._index_writer.write(
                lambda: self._index_writer.index.set_meta(REFUSED_META, meta)
            )
            self._noted = meta

    def _revive(self) -> None:
        rows = [row for row in self._shard_table.retired.values() if self._wants(row)]
        if not rows:
            return
        index = self._index_writer.index

        def note() -> None:
            index.set_state([row.number for row in rows], ShardState.LIVE)
            samples = sum(row.samples for row in rows)
            index.add_totals(evicted_shards=-len(rows), evicted_samples=-samples)

        self._index_writer.write(note)
        self._shard_table.revive(rows)

    def _wants(self, row: ShardTableRow) -> bool:
        if row.number in self.purging or row.number not in self.wanted:
            return False
        wishes = [lease.wishing for lease in self._leases]
        return any(
            row.number in wished and is_wished(row.digest, wished[row.number])
            for wished in wishes
        )
