"""The tables of the index, and their rows as values. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeAlias


class ShardState(IntEnum):
    """What may be done with a shard's file.

    New snapshots take LIVE shards only. The file of a RETIRED shard goes when no lease holds
    it. DELETED rows record that a number was drawn, and its digest.
    """

    LIVE = 0
    RETIRED = 1
    DELETED = 2


class ShardRow(NamedTuple):
    """A live shard as readers need it: a short tuple, because a snapshot makes thousands.

    Attributes:
        number: of the shard.
        seq: order of its commit, which is the order of age.
        group: the group that it was filled with.
        edition: the edition of that group.
        samples: records in its file; 0 means that there is no file.
        shard_bytes: size of the file.
        digest: xxh3_128 of the file, hexadecimal; empty without a file.
        drawn_at: wall time of the commit, for display.
    """

    number: int
    seq: int
    group: int
    edition: int
    samples: int
    shard_bytes: int
    digest: str
    drawn_at: float


class EvictedShard(NamedTuple):
    samples: int
    allocated: int


class FinishedLease(NamedTuple):
    """What counts of a finished lease.

    Attributes:
        name: of the lease.
        job: whose uses it counts.
        used: shards that its reader read.
        delivered: samples that its loop received; None if its reader does not count them.
    """

    name: str
    job: str
    used: Sequence[int]
    delivered: int | None = None


class ShardTableRow(NamedTuple):
    """A shard as its writer knows it; see `ShardRow` for the rest.

    Attributes:
        state: a `ShardState`.
        round: pass of the permutation.
        parts: visits counted to it.
        holes: visits that yielded nothing.
        allocated: bytes of the blocks of file and sidecar.
        record_bytes: bytes of every record.
        uses: how often readers read it, all jobs together.
    """

    number: int
    seq: int
    state: int
    group: int
    edition: int
    round: int
    samples: int
    parts: int
    holes: int
    shard_bytes: int
    allocated: int
    record_bytes: int
    digest: str
    drawn_at: float
    uses: int


@dataclass(frozen=True, slots=True)
class CacheTotals:
    """What the cache holds, and what it ever held.

    Attributes:
        shards: live ones.
        samples: in live shards.
        bytes: allocated by live shards and their sidecars.
        retired_shards: retired and not yet deleted.
        retired_bytes: allocated by those.
        drawn: samples ever committed.
        drawn_parts: visits ever committed.
        drawn_shards: shards ever committed.
        evicted_samples: samples of shards that were retired and did not come back.
        evicted_shards: those shards.
        lost_samples: samples of those shards whose file was missing at a start.
        lost_shards: those shards.
        refetched_samples: samples that were refetched; they do not count as drawn again.
        refetched_shards: their shards.
        holes: visits that yielded nothing.
        empty_visits: visits to whole objects without a sample, which are no holes.
        delivered: samples that training loops received under finished leases.
    """

    shards: int = 0
    samples: int = 0
    bytes: int = 0
    retired_shards: int = 0
    retired_bytes: int = 0
    drawn: int = 0
    drawn_parts: int = 0
    drawn_shards: int = 0
    evicted_samples: int = 0
    evicted_shards: int = 0
    lost_samples: int = 0
    lost_shards: int = 0
    refetched_samples: int = 0
    refetched_shards: int = 0
    holes: int = 0
    empty_visits: int = 0
    delivered: int = 0


RangeRow: TypeAlias = tuple[int, int, int, int]  # first number, last, shards, samples


def merge_ranges(ranges: list[RangeRow]) -> list[RangeRow]:
    """Return (first, last, shards, samples) with neighbours merged.

    Ranges without a sample stay apart: a rebuilt index knows no more of what they held.

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
    """Return what is left of a range without one of its shards, which has ``samples`` samples.

    How the others share the rest was never noted, so it is divided as their number is.

    >>> split_range((0, 3, 4, 35), 1, 5)
    [(0, 0, 1, 10), (2, 3, 2, 20)]
    """
    first, last, _, before = row
    left, right, rest = number - first, last - number, max(0, before - samples)
    share = rest * left // (left + right) if left + right else 0
    pieces = [(first, number - 1, left, share), (number + 1, last, right, rest - share)]
    return [piece for piece in pieces if piece[2]]


# What the migrations make, each column with its type; behind the bar the primary key.
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
OWN_TABLES = {
    "shards",
    "deleted_ranges",
    "finished_leases",
    "totals",
}  # together of no other program
MIGRATIONS_TABLE = "_sqlite_migrations"  # sqlite-utils notes there what was made
# None is ever removed or renamed: an index with these and more is of a newer growcache.
MIGRATION_NAMES = [
    "the_cache",
    "a_checksum_per_row",
    "lanes_of_editions",
    "no_table_of_samples",
]

MOST_PATH_BYTES = 504  # of a database, for SQLite; with the name of its journal it is 512


SEAL_META = "seal"  # its key among the notes
STATE_MASK = 3  # of a row's seal are its state, which changes while the rest stays

SHARD_COLUMNS = (
    "number, seq, state, group_number, edition, round, samples, parts, holes, "
    "shard_bytes, allocated, record_bytes, digest, drawn_at, uses"
)


def row_seal(row: ShardTableRow) -> int:
    """Return the checksum of a row, without the columns that files and uses tell."""
    fixed = (*row._replace(state=0, allocated=0, uses=0),)
    return zlib.crc32(repr(fixed).encode("utf-8", "backslashreplace")) << 2 | row.state


LEASE_BYTES_META = "lease_bytes"  # what readers' leases may take, all together


KEPT_JOBS = 32
