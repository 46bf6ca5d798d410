"""``growcache purge``: record which objects must be gone, have their samples removed, and look what is left.

The list is the request: a service that runs reads it, and without one this process takes its place.
The report says what two looks at the files found, before and afterwards.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import orjson
import typer

from growcache.cache.cache import Cache
from growcache.cache.directory import require_cache
from growcache.cache.files import CacheLayout, allocated_tree, generation_paths
from growcache.cache.index.reader import IndexView, read_index
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
    purged_samples,
    read_purge_list,
)
from growcache.cache.shard_refetches import PURGE_META, number_list, purge_progress
from growcache.cache.sidecar import Sidecar
from growcache.cache.status import forget_errors, read_status
from growcache.cli.humanize import in_bytes, plural
from growcache.cli.terminal import fold_to_width, print_json, spinner
from growcache.config import CacheConfig
from growcache.errors import (
    CacheBusyError,
    CacheError,
    CacheMissingError,
    ConfigError,
    CorruptShardError,
)
from growcache.store.catalog import Catalog

POLL_SECONDS = 0.1
STEP_SECONDS = 0.5
HEARD_SECONDS = 30.0  # a service reads the list ten times a second
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
    keys: int  # that were named
    recorded: int  # of these, new in the list
    listed: int  # of these, in the listing of this cache
    samples: int  # of them, that no shard holds any more
    rewritten: list[int]  # shards
    dropped: list[int]
    held: list[int]
    bytes: int  # of shards, that are free now
    holders: list[Holder] = field(default_factory=list)

    @property
    def text(self) -> str:
        return " ".join(self._sentences())

    def _sentences(self) -> Iterator[str]:
        yield (
            f"{plural(self.keys, 'object')} in the purge list ({self.recorded:,} new), "
            f"{self.listed:,} of this cache's listing."
        )
        if self.listed < self.keys:
            yield "The others are recorded all the same; a key is what growcache peek shows."
        yield (
            f"Removed {plural(self.samples, 'sample')}: "
            f"{plural(len(self.rewritten), 'shard')} rewritten, {len(self.dropped):,} dropped, "
            f"{in_bytes(self.bytes)} freed."
        )
        if self.held:
            yield (
                f"Still held: {plural(len(self.held), 'shard')} ({number_list(self.held)}); no new "
                "snapshot has them, and they go when their readers let go of them."
            )
        for holder in self.holders:
            yield (
                f"{holder.command} (pid {holder.pid} on {holder.host}, job {holder.job}) holds "
                f"{plural(len(holder.shards), 'shard')}."
            )


def purge_objects(
    root: Path, names: Sequence[str], keys_from: str | None, *, wait: bool, json: bool
) -> int:
    """Purge, and print the report; return exit code 1 if samples are left."""
    layout = CacheLayout(root)
    require_cache(layout)
    if len(generation_paths(root.absolute())) > 1:
        raise ConfigError(
            f"{root} holds two generations, of which one is being replaced; nothing was purged. Purge "
            "again once growcache status shows no older_samples, or empty it: growcache clear"
        )
    asked = named_objects([*names, *_lines(keys_from)], int(time.time()))
    with spinner(sys.stderr, "purging …"):
        report = _purge(layout, asked, wait=wait)
    if json:
        print_json(orjson.dumps(asdict(report)))
    else:
        typer.echo(fold_to_width(report.text, sys.stdout))
    return 1 if report.held else 0


def _lines(keys_from: str | None) -> list[str]:
    if keys_from is None:
        return []
    try:
        data = sys.stdin.buffer.read() if keys_from == "-" else Path(keys_from).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"--keys-from: cannot read {keys_from}: {error.strerror}; nothing was purged"
        ) from None
    return data.decode("utf-8", "surrogateescape").split("\n")


def _purge(layout: CacheLayout, asked: Iterable[PurgedObject], *, wait: bool) -> PurgeReport:
    asked = list(asked)
    meant = PurgeList(frozenset(one.sha256 for one in asked)) if asked else _known(layout)
    test = is_purged(layout, meant)
    before = _holdings(layout, test)
    recorded = append_to_list(layout, asked)
    _apply(layout, wait=wait)
    after = _holdings(layout, test)
    held = sorted(number for number, one in after.items() if one.samples)
    gone = {number for number, one in before.items() if one.is_concerned} - {*held}
    rewritten = sorted(gone & after.keys())
    return PurgeReport(
        len(meant.hashes),
        recorded,
        _listed(layout, meant),
        sum(before[number].samples for number in gone),
        rewritten,
        sorted(gone - after.keys()),
        held,
        sum(before[n].nbytes for n in gone) - sum(after[n].nbytes for n in rewritten),
        _holders(layout, held),
    )


def _known(layout: CacheLayout) -> PurgeList:
    found = read_purge_list(layout)
    if not found:
        raise ConfigError(
            "name the objects to purge, by their keys or in a file (--keys-from FILE); no earlier "
            "purge is to be finished here"
        )
    return found


@dataclass(frozen=True, slots=True)
class _Holding:
    samples: int  # of purged objects
    is_concerned: bool  # it has samples or holes of them
    nbytes: int  # of the shard


def _holdings(layout: CacheLayout, test: Callable[[str], bool]) -> dict[int, _Holding]:
    """Return the shards on disk, with how many purged samples each holds."""
    view = _read_index(layout)
    found = {}
    for row in (*view.shards, *view.retired):
        path = layout.sidecar(row.number)
        try:
            sidecar = Sidecar.from_bytes(path.read_bytes(), str(path))
        except FileNotFoundError:  # deleted since the index was read
            continue
        except CorruptShardError:  # what it holds is unknown, so all of it goes
            found[row.number] = _Holding(row.samples, True, row.shard_bytes)
            continue
        samples, concerned = purged_samples(sidecar, test), names_purged(sidecar, test)
        found[row.number] = _Holding(samples, concerned, row.shard_bytes)
    return found


def _read_index(layout: CacheLayout) -> IndexView:
    try:
        return read_index(layout.root, retired=True)
    except CacheMissingError:  # it is made again when the purge is applied
        return IndexView()


def _listed(layout: CacheLayout, meant: PurgeList) -> int:
    if not layout.catalog.exists():
        return 0
    found: set[str] = set()
    with (
        suppress(CacheError),  # it is damaged: the next start lists anew
        Catalog.open(layout.catalog, readonly=True) as catalog,
    ):
        for _, keys in catalog.stores_and_keys(0, len(catalog)):
            found |= meant.hashes.intersection(map(key_hash, keys))
    return len(found)


def _holders(layout: CacheLayout, held: Sequence[int]) -> list[Holder]:
    leases = [lease for lease in survey_leases(layout.root)[0] if lease.open]
    shards = {lease.name: sorted(set(held).intersection(lease.holding())) for lease in leases}
    return [
        Holder(one.job, one.host, one.pid, one.command, shards[one.name])
        for one in leases
        if shards[one.name]
    ]


def _apply(layout: CacheLayout, *, wait: bool) -> None:
    """Return once the list is applied, except for what readers hold (with ``wait``: for that too)."""
    size = read_purge_list(layout).size
    while not _applied_by_service(layout, size, wait=wait):
        try:
            _apply_alone(layout, wait=wait)
        except CacheBusyError:
            if not is_locked(layout.supervisor_lock):
                raise
        else:
            return


def _applied_by_service(layout: CacheLayout, size: int, *, wait: bool) -> bool:
    """Wait for the service that runs; False if none runs."""
    began = time.monotonic()
    while is_locked(layout.supervisor_lock):
        meta = _read_index(layout).meta
        if _is_applied(layout, meta, size, wait=wait):
            return True
        if PURGE_META not in meta and time.monotonic() - began > HEARD_SECONDS:
            raise CacheError(
                f"the service of {layout.root} does not answer: it is stopped, or of an earlier "
                "version. The objects are recorded, and purged when it is started again"
            )
        time.sleep(POLL_SECONDS)
    return False


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
        return set(purge_progress(_read_index(layout).meta).numbers)
    return set().union(*(lease.holding() for lease in leases if lease.open))


def _apply_alone(layout: CacheLayout, *, wait: bool) -> None:
    config = _config_without_service(layout)
    with Cache.open(layout.root, config, takeover_seconds=SAMPLERS_END_SECONDS) as cache:
        while True:
            while cache.purger.busy:
                cache.purger.step(time.monotonic() + STEP_SECONDS)
            if not wait or not cache.remover.purging.numbers:
                break
            time.sleep(POLL_SECONDS)
            cache.poll_leases(time.monotonic())
            cache.purger.look()  # another command may have added to the list
    forget_errors(layout.root)


def _config_without_service(layout: CacheLayout) -> CacheConfig:
    """Return the settings of the last service, as far as readers go by them."""
    meta = _read_index(layout).meta
    bound = read_status(layout.root).target_bytes if layout.index.exists() else 0
    return CacheConfig(
        path=layout.root,
        max_bytes=bound or 2 * allocated_tree(layout.root) + SPARE_BYTES,  # type: ignore[arg-type]
        max_reuse=meta.get("max_reuse"),
        on_max_reuse=meta.get("on_max_reuse", "warn"),
        min_free=0,
        allow_network_filesystem=True,  # the service decided about that
    )
