"""The tables of the index, and their rows as values. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeAlias


class ShardState(IntEnum):
    LIVE = 0  # new snapshots take only these
    RETIRED = 1  # the file is deleted when no lease holds it
    DELETED = 2  # the row records the drawn number and its digest


class ShardRow(NamedTuple):
    """A live shard as readers need it. A short tuple, because a snapshot makes thousands."""

    number: int
    seq: int  # order of commits, which is the order of age
    group: int
    edition: int  # of the group
    samples: int  # 0: there are no files
    shard_bytes: int  # of the file
    digest: str  # xxh3_128 of the file, hexadecimal; empty without a file
    drawn_at: float  # wall time of the commit, for display


class EvictedShard(NamedTuple):
    samples: int
    allocated: int


class FinishedLease(NamedTuple):
    name: str
    job: str  # its uses are counted
    used: Sequence[int]  # shards that the reader read
    delivered: int | None = None  # samples; None if the reader does not count them


class ShardTableRow(NamedTuple):
    """A shard as its writer needs it. `ShardRow` describes the other fields."""

    number: int
    seq: int
    state: int  # a ShardState
    group: int
    edition: int
    round: int  # pass of the permutation
    samples: int
    parts: int  # visits that count to it
    holes: int  # visits that yielded nothing
    shard_bytes: int
    allocated: int  # blocks of file and sidecar
    record_bytes: int  # of every record
    digest: str
    drawn_at: float
    uses: int  # by all jobs together


@dataclass(frozen=True, slots=True)
class CacheTotals:
    """Sums over the cache, current and total."""

    shards: int = 0  # live, as for the next two
    samples: int = 0
    bytes: int = 0  # allocated, including sidecars
    retired_shards: int = 0  # not deleted yet
    retired_bytes: int = 0  # allocated
    drawn: int = 0  # samples ever committed
    drawn_parts: int = 0  # visits ever committed
    drawn_shards: int = 0
    evicted_samples: int = 0  # in shards that were retired and did not return
    evicted_shards: int = 0
    lost_samples: int = 0  # in shards whose file was missing at a start
    lost_shards: int = 0
    refetched_samples: int = 0  # do not count as drawn again
    refetched_shards: int = 0
    holes: int = 0  # visits that yielded nothing
    empty_visits: int = 0  # to whole objects without a sample; these are not holes
    delivered: int = 0  # samples, under finished leases


RangeRow: TypeAlias = tuple[int, int, int, int]  # first number, last, shards, samples


def merge_ranges(ranges: list[RangeRow]) -> list[RangeRow]:
    """Return (first, last, shards, samples) with neighbours merged.

    Ranges without samples stay separate, because a rebuilt index knows no more about them.

    >>> merge_ranges([(3, 3, 1, 10), (0, 1, 2, 20), (2, 2, 1, 5), (4, 5, 2, 0), (7, 7, 1, 1)])
    [(0, 3, 4, 35), (4, 5, 2, 0), (7, 7, 1, 1)]
    """
    merged: list[RangeRow] = []
    for first, last, shards, samples in sorted(ranges):
        if merged and first == merged[-1][1] + 1 and (samples == 0) == (merged[-1][3] == 0):
            low, _, before, sums = merged.pop()
            merged.append((low, last, before + shards, sums + samples))
        else:
            merged.append((first, last, shards, samples))
    return merged


def split_range(row: RangeRow, number: int, samples: int) -> list[RangeRow]:
    """Return a range without one of its shards, split in two if needed.

    The counts are divided in proportion to the numbers, because only sums were recorded.

    >>> split_range((0, 3, 4, 35), 1, 5)
    [(0, 0, 1, 10), (2, 3, 2, 20)]
    """
    first, last, _, before = row
    left, right, rest = number - first, last - number, max(0, before - samples)
    share = rest * left // (left + right) if left + right else 0
    pieces = [(first, number - 1, left, share), (number + 1, last, right, rest - share)]
    return [piece for piece in pieces if piece[2]]


# The result of the migrations: each column with its type, and the primary key after the bar.
TABLES = {
    "shards": "number INTEGER, seq INTEGER, state INTEGER, group_number INTEGER, "
    "edition INTEGER, round INTEGER, samples INTEGER, parts INTEGER, holes INTEGER, "
    "shard_bytes INTEGER, allocated INTEGER, record_bytes INTEGER, digest TEXT, "
    "drawn_at REAL, uses INTEGER, seal INTEGER | number",
    "holes": "id INTEGER, shard INTEGER, key TEXT, part INTEGER, reason TEXT | id",
    "editions": "edition INTEGER, objects INTEGER, digest TEXT, first_group INTEGER, lanes TEXT "
    "| edition",
    "jobs": "job TEXT, last_seen REAL | job",
    "history": "id INTEGER, at REAL, record TEXT | id",
    "meta": "key TEXT, value TEXT | key",
    "totals": "name TEXT, value INTEGER | name",
    "finished_leases": "name TEXT, finished_at REAL | name",
    "deleted_ranges": "first INTEGER, last INTEGER, shards INTEGER, samples INTEGER | first",
    "uses": "shard INTEGER, job TEXT, uses INTEGER | shard, job",
}
_WITH_SAMPLES = TABLES | {
    "shards": TABLES["shards"].replace(" seal ", " samples_indexed INTEGER, seal "),
    "samples": "shard INTEGER, i INTEGER, key TEXT, etag TEXT, start INTEGER, stop INTEGER "
    "| shard, i",
}
_BEFORE_LANES = _WITH_SAMPLES | {
    "editions": "edition INTEGER, objects INTEGER, digest TEXT, first_group INTEGER | edition"
}
TABLES_AFTER = {4: TABLES, 3: _WITH_SAMPLES, 2: _BEFORE_LANES}  # by the number of migrations
# No other program has all of these.
OWN_TABLES = {"shards", "deleted_ranges", "finished_leases", "totals"}
MIGRATIONS_TABLE = "_sqlite_migrations"  # sqlite-utils records the applied migrations there
# None is ever removed or renamed. An index with these and more belongs to a newer growcache.
MIGRATION_NAMES = [
    "the_cache",
    "a_checksum_per_row",
    "lanes_of_editions",
    "no_table_of_samples",
]

# SQLite's limit for a database, which is 512 with the name of its journal.
MOST_PATH_BYTES = 504


SEAL_META = "seal"  # key among the notes
STATE_MASK = 3  # bits of a row's seal that are its state, which changes while the rest stays

SHARD_COLUMNS = (
    "number, seq, state, group_number, edition, round, samples, parts, holes, "
    "shard_bytes, allocated, record_bytes, digest, drawn_at, uses"
)


def row_seal(row: ShardTableRow) -> int:
    """Return the checksum of a row, without the columns that files and uses determine."""
    fixed = (*row._replace(state=0, allocated=0, uses=0),)
    return zlib.crc32(repr(fixed).encode("utf-8", "backslashreplace")) << 2 | row.state


LEASE_BYTES_META = "lease_bytes"  # limit of all readers' leases together


KEPT_JOBS = 32
