"""Start-up: what a crash left lying about is removed, and rows without files are found.

Only who holds `supervisor.lock`, and knows that no sampler lives, may call this.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from growcache.cache.files import Layout, number_of
from growcache.cache.index import ShardState, StockRow
from growcache.cache.locks import close_owned, open_owned, try_lock

# A reader makes its lease under a hidden name, locks it and renames it, in well under a
# millisecond. Probing the lock of a younger file could get in between.
LEASE_GRACE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Found:
    """A file of the shards directory."""

    size: int
    allocated: int


@dataclass(frozen=True, slots=True)
class Match:
    """What came of comparing rows with files.

    Attributes:
        rows: live and retired shards whose files are there, with what they allocate.
        lost: live shards whose files are not.
        gone: retired shards that were being deleted.
    """

    rows: list[StockRow]
    lost: list[StockRow]
    gone: list[StockRow]


def shard_files(layout: Layout) -> dict[str, Found]:
    """Return every file of the shards directory by name."""
    found = {}
    with os.scandir(layout.shards) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            found[entry.name] = Found(status.st_size, status.st_blocks * 512)
    return found


def match_rows(layout: Layout, rows: Iterable[StockRow], files: Mapping[str, Found]) -> Match:
    """Compare the rows of the index with the files that are there."""
    match = Match([], [], [])
    for row in rows:
        records = files.get(layout.shard(row.number).name)
        sidecar = files.get(layout.sidecar(row.number).name)
        whole = sidecar is not None and (records.size if records else 0) == row.shard_bytes
        if whole:
            allocated = sum(file.allocated for file in (records, sidecar) if file)
            match.rows.append(row._replace(allocated=allocated))
        elif row.state == ShardState.RETIRED:
            match.gone.append(row)
        else:
            match.lost.append(row)
    return match


def remove_strangers(layout: Layout, files: Mapping[str, Found], known: set[int]) -> int:
    """Remove shards that no row speaks of; return the bytes of files that are not ours."""
    foreign = 0
    for name, found in files.items():
        number = number_of(Path(name))
        if number is None or name not in _names(layout, number):
            foreign += found.allocated
        elif number not in known:
            (layout.shards / name).unlink(missing_ok=True)
    return foreign


def _names(layout: Layout, number: int) -> tuple[str, str]:
    return layout.shard(number).name, layout.sidecar(number).name


def remove_temporary(layout: Layout) -> None:
    """Remove what samplers, an earlier supervisor and readers that died had begun to write."""
    for path in layout.incoming.iterdir():
        path.unlink(missing_ok=True)
    for path in layout.root.glob(".*.tmp"):
        path.unlink(missing_ok=True)
    for path in layout.leases.glob(".*.tmp"):
        if _abandoned(path):
            path.unlink(missing_ok=True)


def _abandoned(path: Path) -> bool:
    try:
        if time.time() - path.stat().st_mtime < LEASE_GRACE_SECONDS:
            return False
        descriptor = open_owned(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return try_lock(descriptor, shared=True)
    finally:
        close_owned(descriptor)
