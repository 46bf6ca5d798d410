"""The rows of the index, as values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class ShardState(IntEnum):
    """What may be done with a shard's file.

    New snapshots take LIVE shards only. A RETIRED shard's file goes when its last lease
    clears. DELETED rows say that a number was drawn, and what its digest was.
    """

    LIVE = 0
    RETIRED = 1
    DELETED = 2


class ShardRow(NamedTuple):
    """A live shard as readers need it.

    A snapshot makes thousands in milliseconds, so it is a tuple, and of few columns.

    Attributes:
        number: of the shard.
        seq: order of its commit, which is the order of age.
        group: of the group it was filled with.
        edition: the edition that group belongs to.
        samples: records in its file; 0 means that there is no file.
        shard_bytes: size of the file.
        digest: xxh3_128 of the file, hexadecimal; empty where there is none.
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


class Remains(NamedTuple):
    """What the index knows of a shard that left the cache; for the rest see `StockRow`."""

    samples: int
    allocated: int


class FinishedLease(NamedTuple):
    """What counts of a lease that is over.

    Attributes:
        name: of the lease.
        job: whose uses it counts.
        used: shards that its reader read.
        delivered: samples that its loop received; None where only the uses tell.
    """

    name: str
    job: str
    used: Sequence[int]
    delivered: int | None = None


class StockRow(NamedTuple):
    """A shard as its writer knows it; for the rest see `ShardRow`.

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
class Edition:
    """The first ``objects`` keys of the catalog; groups from ``first_group`` on draw from them.

    ``first_group`` counts groups without the makeup groups (`Deferrals.draw_number`).
    """

    edition: int
    objects: int
    digest: str
    first_group: int


@dataclass(frozen=True, slots=True)
class Totals:
    """What the cache holds, and what it ever held.

    Attributes:
        shards: live ones.
        samples: in live shards.
        bytes: allocated by live shards and their sidecars.
        retired_shards: on their way out.
        retired_bytes: allocated by those.
        drawn: samples ever committed.
        drawn_parts: visits ever committed.
        drawn_shards: shards ever committed.
        evicted_samples: samples of shards that were retired, and did not come back.
        evicted_shards: shards that were retired, and did not come back.
        lost_samples: samples of those shards whose file was gone at a start, and
        lost_shards: how many these are.
        refetched_samples: samples that were drawn again because a lease wished for them,
        refetched_shards: and their shards; none of them counts as drawn once more.
        holes: visits that yielded nothing.
        empty_visits: visits to whole objects that hold no sample; no holes.
        delivered: samples that training loops received, as far as their leases are finished.
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

    @property
    def reuse(self) -> float:
        """Samples delivered over samples drawn."""
        return self.delivered / self.drawn if self.drawn else 0.0
