"""``growcache purge``: record objects, have their samples removed, and report the rest.

The list is the request. A running service reads it, and without one this process removes the
samples. The report compares the files before and afterwards.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson
import typer

from growcache.cache.cache import Cache
from growcache.cache.directory import require_cache
from growcache.cache.files import (
    CacheLayout,
    allocated,
    allocated_tree,
    generation_paths,
    shard_paths,
)
from growcache.cache.index.reader import known_identity, read_index
from growcache.cache.lease_views import survey_leases
from growcache.cache.locks import is_locked
from growcache.cache.purge_list import (
    PurgedObject,
    PurgeList,
    append_to_list,
    is_purged,
    key_hash,
    named_objects,
    names_purged,
    parse_list,
    purged_samples,
    read_bytes,
    read_purge_list,
)
from growcache.cache.shard_refetches import PURGE_META, number_list, purge_progress
from growcache.cache.shard_survey import numbers_on_disk
from growcache.cache.sidecar import Sidecar
from growcache.cache.status import forget_errors, read_status, service_silence
from growcache.cli.terminal import fold_to_width, print_json, spinner
from growcache.config import CacheConfig
from growcache.errors import (
    CacheBusyError,
    CacheError,
    CacheMissingError,
    ConfigError,
    CorruptShardError,
)
from growcache.humanize import in_bytes, plural
from growcache.store.catalog import Catalog

POLL_SECONDS = 0.1
STEP_SECONDS = 0.5
HEARD_SECONDS = 30.0  # although a service reads the list ten times per second
SILENT_SECONDS = 2.0  # of silence, because a machine may just have woken up
RECORDED = "the objects are recorded, and are purged once the service continues; it"
SAMPLERS_END_SECONDS = 10.0
SPARE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Holder:
    """A reader that still holds purged samples."""

    job: str
    host: str
    pid: int
    command: str
    shards: list[int]


@dataclass(frozen=True, slots=True)
class PurgeReport:
    """The changes in all generations of a cache.

    Lists start with the oldest generation's shards.
    """

    keys: int  # named by the user
    recorded: int  # of these, new in the list
    listed: int  # of these, in the listing of this cache
    samples: int  # of them, removed from all shards
    rewritten: list[int]  # shards
    dropped: list[int]
    held: list[int]
    bytes: int  # of shards, freed
    holders: list[Holder] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)  # shards with unknown samples
    generations: int = 1

    @property
    def text(self) -> str:
        return " ".join(self._sentences())

    def _sentences(self) -> Iterator[str]:
        yield (
            f"{plural(self.keys, 'object')} in the purge list ({self.recorded:,} new), "
            f"{self.listed:,} of this cache's listing."
        )
        if self.listed < self.keys:
            yield "The others are recorded, too; write keys as growcache peek shows them."
        where = f" in {self.generations} generations" if self.generations > 1 else ""
        yield (
            f"Removed {plural(self.samples, 'sample')}{where}: "
            f"{plural(len(self.rewritten), 'shard')} rewritten, {len(self.dropped):,} dropped, "
            f"{in_bytes(self.bytes)} freed."
        )
        if self.held:
            yield (
                f"Still held: {plural(len(self.held), 'shard')} ({number_list(self.held)}); no "
                "new snapshot has them, and they are deleted once their readers release them."
            )
        for holder in self.holders:
            yield (
                f"{holder.command} (pid {holder.pid} on {holder.host}, job {holder.job}) holds "
                f"{plural(len(holder.shards), 'shard')}."
            )
        if self.unread:
            yield (
                f"NOT examined: {plural(len(self.unread), 'shard')} "
                f"({number_list(self.unread)}), because index and identity.json are lost; "
                "growcache check --repair shows what is left, and the next growcache run "
                "CONFIG takes over the shards and removes the samples."
            )


def purge_objects(
    root: Path, names: Sequence[str], keys_from: str | None, *, wait: bool, json: bool
) -> int:
    """Purge, and print the report. Return exit code 1 if samples are left, or may be."""
    root = root.absolute()
    require_cache(CacheLayout(root))
    asked = named_objects([*names, *_lines(keys_from)], int(time.time()))
    with spinner(sys.stderr, "purging …"):
        report = _purge(root, list(asked) or _known(root), wait=wait)
    if json:
        print_json(orjson.dumps(asdict(report)))
    else:
        typer.echo(fold_to_width(report.text, sys.stdout))
    return 1 if report.held or report.unread else 0


def _lines(keys_from: str | None) -> list[str]:
    if keys_from is None:
        return []
    try:
        data = sys.stdin.buffer.read() if keys_from == "-" else Path(keys_from).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"--keys-from: cannot read {keys_from}: {error.strerror}; nothing was purged",
            code="GC105",
        ) from None
    return data.decode("utf-8", "surrogateescape").split("\n")


def _generations(root: Path) -> list[CacheLayout]:
    return [CacheLayout(path) for path in generation_paths(root)]


def _known(root: Path) -> list[PurgedObject]:
    """Return the objects of all generations' lists, because a command may have ended early."""
    found = {
        one.sha256: one
        for layout in _generations(root)
        for one in parse_list(read_bytes(layout), layout.purged)
    }
    if not found:
        raise ConfigError(
            "name the objects to purge, by their keys or in a file (--keys-from FILE); this "
            "cache has no unfinished purge",
            code="GC105",
        )
    return list(found.values())


