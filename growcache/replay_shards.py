"""Shards that a replay needs: from the cache that still holds them, or drawn from the store again.

An ordinary service draws them again, into a separate cache. That cache starts with the
journal's record of the old one: its identity, editions, deferrals and listing. So every shard
has its old number and bytes, even if objects were added to the store since.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import orjson

from growcache.cache.deferrals import Deferrals
from growcache.cache.directory import adopt
from growcache.cache.files import CacheLayout, write_atomic
from growcache.cache.index.reader import IndexView, read_index
from growcache.cache.lease_views import LeaseCounters
from growcache.cache.locks import is_locked
from growcache.cache.purge_list import copy_list
from growcache.cache.reader_lease import Lease
from growcache.cache.shard_refetches import refetch_outcomes
from growcache.cache.side_files import (
    Edition,
    Identity,
    describe_differences,
    read_identity,
    write_deferrals,
    write_editions,
    write_identity,
    write_issued,
)
from growcache.cache.uses import NO_JOB
from growcache.config import Config
from growcache.errors import CacheError, CacheMissingError, FingerprintError, JournalError
from growcache.loading.journal import CacheFacts
from growcache.loading.snapshot import Snapshot
from growcache.loading.waiting import index_views, refuse_failed_service
from growcache.sampling.fingerprint import configured_values
from growcache.sampling.serve import serve
from growcache.store.catalog import Catalog

Digests = Mapping[int, str]  # of shards, by number
Lengths = Mapping[int, int]  # samples of shards, by number


def refuse_other_config(config: Config, identity: Identity) -> None:
    """Raise FingerprintError if the configuration makes other samples than the journal has."""
    ours = configured_values(config)
    theirs = {name: value for name, value in identity.parts.items() if name in ours}
    if differing := describe_differences(theirs, ours):
        raise FingerprintError(
            "the journal is of a cache that another configuration filled: "
            f"{'; '.join(differing[:5])}; give the configuration of that run"
        )


@contextmanager
def snapshots_with(
    config: Config,
    digests: Digests,
    lengths: Lengths,
    facts: CacheFacts | None,
    catalog: bytes | None,
    folder: Path,
) -> Iterator[list[tuple[Snapshot, bool]]]:
    """Yield snapshots that hold all of the shards, and whether each was drawn again.

    Shards are drawn again into ``folder``.
    """
    with ExitStack() as opened:
        found: list[tuple[Snapshot, bool]] = []

        def take(root: Path, *, again: bool) -> None:
            snapshot = _take_live(root, {n: digests[n] for n in _missing(digests, found)})
            if snapshot is not None:
                found.append((opened.enter_context(snapshot), again))

        take(Path(config.cache.path), again=False)
        if _missing(digests, found):
            root = _seeded_cache(facts, catalog, folder)
            copy_list(CacheLayout(config.cache.path), CacheLayout(root))
            take(root, again=True)
            if missing := _missing(digests, found):
                wanted = {number: digests[number] for number in missing}
                snapshot = opened.enter_context(_drawn_again(config, root, wanted, lengths))
                found.append((snapshot, True))
        yield found


def _missing(digests: Digests, found: Collection[tuple[Snapshot, bool]]) -> list[int]:
    return sorted(n for n in digests if not any(snapshot.has(n) for snapshot, _ in found))


def _take_live(root: Path, digests: Digests) -> Snapshot | None:
    """Return a snapshot of the cache's intact shards with these digests, or None."""
    while True:
        try:
            view = read_index(root)
        except CacheMissingError:
            return None
        only = {row.number: row.digest for row in view.shards if row.samples}
        only = {n: digest for n, digest in only.items() if digests.get(n) == digest}
        if not only:
            return None
        try:
            snapshot = Snapshot.take(root, job=NO_JOB, only=only)
        except CacheError:  # a shard was evicted meanwhile
            if read_index(root).shards == view.shards:
                raise
            continue
        damaged = [number for number in only if not snapshot.is_whole(number)]
        if not damaged:
            return snapshot
        snapshot.close()
        digests = {n: digest for n, digest in only.items() if n not in damaged}


