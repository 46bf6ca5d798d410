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

from growcache.cache.adoption import adopt, require_cache
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
from growcache.cache.files import Layout, fsync_directory, shard_names
from growcache.cache.findings import Finding
from growcache.cache.folders import folder, remove
from growcache.cache.identity import Identity, write_identity
from growcache.cache.index import Contents, Index
from growcache.cache.leases import remove_torn_leases
from growcache.cache.locks import is_held
from growcache.cache.names import SET_ASIDE
from growcache.cache.opening import in_use, take_over
from growcache.cache.rebuild import remade

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
    require_cache(layout)
    adopt(layout)
    if is_held(layout.supervisor_lock):
        raise in_use(layout, "stop it, then repair; a check without --repair needs no stop")
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
    with folder(layout.shards) as shards, folder(layout.incoming) as incoming:
        for number in sorted(numbers):
            for name in shard_names(number):
                if (layout.shards / name).exists():
                    remove(incoming, SET_ASIDE + name)
                    os.rename(name, SET_ASIDE + name, src_dir_fd=shards, dst_dir_fd=incoming)
        os.fsync(shards)
