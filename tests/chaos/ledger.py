"""Everything ever seen in the cache, and checks that the present agrees with it."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias
from urllib.parse import quote

from growcache.cache.files import CacheLayout
from growcache.cache.index.schema import ShardState
from growcache.cache.sidecar import Sidecar
from tests.chaos.content import changes, key_name

# The origins of a shard's samples. They differ if an object had changed or was gone.
Drawn: TypeAlias = tuple[tuple[str, int, int], ...]  # key, first row, one past the last


class Row(NamedTuple):
    """A shard's row in the index."""

    number: int
    seq: int
    state: int
    samples: int
    digest: str


@dataclass(frozen=True, slots=True)
class Books:
    """All rows of the index, and the ranges [first, last] of deleted shards without a row."""

    rows: tuple[Row, ...]
    ranges: tuple[tuple[int, int], ...]

    def unknown(self, numbers: Iterable[int]) -> list[int]:
        """Return the numbers that do not count as drawn."""
        known = {row.number for row in self.rows}
        return [
            number
            for number in numbers
            if number not in known and not any(a <= number <= b for a, b in self.ranges)
        ]

    def live(self) -> set[int]:
        """Return the numbers of the live shards."""
        return {row.number for row in self.rows if row.state == ShardState.LIVE}


def read_books(root: Path) -> Books:
    """Read the index; raise `sqlite3.Error` if that fails."""
    uri = f"file:{quote(str(CacheLayout(root).index))}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True, timeout=300, isolation_level=None)) as db:
        db.execute("BEGIN")
        rows = db.execute("SELECT number, seq, state, samples, digest FROM shards").fetchall()
        ranges = db.execute("SELECT first, last FROM deleted_ranges").fetchall()
    return Books(tuple(map(Row._make, rows)), tuple(ranges))


class Ledger:
    """Remembers numbers, commits and digests over the whole run.

    Attributes:
        redrawn: The number of shards that were drawn a second time, with equal bytes.
    """

    def __init__(self) -> None:
        self._seqs: dict[int, int] = {}
        self._gone: set[int] = set()
        self._digests: dict[tuple[int, Drawn], str] = {}
        self._steady: dict[int, Drawn] = {}
        self._seen: dict[int, str] = {}
        self._keys: dict[int, set[str]] = {}  # of samples and holes
        self._purged: frozenset[str] = frozenset()
        self.redrawn = 0

    def purges(self, objects: Collection[int]) -> None:
        """Record the objects whose samples may be gone, wherever they were.

        A shard that held some may have no row for a moment, and is drawn again after a crash then.
        """
        self._purged = frozenset(map(key_name, objects))

    def _may_be_purged(self, number: int) -> bool:
        if not self._purged or number in self._gone:
            return False
        keys = self._keys.get(number)
        return keys is None or not keys.isdisjoint(self._purged)

    def enter(self, books: Books) -> list[str]:
        """Compare the index with its earlier contents."""
        wrong = []
        live = books.live()
        for number in live & self._gone:
            wrong.append(f"G8: shard {number} is live again, after it had gone")
        for row in books.rows:
            if self._may_be_purged(row.number):
                self._seqs[row.number] = row.seq
            seq = self._seqs.setdefault(row.number, row.seq)
            if seq != row.seq and row.state == ShardState.LIVE:
                wrong.append(f"shard {row.number} was committed twice ({seq}, {row.seq})")
        lost = [n for n in books.unknown(self._seqs) if not self._may_be_purged(n)]
        wrong += [f"G6: the index has forgotten shard {number}" for number in lost[:3]]
        # A retired shard may return: because of a refetch, or with a rebuilt index.
        self._gone |= {row.number for row in books.rows if row.state == ShardState.DELETED}
        return wrong

    def new_index(self, books: Books | None) -> None:
        """Record that the index was rebuilt, so sequence numbers start again.

        Args:
            books: The rebuilt index. Shards that it did not adopt may be drawn again.
        """
        self._seqs.clear()
        if books is not None:
            self._seqs.update((row.number, row.seq) for row in books.rows)

    def may_return(self, numbers: Iterable[int]) -> None:
        """Record shards that were lost to damage, and will be drawn again."""
        for number in numbers:
            self._gone.discard(number)
            self._seqs.pop(number, None)

    def describe(self, sidecars: Mapping[int, Sidecar]) -> list[str]:
        """G4: a number keeps its samples, except those of changing objects, and its bytes.

        The samples of each visit are distributed over the shards of a group in turns. So every
        shard of the group misses an object that is gone, but only one of them has the hole.
        """
        wrong = []
        for number, sidecar in sidecars.items():
            drawn = drawn_from(sidecar)
            keys = self._keys.setdefault(number, set())
            keys |= {*sidecar.origins.keys, *(hole.key for hole in sidecar.holes)}
            steady = tuple(one for one in drawn if not changes(one[0]))
            before = self._steady.setdefault(number, steady)
            if self._unpurged(before) != self._unpurged(steady):
                wrong.append(f"G4: shard {number} has other samples of objects that stay")
            digest = self._digests.setdefault((number, drawn), sidecar.digest)
            if digest != sidecar.digest:
                wrong.append(f"G4: shard {number} was {digest}, and is {sidecar.digest}")
            elif self._seen.get(number) == "gone":
                self.redrawn += 1
            self._seen[number] = sidecar.digest
        for number in self._seen.keys() - sidecars.keys():
            self._seen[number] = "gone"
        return wrong

    def _unpurged(self, drawn: Drawn) -> Drawn:
        return tuple(one for one in drawn if one[0] not in self._purged)


def drawn_from(sidecar: Sidecar) -> Drawn:
    """Return the origins of the shard's samples, in their order."""
    o = sidecar.origins
    rows = zip(o.object, o.start, o.stop, strict=True)
    return tuple((o.keys[place], start, stop) for place, start, stop in rows)