# ------------------------------------------------------------------------- drawing again


def _seeded_cache(facts: CacheFacts | None, catalog: bytes | None, folder: Path) -> Path:
    """Return a cache in ``folder`` into which the service draws the journal's shards again."""
    if facts is None or facts.values["identity"] is None or not facts.values["editions"]:
        raise JournalError(
            "some shards are no longer cached, and the journal does not say how to draw them "
            "again: it belongs to a copy of a cache, which knows no store"
        )
    if catalog is None:
        raise JournalError(
            "the listing in the journal is cut off, so no shard can be drawn again"
        )
    identity = Identity.from_values(facts.values["identity"])
    # Rounded up, so that the cache still serves the journal after it has grown.
    shards = 1 << max(10, facts.last_shard.bit_length())
    about = orjson.dumps([facts.values, shards], option=orjson.OPT_SORT_KEYS)
    root = folder / hashlib.blake2b(about, digest_size=8).hexdigest()
    layout = CacheLayout(root)
    if not layout.issued.exists():
        root.mkdir(parents=True, exist_ok=True)
        adopt(layout)
        _write_side_files(layout, facts.values, identity, catalog)
        groups = shards // int(identity.sizes.get("group_shards", 1))
        write_issued(layout, groups)  # last, because all groups then count as drawn and evicted
    return root


def _write_side_files(
    layout: CacheLayout, facts: dict[str, Any], identity: Identity, catalog: bytes
) -> None:
    write_atomic(layout.catalog, catalog)
    with Catalog.open(layout.catalog) as copied:
        # No listing, because new objects belong to no shard of the journal.
        copied.complete = True
    write_editions(layout, [Edition(*row) for row in facts["editions"]])
    if facts["deferrals"] is not None:
        write_deferrals(layout, Deferrals.from_values(facts["deferrals"]))
    write_identity(layout.root, identity)


def _drawn_again(config: Config, root: Path, digests: Digests, lengths: Lengths) -> Snapshot:
    known = read_identity(root)
    own = config.model_copy(update={"cache": config.cache.model_copy(update={"path": root})})
    counters = LeaseCounters(counts=True)
    with serve(own), ExitStack() as opened:
        mine = {number: lengths[number] for number in digests}
        lease = Lease.create(
            root, NO_JOB, digests, wishes=digests, lengths=mine, counters=counters
        )
        opened.callback(lease.close)
        with closing(index_views(root, threading.Event(), lambda: False)) as views:
            for view in views:
                if _all_came(root, view, known, digests):
                    lease.settle()
                    opened.pop_all()
                    rows = [row for row in view.shards if row.number in digests]
                    return Snapshot(CacheLayout(root), view, rows, lease, job=NO_JOB)
    raise AssertionError("views end only when they are stopped")


def _all_came(root: Path, view: IndexView, known: Identity | None, digests: Digests) -> bool:
    layout = CacheLayout(root)
    refuse_failed_service(layout, view)
    if not is_locked(layout.supervisor_lock):
        raise JournalError(
            f"the service of another replay in {root.parent} has ended; repeat this one"
        )
    found = view.identity
    if known and found and not known.yields_same_samples(found):
        differing = describe_differences(known.parts, found.parts)
        raise FingerprintError(
            "the journal is of a cache that other code filled: "
            f"{'; '.join(differing[:5]) or 'its fingerprint differs'}"
        )
    outcomes = refetch_outcomes(view, digests)
    if any(outcome.state == "pending" for outcome in outcomes.values()):
        return False
    refused = [f"{n}: {one.reason}" for n, one in outcomes.items() if one.state == "refused"]
    if refused:
        raise JournalError(
            f"{len(refused)} of {len(digests)} shards cannot be made again as they were, "
            f"shard {'; '.join(refused)}"
        )
    return True
