"""The part of the bound that is not for shards, and the least bound that works. Pure."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_BYTES = 600_000
MOST_BYTES = 20_000_000
SHARE = 8  # one part of so many of max_bytes


@dataclass(frozen=True, slots=True)
class Budget:
    """How the fixed part is split; all in allocated bytes.

    What is left of ``total`` holds the history's growth, locks and directories.

    Attributes:
        total: set aside inside ``max_bytes``, whether used or not.
        ballast: unlinked to commit an eviction on a full disk.
        wal: the log is cut when it is longer. It may grow by one transaction beyond.
        leases: that readers make, all together; see `growcache.cache.leases`.
        pages: the index itself; when it is larger no permits are given.
        samples: while the index is smaller it also has a row per sample.
        kept_deleted: rows of deleted shards that are kept one by one.
        kept_history: records of the history.
        deferred: visits that the record of what was set aside may speak of.
    """

    total: int
    ballast: int
    wal: int
    leases: int
    pages: int
    samples: int
    kept_deleted: int
    kept_history: int
    deferred: int


def fixed_budget(max_bytes: int) -> Budget:
    """Return the fixed part of a cache bounded to ``max_bytes``."""
    total = min(max(max_bytes // SHARE, LEAST_BYTES), MOST_BYTES)
    return Budget(
        total=total,
        ballast=min(1_000_000, total // 8) // 4096 * 4096,
        wal=total // 8,
        leases=total // 8,
        pages=total // 2,
        samples=total // 4,
        kept_deleted=total // 10_000,
        kept_history=total // 8_000,
        deferred=total // 300,
    )


def minimum_bytes(workers: int, group_bytes: int, catalog_bytes: int = 0) -> int:
    """Return the least ``max_bytes`` that keeps this many samplers at work.

    Args:
        workers: sampler processes.
        group_bytes: allocated by one full group with its sidecars.
        catalog_bytes: allocated by the local copy of the listing.

    >>> fixed_budget(minimum_bytes(2, 100_000)).total + 4 * 100_000 == minimum_bytes(2, 100_000)
    True
    """
    need = (workers + 2) * group_bytes + catalog_bytes
    in_proportion = -(-need * SHARE // (SHARE - 1))
    return need + fixed_budget(in_proportion).total
