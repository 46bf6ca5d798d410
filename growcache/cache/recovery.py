"""Recovery: take over a cache, remove what a crash left, and rebuild a lost index.

Only the holder of `supervisor.lock` calls this, after the last sampler of an earlier supervisor
has ended.

A lost index is rebuilt from the sidecars. Every number up to the highest issued one counts as
drawn, even without remaining files, so that nothing is drawn twice. Shards that are damaged on
disk are the exception, and are drawn again.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from growcache.cache.deferrals import Deferrals, newest
from growcache.cache.files import (
    CacheLayout,
    allocated_tree,
    fsync_directory,
    shard_names,
    shard_number_in,
)
from growcache.cache.folders import (
    foreign_bytes,
    foreign_paths,
    is_incoming_name,
    is_shard_name,
    is_temporary_lease_name,
    is_temporary_name,
    open_folder,
    open_root,
    own_and_foreign_names,
    remove_entry,
    remove_shard,
)
from growcache.cache.index.contents import DeletedRange, IndexContents
from growcache.cache.index.schema import ShardState, ShardTableRow
from growcache.cache.index.writer import IndexDatabase
from growcache.cache.lease_views import remove_torn_leases
from growcache.cache.locks import close_owned, open_owned, try_lock
from growcache.cache.purge_list import is_purged, names_purged, read_purge_list
from growcache.cache.shard_refetches import PURGE_META, PurgeProgress
from growcache.cache.shard_survey import ShardsOnDisk, numbers_on_disk, read_shards
from growcache.cache.side_files import (
    DEFERRALS,
    Edition,
    Identity,
    deferrals_in_index,
    identity_notes,
    longest_editions,
    read_deferrals,
    read_editions,
    read_identity,
    read_issued,
    write_deferrals,
    write_editions,
    write_identity,
    write_issued,
)
from growcache.cache.sidecar import Sidecar
from growcache.errors import CacheError, CorruptShardError

_log = logging.getLogger(__name__)

WriteIndex = Callable[[Callable[[], None]], None]


def recover(
    layout: CacheLayout, index: IndexDatabase, write: WriteIndex
) -> tuple[list[ShardTableRow], int]:
    """Make rows and files agree; return the remaining rows and the bytes of foreign files.

    Afterwards every live or retired row has complete files, and no other file of growcache is
    left.
    """
    remove_temporary(layout)
    rows, waiting = _recovered_rows(layout, index, write)
    return rows, waiting + warn_of_foreign_files(layout)


def _recovered_rows(
    layout: CacheLayout, index: IndexDatabase, write: WriteIndex
) -> tuple[list[ShardTableRow], int]:
    index.verify()
    if is_initialised(index):
        _refuse_newer_shards(layout, index.shards())
        _restore_identity(layout, index)
        return reconcile_rows(layout, index, write), 0
    identity = read_identity(layout.root)
    if identity is None:
        # Only index and identity knew the source of the listing, so the listing is made again.
        layout.catalog.unlink(missing_ok=True)
        fsync_directory(layout.root)
        if numbers_on_disk(layout):  # the configuration will show whose they are
            found = files_in_shards(layout).items()
            return [], sum(one.allocated for name, one in found if is_shard_name(name))
        _remove_side_files(layout)
    rebuild_index(layout, index, write, identity)
    return reconcile_rows(layout, index, write), 0


def _refuse_newer_shards(layout: CacheLayout, rows: Sequence[ShardTableRow]) -> None:
    """Refuse a cache that a newer growcache continued, as its last shard shows."""
    for row in rows[-1:]:
        path = layout.sidecar(row.number)
        with suppress(CorruptShardError, OSError):  # `check` finds those
            Sidecar.from_bytes(path.read_bytes(), str(path))


def reconcile_rows(
    layout: CacheLayout, index: IndexDatabase, write: WriteIndex
) -> list[ShardTableRow]:
    files = files_in_shards(layout)
    match = compare_rows(index.shards(), files)
    if match.lost or match.gone:
        write(lambda: _mark_deleted(index, match.lost, match.gone))
    known = {row.number for row in match.rows}
    remove_unknown_shards(layout, files, known)
    return match.rows


def rebuild_index(
    layout: CacheLayout, index: IndexDatabase, write: WriteIndex, identity: Identity | None
) -> None:
    if identity is None:
        write(lambda: mark_initialised(index))
        return
    seen = read_shards(layout, identity)
    editions = longest_editions([read_editions(layout) or [], seen.editions])
    noted = read_issued(layout)
    issued = -1 if noted is None else noted
    deferrals = newest([read_deferrals(layout)]) or seen.deferrals(issued)
    remade = remade_contents(seen, identity, editions, deferrals, issued)
    if claim := index.meta("claim"):
        remade.meta["claim"] = claim
    remade = _without_purged(layout, remade, identity)
    write_side_files(layout, editions, noted, remade)
    write(lambda: index.replace(remade))


def _restore_identity(layout: CacheLayout, index: IndexDatabase) -> None:
    copy = index.meta("identity")
    if copy is None:
        return
    try:
        if read_identity(layout.root) == Identity.from_values(copy):
            return
    except CacheError:
        pass  # it will be written again
    write_identity(layout.root, Identity.from_values(copy))


def _remove_side_files(layout: CacheLayout) -> None:
    """Remove side files that cannot be verified and that no shard needs."""
    for path in (layout.editions, layout.deferrals, layout.issued):
        path.unlink(missing_ok=True)
    fsync_directory(layout.root)


def _mark_deleted(
    index: IndexDatabase, lost: list[ShardTableRow], gone: list[ShardTableRow]
) -> None:
    index.set_state([row.number for row in [*lost, *gone]], ShardState.DELETED)
    index.add_totals(lost_shards=len(lost), lost_samples=sum(row.samples for row in lost))


# A reader makes its lease under a hidden name, locks it and renames it, in well under a
# millisecond. Testing the lock of a younger file could interfere.
LEASE_GRACE_SECONDS = 60.0
SHOWN_FOREIGN = 3  # foreign names in messages


@dataclass(frozen=True, slots=True)
class FoundFile:
    size: int
    allocated: int


@dataclass(frozen=True, slots=True)
class RowsAndFiles:
    rows: list[ShardTableRow]
    lost: list[ShardTableRow]
    gone: list[ShardTableRow]


def files_in_shards(layout: CacheLayout) -> dict[str, FoundFile]:
    found = {}
    with os.scandir(layout.shards) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                found[entry.name] = _found_directory(Path(entry.path))
            else:
                status = entry.stat(follow_symlinks=False)
                found[entry.name] = FoundFile(status.st_size, status.st_blocks * 512)
    return found


def _found_directory(path: Path) -> FoundFile:
    size, blocks = 0, path.lstat().st_blocks
    with os.scandir(path) as entries:  # each entry is read once, because there may be millions
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                return FoundFile(-1, allocated_tree(path))  # not a shard's
            status = entry.stat(follow_symlinks=False)
            size += status.st_size
            blocks += status.st_blocks
    return FoundFile(size, blocks * 512)


def compare_rows(rows: Iterable[ShardTableRow], files: Mapping[str, FoundFile]) -> RowsAndFiles:
    match = RowsAndFiles([], [], [])
    for row in rows:
        *samples, sidecar = (files.get(name) for name in shard_names(row.number))
        there = [found for found in samples if found]
        # All files together, because only the sidecar has each size; none is empty.
        if sidecar is not None and sum(found.size for found in there) == row.shard_bytes:
            allocated = sum(found.allocated for found in (*there, sidecar))
            match.rows.append(row._replace(allocated=allocated))
        elif row.state == ShardState.RETIRED:
            match.gone.append(row)
        else:
            match.lost.append(row)
    return match


def remove_unknown_shards(layout: CacheLayout, files: Iterable[str], known: set[int]) -> None:
    unknown = {shard_number_in(name) for name in files if is_shard_name(name)} - known
    for number in sorted(number for number in unknown if number is not None):
        remove_shard(layout, number)


def remove_temporary(layout: CacheLayout) -> None:
    with open_folder(layout.incoming) as incoming:
        for name in own_and_foreign_names(incoming, is_incoming_name)[0]:
            remove_entry(incoming, name)
    with open_root(layout) as root:
        for name in own_and_foreign_names(root, is_temporary_name)[0]:
            remove_entry(root, name)
    with open_folder(layout.leases) as leases:
        for name in own_and_foreign_names(leases, is_temporary_lease_name)[0]:
            if _is_abandoned_lease(layout.leases / name):
                remove_entry(leases, name)
    remove_torn_leases(layout)


def warn_of_foreign_files(layout: CacheLayout) -> int:
    """Log foreign files; return the bytes of those that `SpaceAccount.measure` does not count."""
    found = foreign_paths(layout)
    if found:
        names = [repr(str(path.relative_to(layout.root))) for path in found[:SHOWN_FOREIGN]]
        shown = ", ".join(names) + (" …" if len(found) > SHOWN_FOREIGN else "")
        _log.warning("recovery leaves foreign files in %s: %s", layout.root, shown)
    return foreign_bytes(layout, found)


def _is_abandoned_lease(path: Path) -> bool:
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


def remade_contents(
    seen: ShardsOnDisk,
    identity: Identity,
    editions: Sequence[Edition],
    deferrals: Deferrals,
    issued: int,
) -> IndexContents:
    """Return the contents of a rebuilt index.

    All numbers except damaged shards count as drawn.
    """
    numbers = sorted(seen.whole)
    rows = [seen.whole[number]._replace(seq=seq) for seq, number in enumerate(numbers)]
    known = sorted({*numbers, *seen.damaged})
    group = int(identity.sizes.get("group_shards", 1))
    stop = max([(issued + 1) * group, *(number + 1 for number in known[-1:])])
    ranges = [DeletedRange(a, b - 1, b - a, 0) for a, b in missing_numbers(known, stop)]
    gone = sum(range_.shards for range_ in ranges)
    totals = _sums_of_rows(rows)
    totals.update(drawn_shards=gone, evicted_shards=gone)
    return IndexContents(
        rows=rows,
        totals=dict(totals),
        meta=_remade_notes(identity, deferrals),
        editions=list(editions),
        ranges=ranges,
        history=[_rebuilt_record()] if rows or ranges else [],
    )


def _without_purged(
    layout: CacheLayout, remade: IndexContents, identity: Identity
) -> IndexContents:
    """Retire the shards with purged objects, as before the index was lost.

    No reader may take them until the purge list has been applied again.
    """
    purges = read_purge_list(layout)
    if not purges:
        return remade
    test = is_purged(layout, purges, identity)
    found = set()
    for row in remade.rows:
        path = layout.sidecar(row.number)
        if names_purged(Sidecar.from_bytes(path.read_bytes(), str(path)), test):
            found.add(row.number)
    rows = [
        row._replace(state=ShardState.RETIRED) if row.number in found else row
        for row in remade.rows
    ]
    progress = PurgeProgress(rewrite=frozenset(found))
    return replace(remade, rows=rows, meta={**remade.meta, PURGE_META: progress.to_meta()})


def count_retried_holes(
    rows: Iterable[ShardTableRow], deferrals: Deferrals, identity: Identity
) -> int:
    group = int(identity.sizes.get("group_shards", 1))
    count = 0
    for row in rows:
        places = deferrals.retried.get(row.group, ())
        count += min(sum(place % group == row.number % group for place in places), row.holes)
    return count


def _sums_of_rows(rows: Iterable[ShardTableRow]) -> Counter[str]:
    sums = Counter(drawn=0, drawn_parts=0, drawn_shards=0, holes=0)
    for row in rows:
        sums.update(drawn=row.samples, drawn_parts=row.parts, drawn_shards=1, holes=row.holes)
    return sums


def _remade_notes(identity: Identity, deferrals: Deferrals) -> dict[str, object]:
    noted = {DEFERRALS: deferrals.to_values()} if deferrals else {}
    return {**identity_notes(identity), "initialised": True, **noted}


def _rebuilt_record() -> tuple[float, str]:
    now = time.time()
    return now, orjson.dumps({"event": "rebuilt", "at": now}).decode()


def missing_numbers(numbers: Sequence[int], stop: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges [first, stop) below ``stop`` that the ascending ``numbers`` leave out.

    >>> [*missing_numbers([1, 2, 5], 8)]
    [(0, 1), (3, 5), (6, 8)]
    """
    edges = [-1, *(n for n in numbers if n < stop), stop]
    for low, high in itertools.pairwise(edges):
        if high > low + 1:
            yield low + 1, high


def mark_initialised(index: IndexDatabase) -> None:
    """Record that the index is complete, so that files without a row are litter."""
    index.set_meta("initialised", True)


def is_initialised(index: IndexDatabase) -> bool:
    return bool(index.meta("initialised"))


def write_side_files(
    layout: CacheLayout,
    editions: Sequence[Edition],
    issued: int | None,
    contents: IndexContents,
) -> None:
    if read_editions(layout) != editions:
        write_editions(layout, editions)
    deferrals = deferrals_in_index(contents.meta)
    if read_deferrals(layout) != deferrals:
        write_deferrals(layout, deferrals)
    groups = (*deferrals.numbers, *(row.group for row in contents.rows))
    last = max([-1 if issued is None else issued, *groups])
    if last != (-1 if not layout.issued.exists() else issued):
        write_issued(layout, last)