def _purge(root: Path, asked: Sequence[PurgedObject], *, wait: bool) -> PurgeReport:
    meant = PurgeList(frozenset(one.sha256 for one in asked))
    before = _look(root, meant)
    recorded = _record(root, asked)
    _apply(root, wait=wait)
    after = _look(root, meant)
    changes = [
        _change(layout, before.get(layout, NOTHING), after.get(layout, NOTHING))
        for layout in dict.fromkeys([*before, *after])
    ]
    return PurgeReport(
        len(meant.hashes),
        recorded,
        len(set().union(*(_listed(CacheLayout(path), meant) for path in after))),
        sum(change.samples for change in changes),
        [number for change in changes for number in change.rewritten],
        [number for change in changes for number in change.dropped],
        [number for change in changes for number in change.held],
        sum(change.bytes for change in changes),
        [holder for change in changes for holder in _holders(change.root, change.held)],
        [number for change in changes for number in change.unread],
        len(changes),
    )


def _record(root: Path, asked: Sequence[PurgedObject]) -> int:
    """Add the objects to the list of every generation, including one that starts meanwhile."""
    recorded, seen = 0, set[Path]()
    while missing := [one for one in _generations(root) if one.root not in seen]:
        for layout in missing:
            seen.add(layout.root)
            try:
                recorded = max(recorded, append_to_list(layout, asked))
            except FileNotFoundError:
                if layout.root.exists():
                    raise
                # The generation has ended.
    return recorded


@dataclass(frozen=True, slots=True)
class _Holding:
    samples: int  # of purged objects
    is_concerned: bool  # has samples or holes of them
    nbytes: int  # of the shard


@dataclass(frozen=True, slots=True)
class _Seen:
    """The shards of one generation."""

    shards: dict[int, _Holding] = field(default_factory=dict)
    unread: list[int] = field(default_factory=list)


NOTHING = _Seen()


@dataclass(frozen=True, slots=True)
class _Change:
    """The changes of a purge in one generation."""

    root: Path
    samples: int
    rewritten: list[int]
    dropped: list[int]
    held: list[int]
    bytes: int
    unread: list[int]


def _change(root: Path, before: _Seen, after: _Seen) -> _Change:
    held = sorted(number for number, one in after.shards.items() if one.samples)
    concerned = {number for number, one in before.shards.items() if one.is_concerned}
    gone = concerned.difference(held, after.unread)
    rewritten = sorted(gone & after.shards.keys())
    freed = sum(before.shards[n].nbytes for n in gone)
    return _Change(
        root,
        sum(before.shards[number].samples for number in gone),
        rewritten,
        sorted(gone - after.shards.keys()),
        held,
        freed - sum(after.shards[n].nbytes for n in rewritten),
        after.unread,
    )


def _look(root: Path, meant: PurgeList) -> dict[Path, _Seen]:
    return {layout.root: _seen(layout, meant) for layout in _generations(root)}


def _seen(layout: CacheLayout, meant: PurgeList) -> _Seen:
    """Return the shards on disk, with the number of purged samples in each."""
    identity = known_identity(layout)
    if identity is None:
        return _Seen(unread=numbers_on_disk(layout))
    test, found = is_purged(layout, meant, identity), {}
    for number in _numbers(layout):
        holding = _holding(layout, number, test)
        if holding is not None:
            found[number] = holding
    return _Seen(found)


def _numbers(layout: CacheLayout) -> list[int]:
    try:
        view = read_index(layout.root, retired=True)
    except CacheMissingError:  # the purge rebuilds the index from these
        return numbers_on_disk(layout)
    return [row.number for row in (*view.shards, *view.retired)]


def _holding(layout: CacheLayout, number: int, test: Callable[[str], bool]) -> _Holding | None:
    path = layout.sidecar(number)
    try:
        sidecar = Sidecar.from_bytes(path.read_bytes(), str(path))
    except FileNotFoundError:  # deleted since the index was read
        return None
    except CorruptShardError:  # its samples are unknown, so all of it goes
        return _Holding(0, True, sum(map(allocated, shard_paths(layout, number))))
    samples, concerned = purged_samples(sidecar, test), names_purged(sidecar, test)
    return _Holding(samples, concerned, sidecar.shard_bytes)


def _listed(layout: CacheLayout, meant: PurgeList) -> set[str]:
    found: set[str] = set()
    if not layout.catalog.exists():
        return found
    with (
        suppress(CacheError),  # the next start replaces a damaged listing
        Catalog.open(layout.catalog, readonly=True) as catalog,
    ):
        for _, keys in catalog.stores_and_keys(0, len(catalog)):
            found |= meant.hashes.intersection(map(key_hash, keys))
    return found


