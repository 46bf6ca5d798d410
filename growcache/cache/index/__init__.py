"""The index: which shards there are. The only SQL of the project is in this package.

The supervisor is its only writer (`Index`); readers take one picture at a time with
`read_index`, on a connection of their own that is closed before they go on.
"""

from __future__ import annotations

from growcache.cache.index.contents import Contents, Range, read_contents
from growcache.cache.index.reader import (
    LEASE_BYTES_META,
    IndexView,
    lease_bytes,
    live_numbers,
    read_index,
)
from growcache.cache.index.rows import (
    Edition,
    FinishedLease,
    Remains,
    ShardRow,
    ShardState,
    StockRow,
    Totals,
)
from growcache.cache.index.writer import KEPT_JOBS, Index

__all__ = [
    "KEPT_JOBS",
    "LEASE_BYTES_META",
    "Contents",
    "Edition",
    "FinishedLease",
    "Index",
    "IndexView",
    "Range",
    "Remains",
    "ShardRow",
    "ShardState",
    "StockRow",
    "Totals",
    "lease_bytes",
    "live_numbers",
    "read_contents",
    "read_index",
]
