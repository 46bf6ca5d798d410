"""What an index must say, by the shards that lie there and what is left of an older one.

Pure but for `look`, which reads the shards. Of an older index what its checksums vouch for
is kept: order, uses, history. Where it is not complete, every number up to the highest that
was issued counts as drawn, also those of which nothing is left, so that nothing is drawn
twice; but for shards that lie there damaged, which are drawn again.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import orjson

from growcache.cache.beside import DEFERRALS, editions_of
from growcache.cache.deferrals import Deferrals, Told, from_shards
from growcache.cache.files import Layout, allocated_tree, number_of, shard_parts
from growcache.cache.formats import CACHE_FORMATS, open_shard
from growcache.cache.identity import Identity
from growcache.cache.index import Contents, Edition, Range, ShardState, StockRow
from growcache.cache.sidecar import Sidecar
from growcache.errors import CorruptShardError


def row_of(layout: Layout, sidecar: Sidecar, *, seq: int, drawn_at: float) -> StockRow:
    """Return the row of a shard that lies at its place."""
    number = sidecar.number
    return StockRow(
        number=number,
        seq=seq,
        state=ShardState.LIVE,
        group=sidecar.group,
        edition=sidecar.edition,
        round=sidecar.round,
        samples=sidecar.samples,
        parts=sidecar.parts,
        holes=len(sidecar.holes),
        shard_bytes=sidecar.shard_bytes,
        allocated=sum(map(allocated_tree, shard_parts(layout, number))),
        record_bytes=sidecar.record_bytes,
        digest=sidecar.digest,
        drawn_at=drawn_at,
        uses=0,
    )


@dataclass(frozen=True, slots=True)
class Seen:
    """The shards that lie in a cache.

    Attributes:
        whole: rows of those that are as they describe themselves, by number.
        damaged: numbers of which something lies there that is not whole.
        editions: the longest table of editions that a shard names.
        told: what shards tell of visits that were set aside.
    """

    whole: Mapping[int, StockRow] = field(default_factory=dict)
    damaged: frozenset[int] = frozenset()
    editions: tuple[Edition, ...] = ()
    told: tuple[Told, ...] = ()

    def deferrals(self, issued: int) -> Deferrals:
        """Return what was set aside, as far as shards tell; see `from_shards`."""
        last = max((row.group for row in self.whole.values()), default=-1)
        return from_shards(self.told, last, issued)


def numbers_in(layout: Layout) -> list[int]:
    """Return the numbers of which something lies in the shards directory."""
    if not layout.shards.is_dir():
        return []
    names = {path.name for path in layout.shards.iterdir()}
    numbers = {n for name in names if (n := number_of(layout.shards / name)) is not None}
    ours = (n for n in numbers if any(p.name in names for p in shard_parts(layout, n)))
    return sorted(ours)


def look(layout: Layout, identity: Identity) -> Seen:
    """Read every shard; those of another fingerprint are neither whole nor damaged."""
    whole: dict[int, StockRow] = {}
    damaged: set[int] = set()
    table: list[Edition] = []
    told: list[Told] = []
    for number in numbers_in(layout):
        try:
            sidecar = whole_shard(layout, number)
        except (CorruptShardError, OSError):
            damaged.add(number)
            continue
        if sidecar.fingerprint == identity.fingerprint:
            drawn_at = layout.sidecar(number).stat().st_mtime
            whole[number] = row_of(layout, sidecar, seq=0, drawn_at=drawn_at)
            table = max(table, editions_of(sidecar.editions), key=len)
            told += [sidecar.told] if sidecar.told else []
    return Seen(whole, frozenset(damaged), tuple(table), tuple(told))


def whole_shard(layout: Layout, number: int) -> Sidecar:
    """Return the description of a shard whose every byte is as described.

    Raises:
        CorruptShardError: file or description are damaged, or not of one another.
        OSError: the description cannot be read.
    """
    path = layout.sidecar(number)
    sidecar = Sidecar.from_bytes(path.read_bytes(), str(path))
    if sidecar.number != number:
        raise CorruptShardError(f"{path}: describes shard {sidecar.number}")
    if not sidecar.samples:
        return sidecar
    if sidecar.cache_format not in CACHE_FORMATS:
        raise CorruptShardError(f"{path}: there is no cache format {sidecar.cache_format!r}")
    shard = open_shard(layout, number, sidecar.samples, sidecar.schema, sidecar.cache_format)
    try:
        if shard.digest() != sidecar.digest:
            raise CorruptShardError(f"{path}: the shard's bytes were changed")
    finally:
        shard.close()
    return sidecar


def remade(
    old: Contents,
    seen: Seen,
    identity: Identity,
    editions: Sequence[Edition],
    deferrals: Deferrals,
    issued: int,
) -> Contents:
    """Return what an index must say.

    Args:
        old: what an earlier one said, as far as it can be believed; empty where it is lost.
        seen: the shards that lie there.
        identity: of the cache.
        editions: of its listing.
        deferrals: what was set aside.
        issued: the highest group a permit was given out for, as far as that is known.
    """
    rows = _rows(old, seen)
    forgotten = {row.number for row in old.rows} - {row.number for row in rows}
    ranges = list(old.ranges or ())
    if not (old.counted and seen.whole.keys() >= set(old.spoiled)):
        group = int(identity.sizes.get("group_shards", 1))
        known = sorted(
            {row.number for row in [*rows, *old.rows]} | seen.damaged | _within(ranges)
        )
        stop = max([(issued + 1) * group, *(number + 1 for number in known[-1:])])
        missing = [Range(a, b - 1, b - a, 0) for a, b in gaps(known, stop)]
        ranges = sorted([*ranges, *missing])
    live = {row.number for row in rows if row.state != ShardState.DELETED}
    return Contents(
        rows=rows,
        totals=_totals(old, rows, ranges, _retried(old.rows, forgotten, deferrals, identity)),
        meta=_notes(old, identity, deferrals, whole=not forgotten and not seen.damaged),
        editions=list(editions),
        ranges=ranges,
        uses=[use for use in old.uses if use[0] in live],
        jobs=old.jobs,
        finished=old.finished,
        history=[*old.history, *([_rebuilt()] if rows or ranges else [])],
    )


def _rows(old: Contents, seen: Seen) -> list[StockRow]:
    """Return the rows in the order of age; of numbers without one that of their neighbours."""
    before = {row.number: row for row in old.rows}
    gone = {n for n, row in before.items() if row.state == ShardState.DELETED}
    gone |= _within(old.ranges or ())
    rows = [_renewed(row, before.get(n)) for n, row in seen.whole.items() if n not in gone]
    rows += [
        row._replace(state=ShardState.DELETED)
        for row in old.rows
        if row.state != ShardState.LIVE and (row.number in gone or row.number not in seen.whole)
    ]
    numbers = sorted(before)
    lower = {r.number: numbers[i - 1] for r in rows if (i := bisect_right(numbers, r.number))}

    def age(row: StockRow) -> tuple[int, int]:
        return (before[lower[row.number]].seq if row.number in lower else -1, row.number)

    return [row._replace(seq=seq) for seq, row in enumerate(sorted(rows, key=age))]


def _renewed(row: StockRow, before: StockRow | None) -> StockRow:
    if before is None:
        return row
    return row._replace(state=before.state, drawn_at=before.drawn_at, uses=before.uses)


def _within(ranges: Iterable[Range]) -> set[int]:
    return set(itertools.chain.from_iterable(range(r.first, r.last + 1) for r in ranges))


def _retried(
    rows: Iterable[StockRow], gone: Set[int], deferrals: Deferrals, identity: Identity
) -> int:
    """Return how many holes of rows that go are none any more: they are tried again."""
    group = int(identity.sizes.get("group_shards", 1))
    count = 0
    for row in rows:
        if row.number in gone:
            places = deferrals.retried.get(row.group, ())
            mine = sum(place % group == row.number % group for place in places)
            count += min(mine, row.holes)
    return count


def _totals(
    old: Contents, rows: Sequence[StockRow], ranges: Sequence[Range], retried: int
) -> dict[str, int]:
    """Return the totals: by what changed, or where they are lost by what the rows tell."""
    if old.coherent and old.totals is not None:
        before, now = _sums(old.rows), _sums(rows)
        now.update(holes=retried, drawn_parts=retried)  # which were taken off before
        changed = {name: old.totals.get(name, 0) + now[name] - before[name] for name in now}
        return old.totals | changed
    gone = [row for row in rows if row.state != ShardState.LIVE]
    shards, samples = sum(r.shards for r in ranges), sum(r.samples for r in ranges)
    found = _sums(rows)
    found.update(drawn_shards=shards, drawn=samples)
    found.update(evicted_shards=shards + len(gone))
    found.update(evicted_samples=samples + sum(row.samples for row in gone))
    counted = {*found, "lost_shards", "lost_samples"}
    kept = {n: v for n, v in (old.totals or {}).items() if n not in counted}
    return dict(found) | kept


def _sums(rows: Iterable[StockRow]) -> Counter[str]:
    sums = Counter(drawn=0, drawn_parts=0, drawn_shards=0, holes=0)
    for row in rows:
        sums.update(drawn=row.samples, drawn_parts=row.parts, drawn_shards=1, holes=row.holes)
    return sums


def _notes(
    old: Contents, identity: Identity, deferrals: Deferrals, *, whole: bool
) -> dict[str, object]:
    notes = {**old.meta, **notes_of(identity), "initialised": True}
    notes.pop(DEFERRALS, None)
    if deferrals:
        notes[DEFERRALS] = deferrals.to_values()
    notes.pop("pruned_seq", None)  # rows are numbered anew
    if not whole:
        notes["complete"] = False
    return notes


def notes_of(identity: Identity) -> dict[str, object]:
    """Return what an index notes of the identity: a whole copy, should the file be lost."""
    return {"fingerprint": identity.fingerprint, "identity": identity.to_values()}


def _rebuilt() -> tuple[float, str]:
    now = time.time()
    return now, orjson.dumps({"event": "rebuilt", "at": now}).decode()


def gaps(numbers: Sequence[int], stop: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges [first, stop) below ``stop`` that ascending ``numbers`` leave out.

    >>> [*gaps([1, 2, 5], 8)]
    [(0, 1), (3, 5), (6, 8)]
    """
    edges = [-1, *(n for n in numbers if n < stop), stop]
    for low, high in itertools.pairwise(edges):
        if high > low + 1:
            yield low + 1, high