def _holders(root: Path, held: Sequence[int]) -> list[Holder]:
    if not held:
        return []
    leases = [lease for lease in survey_leases(root)[0] if lease.open]
    shards = {lease.name: sorted(set(held).intersection(lease.holding())) for lease in leases}
    return [
        Holder(one.job, one.host, one.pid, one.command, shards[one.name])
        for one in leases
        if shards[one.name]
    ]


def _apply(root: Path, *, wait: bool) -> None:
    """Return once the lists are applied, except for shards held by readers, unless ``wait``."""
    while not _applied_by_service(root, wait=wait):
        try:
            _apply_alone(root, wait=wait)
        except CacheBusyError:
            if not _is_served(root):
                raise
        else:
            return


def _is_served(root: Path) -> bool:
    return any(is_locked(layout.supervisor_lock) for layout in _generations(root))


def _applied_by_service(root: Path, *, wait: bool) -> bool:
    """Wait for a running service, or return False without one."""
    sizes: dict[Path, int] = {}  # of the lists, which may grow meanwhile
    began, silent_since = time.monotonic(), math.inf
    while _is_served(root):
        layouts, now = _generations(root), time.monotonic()
        for layout in layouts:
            sizes.setdefault(layout.root, read_purge_list(layout).size)
        metas = {layout: _meta(layout) for layout in layouts}
        if all(
            _is_applied(one, meta, sizes[one.root], wait=wait) for one, meta in metas.items()
        ):
            return True
        silence = service_silence(root)
        silent_since = min(silent_since, now) if silence else math.inf
        if now - silent_since > SILENT_SECONDS:
            raise CacheError(f"{RECORDED} now waits for {silence}", code="GC414")
        if now - began > HEARD_SECONDS and any(PURGE_META not in m for m in metas.values()):
            raise CacheError(
                f"{RECORDED} does not answer: it is stopped, or of an earlier version",
                code="GC414",
            )
        time.sleep(POLL_SECONDS)
    return False


def _meta(layout: CacheLayout) -> Mapping[str, Any]:
    try:
        return read_index(layout.root).meta
    except CacheMissingError:  # it is being rebuilt, or the generation has ended
        return {}


def _is_applied(
    layout: CacheLayout, meta: Mapping[str, object], size: int, *, wait: bool
) -> bool:
    progress = purge_progress(meta)
    if PURGE_META not in meta or progress.size < size:
        return False
    return not (progress.numbers if wait else progress.numbers - _held(layout))


def _held(layout: CacheLayout) -> set[int]:
    leases, foreign = survey_leases(layout.root)
    if any(lease.protects for lease in foreign):
        return set(purge_progress(_meta(layout)).numbers)
    return set().union(*(lease.holding() for lease in leases if lease.open))


def _apply_alone(root: Path, *, wait: bool) -> None:
    with ExitStack() as opened:
        newest = _open_all(root, opened)
        while True:
            _step_until_readers(newest)
            left = [one for one in _caches(newest) if one.remover.purging.numbers]
            if not wait or not left:
                break
            time.sleep(POLL_SECONDS)
            newest.poll_leases(time.monotonic())
            newest.purger.look()  # another command may have added to the list
            newest.older.poll(time.monotonic())
    forget_errors(root)


def _open_all(root: Path, opened: ExitStack) -> Cache:
    """Return the newest generation with the older ones, opened in the order of a service."""
    config = _config_without_service(CacheLayout(root))
    caches = [
        opened.enter_context(
            Cache.open(layout.root, config, takeover_seconds=SAMPLERS_END_SECONDS)
        )
        for layout in reversed(_generations(root))
    ]
    newest, *older = caches
    newest.older.caches = older[::-1]
    newest.older.follow_list(newest.layout)
    newest.purger.look()
    newest.count_older()
    newest.space.admit()
    return newest


def _caches(newest: Cache) -> list[Cache]:
    return [newest, *newest.older.caches]


def _step_until_readers(newest: Cache) -> None:
    newest.older.poll(time.monotonic())
    while any(one.purger.busy for one in _caches(newest)):
        if newest.purger.busy:
            newest.purger.step(time.monotonic() + STEP_SECONDS)
        newest.older.poll(time.monotonic())
        newest.count_older()


def _config_without_service(layout: CacheLayout) -> CacheConfig:
    """Return the settings of the last service that readers depend on."""
    meta = _meta(layout)
    bound = read_status(layout.root).target_bytes if layout.index.exists() else 0
    return CacheConfig(
        path=layout.root,
        max_bytes=bound or 2 * allocated_tree(layout.root) + SPARE_BYTES,  # type: ignore[arg-type]
        max_reuse=meta.get("max_reuse"),
        on_max_reuse=meta.get("on_max_reuse", "warn"),
        min_free=0,
        allow_network_filesystem=True,  # the service has decided about that
    )
