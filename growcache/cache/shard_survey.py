"""Examine the shards on disk: those that match their sidecars, and the errors of the others."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import google_crc32c
import numpy as np

from growcache.cache.deferrals import Deferrals, ShardDeferrals, from_shards
from growcache.cache.files import CacheLayout, allocated_tree, shard_number_in, shard_paths
from growcache.cache.folders import is_shard_name, open_folder, own_and_foreign_names
from growcache.cache.formats import CACHE_FORMATS, open_shard, shard_path
from growcache.cache.formats.mapped import MappedShard
from growcache.cache.index.schema import ShardState, ShardTableRow
from growcache.cache.purge_list import names_purged
from growcache.cache.side_files import Edition, Identity, editions_in_sidecar
from growcache.cache.sidecar import Sidecar
from growcache.errors import CacheError, CorruptShardError

CHECK_THREADS = 4  # digests do not hold the GIL, and disks are faster with several reads

ShardProgress = Callable[[int, int], None]
IsPurged = Callable[[str], bool]


def row_from_sidecar(
    layout: CacheLayout, sidecar: Sidecar, *, seq: int, drawn_at: float
) -> ShardTableRow:
    number = sidecar.number
    return ShardTableRow(
        number=number,
        seq=seq,
        state=ShardState.LIVE,
        group=sidecar.group,
        edition=sidecar.edition,
        round=sidecar.round,
        samples=sidecar.samples,
        parts=sidecar.parts,
        holes=len(sidecar.holes),
        shard_bytes=sidecar.shard_bytes,
        allocated=sum(map(allocated_tree, shard_paths(layout, number))),
        record_bytes=sidecar.record_bytes,
        digest=sidecar.digest,
        drawn_at=drawn_at,
        uses=0,
    )


@dataclass(frozen=True, slots=True)
class ShardsOnDisk:
    """The shards on disk. ``whole`` has those that match their sidecars, by number."""

    whole: Mapping[int, ShardTableRow] = field(default_factory=dict)
    damaged: frozenset[int] = frozenset()
    editions: tuple[Edition, ...] = ()  # the longest table in a sidecar
    deferral_notes: tuple[ShardDeferrals, ...] = ()

    def deferrals(self, issued: int) -> Deferrals:
        last = max((row.group for row in self.whole.values()), default=-1)
        return from_shards(self.deferral_notes, last, issued)


def numbers_on_disk(layout: CacheLayout) -> list[int]:
    if not layout.shards.is_dir():
        return []
    with open_folder(layout.shards) as shards:
        names = own_and_foreign_names(shards, is_shard_name)[0]
    return sorted({n for name in names if (n := shard_number_in(name)) is not None})


def read_shards(layout: CacheLayout, identity: Identity) -> ShardsOnDisk:
    examined = examine_shards(layout, identity, numbers_on_disk(layout))
    return shards_to_keep(layout, identity, examined)


@dataclass(frozen=True, slots=True)
class ExaminedShard:
    sidecar: Sidecar | None
    problems: Sequence[str]


def examine_shards(
    layout: CacheLayout,
    identity: Identity | None,
    numbers: Sequence[int],
    progress: ShardProgress | None = None,
    purged: IsPurged | None = None,
) -> dict[int, ExaminedShard]:
    found = {}
    with ThreadPoolExecutor(CHECK_THREADS) as pool:
        each = pool.map(lambda number: _examine(layout, identity, number, purged), numbers)
        for done, (number, examined) in enumerate(zip(numbers, each, strict=True), 1):
            found[number] = examined
            if progress is not None:
                progress(done, len(numbers))
    return found


def _examine(
    layout: CacheLayout, identity: Identity | None, number: int, purged: IsPurged | None
) -> ExaminedShard:
    path = layout.sidecar(number)
    try:
        sidecar = Sidecar.from_bytes(path.read_bytes(), str(path))
    except FileNotFoundError:
        return ExaminedShard(None, [f"{path}: the sidecar of the shard is missing"])
    except CorruptShardError as error:
        return ExaminedShard(None, [str(error)])
    problems = [*_foreign_shard(sidecar, number, identity)]
    if sidecar.samples:
        problems += _damaged_records(layout, number, sidecar)
    else:
        files = [p for p in shard_paths(layout, number) if p != path and p.exists()]
        problems += [f"{file}: an empty shard has files" for file in files]
    if purged is not None and names_purged(sidecar, purged):
        root = shlex.quote(str(layout.root))
        problems.append(
            f"it holds samples of purged objects; finish the purge: growcache purge {root}"
        )
    return ExaminedShard(_without_origins(sidecar), problems)


def _without_origins(sidecar: Sidecar) -> Sidecar:
    """Drop the thousands of origins, because the sidecars of all shards stay in memory."""
    return replace(sidecar, origins=type(sidecar.origins)())


def _foreign_shard(sidecar: Sidecar, number: int, identity: Identity | None) -> Iterator[str]:
    if sidecar.number != number:
        yield f"number: the index says {number}, its sidecar says {sidecar.number}"
    if len(sidecar.origins) != sidecar.samples:
        yield f"{sidecar.samples} samples, but {len(sidecar.origins)} origins"
    if identity is None:
        return
    if sidecar.fingerprint != identity.fingerprint:
        yield f"fingerprint {sidecar.fingerprint}, in a cache with {identity.fingerprint}"
    if sidecar.cache_format != identity.cache_format:
        yield f"files of {sidecar.cache_format}, in a cache of {identity.cache_format}"
    if sidecar.schema != identity.schema:
        yield f"samples of {sidecar.schema}, in a cache of {identity.schema}"


def _damaged_records(layout: CacheLayout, number: int, sidecar: Sidecar) -> Iterator[str]:
    shard_format = CACHE_FORMATS.get(sidecar.cache_format)
    if shard_format is None:
        yield f"there is no cache format {sidecar.cache_format!r}"
        return
    path = shard_path(layout, number, sidecar.cache_format)
    samples = sidecar.samples
    try:
        shard = open_shard(layout, number, samples, sidecar.schema, sidecar.cache_format)
    except CacheError as error:
        yield str(error)
        return
    try:
        found = shard.digest()
        bad = shard_format.bad_records(shard)
        yield from _damaged_files(layout, sidecar, shard)
    finally:
        shard.close()
    if found != sidecar.digest:
        yield f"{path}: expected digest {sidecar.digest}, found {found}"
    if bad:
        shown = ", ".join(map(str, bad[:10]))
        yield f"{path}: wrong CRC32C in {len(bad)} of {samples} records ({shown})"


def _damaged_files(layout: CacheLayout, sidecar: Sidecar, shard: MappedShard) -> Iterator[str]:
    expected = CACHE_FORMATS[sidecar.cache_format].suffixes(sidecar.schema)
    if tuple(file.suffix for file in sidecar.files) != expected:
        yield f"the sidecar does not describe the files {', '.join(expected)}"
        return
    for file, memory in zip(sidecar.files, shard.memories, strict=True):
        path = layout.shard(sidecar.number, file.suffix)
        if len(memory) != file.nbytes:
            yield f"{path}: expected {file.nbytes} bytes, found {len(memory)}"
        elif file.crc32c not in (None, google_crc32c.value(np.frombuffer(memory, np.uint8))):
            yield f"{path}: wrong CRC32C"


def shards_to_keep(
    layout: CacheLayout, identity: Identity | None, examined: Mapping[int, ExaminedShard]
) -> ShardsOnDisk:
    """Return the shards to keep. Those of another fingerprint are neither whole nor damaged."""
    whole: dict[int, ShardTableRow] = {}
    damaged: set[int] = set()
    table: list[Edition] = []
    deferral_notes: list[ShardDeferrals] = []
    for number, found in examined.items():
        sidecar = found.sidecar
        if sidecar is None or found.problems:
            fingerprints = {s.fingerprint for s in (sidecar, identity) if s is not None}
            if sidecar is None or len(fingerprints) == 1:
                damaged.add(number)
            continue
        try:
            drawn_at = layout.sidecar(number).stat().st_mtime
        except FileNotFoundError:  # a running service evicted it after it was read
            continue
        whole[number] = row_from_sidecar(layout, sidecar, seq=0, drawn_at=drawn_at)
        table = max(table, editions_in_sidecar(sidecar.editions), key=len)
        deferral_notes += [sidecar.deferral_notes] if sidecar.deferral_notes else []
    return ShardsOnDisk(whole, frozenset(damaged), tuple(table), tuple(deferral_notes))
