"""``growcache check --repair``: puts right what bits that flipped and files that went have done.

Each step may be cut short and be done again. Small files come first, for they are enough to
make an index; then the index, in one transaction; only then shards that are not whole leave
their place. They are set aside where the next start sweeps them: drawn again they are the
same, byte for byte, and until then somebody may want what is left of them. Readers that have
them mapped keep their maps.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from growcache.cache.aside import SET_ASIDE
from growcache.cache.beside import (
    deferrals_of,
    longest,
    read_deferrals,
    read_editions,
    read_issued,
    write_beside,
)
from growcache.cache.check import OnShard, Survey, survey
from growcache.cache.clearing import finish_clearing
from growcache.cache.deferrals import newest
from growcache.cache.files import Layout, fsync_directory, remove_entry, shard_parts
from growcache.cache.findings import Finding
from growcache.cache.identity import Identity, write_identity
from growcache.cache.index import Contents, Index
from growcache.cache.leases import remove_torn_leases
from growcache.cache.locks import holder, is_held
from growcache.cache.opening import take_over
from growcache.cache.rebuild import remade
from growcache.errors import CacheBusyError, CacheMissingError

SAMPLERS_SECONDS = 10.0  # that those of a service that died need to end


def repair(root: str | os.PathLike[str], on_shard: OnShard | None = None) -> list[Finding]:
    """Mend a cache that no service fills; return what was found, and what became of it.

    Args:
        root: the cache directory.
        on_shard: told (done, all) after each shard that was read.

    Raises:
        CacheMissingError: there is no cache at the path.
        CacheBusyError: a service fills it.
        CacheFullError: the disk has no room for an index.
    """
    layout = Layout(root)
    if not layout.shards.is_dir() and not layout.index.exists():
        raise CacheMissingError(
            f"no cache at {layout.root}; fill one with: growcache run CONFIG"
        )
    layout.create()
    if is_held(layout.supervisor_lock):
        raise CacheBusyError(_busy(layout))
    with take_over(layout, SAMPLERS_SECONDS):
        finish_clearing(layout)
        found = survey(layout, on_shard, stopped=True)
        if all(finding.severity == "info" for finding in found.findings):
            return found.findings
        remove_torn_leases(layout)
        if found.identity is None:
            _leave_to_configuration(layout)
        else:
            _mend(layout, found, found.identity)
    return [_outcome(finding) for finding in found.findings]


def _busy(layout: Layout) -> str:
    found = holder(layout.supervisor_lock)
    return (
        f"a service fills {layout.root} (pid {found.get('pid')} on {found.get('host')}); "
        "stop it, then repair; a check without --repair needs no stop"
    )


def _outcome(finding: Finding) -> Finding:
    return replace(finding, severity="mended") if finding.mendable else finding


def _leave_to_configuration(layout: Layout) -> None:
    """Leave the shards only, whose owner the next service will be asked for."""
    for path in (*_index_files(layout), layout.identity):
        path.unlink(missing_ok=True)
    fsync_directory(layout.root)


def _index_files(layout: Layout) -> Iterator[Path]:
    yield layout.index
    yield from layout.root.glob(f"{layout.index.name}-*")


def _mend(layout: Layout, found: Survey, identity: Identity) -> None:
    editions = longest(
        [found.contents.editions, read_editions(layout) or [], found.seen.editions]
    )
    issued = read_issued(layout)
    last = -1 if issued is None else issued
    kept = [deferrals_of(found.contents.meta), read_deferrals(layout)]
    deferrals = newest(kept) or found.seen.deferrals(last)
    made = remade(found.contents, found.seen, identity, editions, deferrals, last)
    write_identity(layout.root, identity)
    write_beside(layout, editions, issued, made)
    _write_index(layout, made, anew=not found.contents.readable)
    _set_aside(layout, found.seen.damaged)


def _write_index(layout: Layout, contents: Contents, *, anew: bool) -> None:
    layout.ballast.unlink(missing_ok=True)  # the room for it; the next start makes it again
    if anew:
        for path in _index_files(layout):
            path.unlink(missing_ok=True)
        fsync_directory(layout.root)
    with closing(Index.open(layout)) as index, index.transaction():
        index.replace(contents)


def _set_aside(layout: Layout, numbers: frozenset[int]) -> None:
    for number in sorted(numbers):
        for path in shard_parts(layout, number):
            target = layout.incoming / f"{SET_ASIDE}{path.name}"
            if path.exists():
                remove_entry(target)
                path.rename(target)
    fsync_directory(layout.shards)
