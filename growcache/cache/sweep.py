"""Start-up: what a crash left lying about is removed, and rows without files are found.

Only who holds `supervisor.lock`, and knows that no sampler lives, may call this.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from growcache.cache.files import Layout, allocated_tree, number_in, shard_names
from growcache.cache.folders import (
    bytes_of_strangers,
    folder,
    parted,
    remove,
    remove_shard,
    root_folder,
    strangers,
)
from growcache.cache.index import ShardState, StockRow
from growcache.cache.leases import remove_torn_leases
from growcache.cache.locks import close_owned, open_owned, try_lock
from growcache.cache.names import is_incoming, is_lease_temporary, is_shard, is_temporary

# A reader makes its lease under a hidden name, locks it and renames it, in well under a
# millisecond. Probing the lock of a younger file could get in between.
LEASE_GRACE_SECONDS = 60.0
SHOWN = 3  # names of what is not ours

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """A file of the shards directory, or a directory with all its files.

    Attributes:
        size: bytes of the file, or of the files.
        allocated: bytes of their blocks, the directory's own included.
    """

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
    """Return every entry of the shards directory by name."""
    found = {}
    with os.scandir(layout.shards) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                found[entry.name] = _directory(Path(entry.path))
            else:
                status = entry.stat(follow_symlinks=False)
                found[entry.name] = Found(status.st_size, status.st_blocks * 512)
    return found


def _directory(path: Path) -> Found:
    size, blocks = 0, path.lstat().st_blocks
    with os.scandir(path) as entries:  # one look at each, for there may be very many
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                return Found(-1, allocated_tree(path))  # no shard's
            status = entry.stat(follow_symlinks=False)
            size += status.st_size
            blocks += status.st_blocks
    return Found(size, blocks * 512)


def match_rows(rows: Iterable[StockRow], files: Mapping[str, Found]) -> Match:
    """Compare the rows of the index with the files that are there."""
    match = Match([], [], [])
    for row in rows:
        *samples, sidecar = (files.get(name) for name in shard_names(row.number))
        there = [found for found in samples if found]
        # All files together, for each alone is described in the sidecar only; none is empty.
        if sidecar is not None and sum(found.size for found in there) == row.shard_bytes:
            allocated = sum(found.allocated for found in (*there, sidecar))
            match.rows.append(row._replace(allocated=allocated))
        elif row.state == ShardState.RETIRED:
            match.gone.append(row)
        else:
            match.lost.append(row)
    return match


def remove_unknown(layout: Layout, files: Iterable[str], known: set[int]) -> None:
    """Remove shards that no row speaks of."""
    unknown = {number_in(name) for name in files if is_shard(name)} - known
    for number in sorted(number for number in unknown if number is not None):
        remove_shard(layout, number)


def remove_temporary(layout: Layout) -> None:
    """Remove what samplers, an earlier supervisor and readers that died had begun to write."""
    with folder(layout.incoming) as incoming:
        for name in parted(incoming, is_incoming)[0]:
            remove(incoming, name)
    with root_folder(layout) as root:
        for name in parted(root, is_temporary)[0]:
            remove(root, name)
    with folder(layout.leases) as leases:
        for name in parted(leases, is_lease_temporary)[0]:
            if _abandoned(layout.leases / name):
                remove(leases, name)
    remove_torn_leases(layout)


def count_strangers(layout: Layout) -> int:
    """Return the bytes of what is not ours, and is not looked at all the time; say what it is."""
    found = strangers(layout)
    if found:
        names = [repr(str(path.relative_to(layout.root))) for path in found[:SHOWN]]
        shown = ", ".join(names) + (" …" if len(found) > SHOWN else "")
        _log.warning(
            "%s holds what is not growcache's, and stays there: %s", layout.root, shown
        )
    return bytes_of_strangers(layout, found)


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
