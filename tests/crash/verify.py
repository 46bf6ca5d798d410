"""Invariants of a cache whose writer has died, and of the service that opens it next."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from growcache.cache.check import check
from growcache.cache.files import CacheLayout, allocated_tree, shard_number
from growcache.cache.formats import open_shard
from growcache.cache.index.reader import IndexView, read_index
from growcache.cache.locks import is_locked
from growcache.cache.recovery import LEASE_GRACE_SECONDS
from growcache.cache.side_files import Identity
from growcache.cache.status import read_status
from tests.cache.making import MAX_BYTES, add, equal, opened, samples_of

START_SECONDS = 2.0
PATIENCE_SECONDS = 10.0  # wall clock, because the machine may be busy


@dataclass(frozen=True, slots=True)
class Told:
    """The promises about a cache that others rely on.

    Attributes:
        committed: Shards that must be live.
        issued: The highest group that was issued; -1 if none was.
    """

    committed: frozenset[int] = frozenset()
    issued: int = -1


def told(marks: Iterable[str]) -> Told:
    """Return the promises that a writer's marks made."""
    committed: set[int] = set()
    issued = -1
    for mark in marks:
        what, *numbers = mark.split()
        if what == "issued":
            issued = max(issued, *map(int, numbers))
        elif what == "committed":
            committed |= set(map(int, numbers))
        elif what == "evicting":
            committed -= set(map(int, numbers))
    return Told(frozenset(committed), issued)


def verify(
    root: Path, kind: Identity, said: Told, where: str, max_bytes: int = MAX_BYTES
) -> None:
    """Check a dead cache as readers see it, then start the next service on it."""
    dead = verify_dead(root, said, where, max_bytes)
    verify_next(root, kind, dead, said, where, max_bytes)


def verify_dead(root: Path, said: Told, where: str, max_bytes: int = MAX_BYTES) -> IndexView:
    """Check that readers see a consistent cache after the service died."""
    layout = CacheLayout(root)
    if root.exists():
        assert allocated_tree(root) <= max_bytes, where
    assert not is_locked(layout.supervisor_lock), where
    if not layout.index.exists():
        assert not said.committed, where
        assert said.issued < 0, where
        return IndexView()
    assert read_status(root).state == "stopped", where
    errors = [finding for finding in check(root) if finding.severity == "error"]
    assert not errors, f"{where}: {errors}"
    verify_shards(root)
    view = read_index(root)
    assert said.committed <= {row.number for row in view.shards}, where
    return view


def verify_shards(root: Path) -> None:
    """Check that every sample of every live shard is the one that was drawn."""
    view = read_index(root)
    for row in view.shards:
        if row.samples:
            assert view.schema is not None
            shard = open_shard(
                CacheLayout(root), row.number, row.samples, view.schema, view.cache_format
            )
            assert shard.digest() == row.digest
            assert all(map(equal, shard, samples_of(row.number, row.samples, view.schema)))
            shard.close()


def verify_next(
    root: Path,
    kind: Identity,
    dead: IndexView,
    said: Told,
    where: str,
    max_bytes: int = MAX_BYTES,
) -> None:
    """Check that the next service continues where the dead one was."""
    _let_time_pass(CacheLayout(root).leases)
    began, worked = time.monotonic(), time.process_time()
    with opened(root, kind, resume_seconds=0, max_bytes=max_bytes) as cache:
        assert time.process_time() - worked < START_SECONDS, f"{where}: the start does too much"
        assert time.monotonic() - began < PATIENCE_SECONDS, f"{where}: the start waits"
        layout, view, totals = cache.layout, read_index(root), cache.totals()
        live = {row.number for row in view.shards}
        assert {row.number for row in dead.shards} == live, where
        assert dead.totals.drawn_shards == totals.drawn_shards, where
        assert {shard_number(p) for p in layout.shards.iterdir()} == live, where
        assert not list(layout.incoming.iterdir()), where
        assert not list(root.glob(".*.tmp")), where
        assert not list(layout.leases.iterdir()), where
        assert cache.meta.issued >= said.issued, where
        unfinished = cache.unfinished(cache.meta.issued + 1, 1)
        assert totals.drawn_shards + len(unfinished) == cache.meta.issued + 1, where
        assert totals.drawn == totals.samples + totals.evicted_samples, where
        assert not live & set(unfinished), where
        assert totals.lost_shards == 0, where
        assert allocated_tree(root) <= max_bytes, where
        for number in [*unfinished, 50]:
            add(cache, number)
        assert {50, *unfinished} <= {row.number for row in read_index(root).shards}, where
        verify_shards(root)
    assert not check(root), where


def _let_time_pass(leases: Path) -> None:
    """Make unfinished leases so old that no reader can still be writing them."""
    old = time.time() - 2 * LEASE_GRACE_SECONDS
    for path in leases.glob(".*.tmp"):
        os.utime(path, (old, old))
