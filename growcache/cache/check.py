"""``growcache check`` and ``--repair``: is every file of a cache what was written?

A check takes no lease and no lock, so a running supervisor is not held up. A problem of a shard is
believed only when the index, asked again, still calls the shard live.

Each step of a repair may be cut short and be done again. Small files come first, because they are
enough to make an index; then the index, in one transaction; last, damaged shards leave their place.
They are set aside where the next start sweeps them, because a shard that is drawn again is the same
byte for byte. Readers that have them mapped keep their maps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

import google_crc32c
import numpy as np

from growcache.cache.deferrals import ShardDeferrals, newest
from growcache.cache.directory import (
    adopt,
    finish_clear,
    in_use_error,
    require_cache,
    take_over,
)
from growcache.cache.files import (
    CacheLayout,
    fsync_directory,
    read_marker,
    shard_names,
    shard_number,
    shard_paths,
)
from growcache.cache.folders import (
    SET_ASIDE_PREFIX,
    foreign_paths,
    is_incoming_name,
    is_shard_name,
    open_folder,
    remove_entry,
)
from growcache.cache.formats import CACHE_FORMATS, open_shard, shard_path
from growcache.cache.formats.mapped import MappedShard
from growcache.cache.index.reader import IndexContents, read_contents, read_index
from growcache.cache.index.schema import ShardState, ShardTableRow
from growcache.cache.index.writer import IndexDatabase
from growcache.cache.lease_views import remove_torn_leases, survey_leases
from growcache.cache.locks import is_locked
from growcache.cache.recovery import (
    ShardsOnDisk,
    numbers_on_disk,
    remade_contents,
    row_from_sidecar,
    write_side_files,
)
from growcache.cache.side_files import (
    Edition,
    Identity,
    deferrals_in_index,
    editions_in_sidecar,
    longest_editions,
    read_deferrals,
    read_editions,
    read_identity,
    read_issued,
    write_identity,
)
from growcache.cache.sidecar import Sidecar
from growcache.errors import CacheError, CacheMissingError, CorruptShardError

Severity: TypeAlias = Literal["error", "info", "mended"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem of a cache.

    Attributes:
        severity: ``info``: the next start clears it up by itself. ``mended``: a repaired error.
        shard: its number, where the problem is of one shard.
        message: what was expected and what was found.
        mendable: whether ``--repair`` puts it right.
    """

    severity: Severity
    shard: int | None
    message: str
    mendable: bool = False


def survey_identity(
    layout: CacheLayout, contents: IndexContents
) -> tuple[Identity | None, list[Finding]]:
    copy = contents.meta.get("identity")
    known = Identity.from_values(copy) if copy else None
    try:
        held = read_identity(layout.root)
    except CacheError:
        return known, [_identity_finding(layout, "is damaged", known)]
    if held is None and (known or contents.rows or numbers_on_disk(layout)):
        return known, [_identity_finding(layout, "is missing", known)]
    if known is not None and held != known:
        return known, [_identity_finding(layout, "is not that of the index", known)]
    return held, []


def _identity_finding(layout: CacheLayout, what: str, known: Identity | None) -> Finding:
    way = "" if known else (
        ", and so is the copy in the index: growcache run CONFIG takes the shards over, where "
        "they are those of CONFIG"
    )  # fmt: skip
    return Finding("error", None, f"{layout.identity} {what}{way}", mendable=known is not None)


def editions_findings(layout: CacheLayout, contents: IndexContents) -> Iterator[Finding]:
    # It may have one more than the index, which is told of it afterwards.
    found, known = read_editions(layout), contents.editions
    if found is None:
        yield Finding("error", None, f"{layout.editions} is damaged", mendable=True)
    elif found[: len(known)] != known:
        text = f"{layout.editions}: expected {len(known)} editions as in the index"
        yield Finding("error", None, f"{text}, found {len(found)} others", mendable=True)


def deferrals_findings(layout: CacheLayout, contents: IndexContents) -> Iterator[Finding]:
    # The file may be one change ahead of the index, which is told of it afterwards.
    found, known = read_deferrals(layout), deferrals_in_index(contents.meta)
    if found is None:
        yield Finding("error", None, f"{layout.deferrals} is damaged", mendable=True)
    elif found.serial < known.serial or (found.serial == known.serial and found != known):
        text = f"{layout.deferrals}: expected {known.size} visits set aside, as in the index"
        yield Finding("error", None, f"{text}, found {found.size} others", mendable=True)


def issued_findings(layout: CacheLayout, contents: IndexContents) -> Iterator[Finding]:
    found = read_issued(layout)
    least = max((row.group for row in contents.rows), default=-1)
    if found is None:
        yield Finding("error", None, f"{layout.issued} is damaged", mendable=True)
    elif found < least:
        text = f"{layout.issued}: expected group {least} or more, found {found}"
        yield Finding("error", None, text, mendable=True)


def lease_findings(layout: CacheLayout) -> Iterator[Finding]:
    for lease in survey_leases(layout.root)[1]:
        if lease.protects:
            # Another user's may well be sound: who may not look into it has found nothing.
            severity: Severity = "error" if lease.opened else "info"
            yield Finding(severity, None, f"{lease.path}: {lease.reason}; {lease.advice}")
        else:  # a power cut leaves such, for leases are not synced
            text = (
                f"{lease.path}: {lease.reason}; no reader holds it, the next start removes it"
            )
            yield Finding("info", None, text)


def marker_findings(layout: CacheLayout) -> Iterator[Finding]:
    """Yield a damaged marker and foreign files. A missing marker is written by the next start."""
    if layout.marker.exists() and read_marker(layout) is None:
        yield Finding("info", None, f"{layout.marker} is damaged; the next start writes it")
    for path in foreign_paths(layout):
        yield Finding(
            "info", None, f"{path}: not growcache's; it stays, and counts in the bound"
        )


def litter_findings(layout: CacheLayout, known: set[int], *, whole: bool) -> Iterator[Finding]:
    """Yield files without a row. With ``whole``, the index names every shard that may be there."""
    for path in sorted(layout.shards.iterdir() if whole and layout.shards.is_dir() else ()):
        number = shard_number(path)
        if is_shard_name(path.name) and number not in known:
            yield Finding("info", number, f"{path}: no live shard; the next start removes it")
    for path in sorted(layout.incoming.iterdir() if layout.incoming.is_dir() else ()):
        if not is_incoming_name(path.name):
            continue
        who = (
            "set aside by a repair"
            if path.name.startswith(SET_ASIDE_PREFIX)
            else "left by a sampler"
        )
        yield Finding("info", None, f"{path}: {who}; the next start removes it")


CHECK_THREADS = 4  # digests do not hold the GIL, and a disk likes several reads at once

ShardProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class CacheSurvey:
    findings: list[Finding]
    contents: IndexContents
    identity: Identity | None
    seen: ShardsOnDisk


def check(root: str | os.PathLike[str], on_shard: ShardProgress | None = None) -> list[Finding]:
    """Return every problem, after reading every byte of every live shard.

    ``on_shard`` is called with (done, all) after each shard.

    Raises:
        CacheMissingError: there is no cache at the path.
    """
    layout = CacheLayout(root)
    require_cache(layout)
    stopped = not is_locked(layout.supervisor_lock)
    found = survey_cache(layout, on_shard, stopped=stopped)
    return found.findings


def survey_cache(
    layout: CacheLayout, on_shard: ShardProgress | None, *, stopped: bool
) -> CacheSurvey:
    """Read the whole cache.

    ``stopped``: no supervisor changes it meanwhile, so all shards on disk are read, not only live ones.
    """
    contents, findings = _index_contents(layout)
    identity, more = survey_identity(layout, contents)
    findings += more
    rows = {row.number: row for row in contents.rows if row.state == ShardState.LIVE}
    others = numbers_on_disk(layout) if stopped else ()
    examined = _examine_all(layout, identity, sorted({*rows, *others}), on_shard)
    problems = {n: _problems_of(rows.get(n), found) for n, found in examined.items()}
    # Of one without a row only an index that misses rows makes more than litter.
    spoilt = {
        n: texts
        for n, texts in problems.items()
        if texts and (n in rows or not contents.counted)
    }
    findings += _shard_findings(spoilt if stopped else _still_live(layout, rows, spoilt))
    findings += editions_findings(layout, contents)
    findings += deferrals_findings(layout, contents)
    findings += issued_findings(layout, contents)
    findings += lease_findings(layout)
    findings += marker_findings(layout)
    if stopped:
        known = {row.number for row in contents.rows if row.state != ShardState.DELETED}
        findings += litter_findings(layout, known, whole=contents.coherent)
    if identity is None:
        findings = [replace(finding, mendable=False) for finding in findings]
    return CacheSurvey(
        findings, contents, identity, _shards_to_keep(layout, identity, examined, problems)
    )


def _index_contents(layout: CacheLayout) -> tuple[IndexContents, list[Finding]]:
    if layout.index.exists():
        contents = read_contents(layout)
        errors = [Finding("error", None, text, mendable=True) for text in contents.problems]
        return contents, errors
    lying = len(numbers_on_disk(layout))
    if not lying and not layout.identity.exists():
        raise CacheMissingError(
            f"no cache at {layout.root}; fill one with: growcache run CONFIG"
        )
    text = f"{layout.index} is missing; {lying} shards lie there"
    return IndexContents(), [Finding("error", None, text, mendable=True)]


@dataclass(frozen=True, slots=True)
class _ExaminedShard:
    sidecar: Sidecar | None
    problems: Sequence[str]


def _examine_all(
    layout: CacheLayout,
    identity: Identity | None,
    numbers: Sequence[int],
    told: ShardProgress | None,
) -> dict[int, _ExaminedShard]:
    found = {}
    with ThreadPoolExecutor(CHECK_THREADS) as pool:
        each = pool.map(lambda number: _examine(layout, identity, number), numbers)
        for done, (number, examined) in enumerate(zip(numbers, each, strict=True), 1):
            found[number] = examined
            if told is not None:
                told(done, len(numbers))
    return found


def _examine(layout: CacheLayout, identity: Identity | None, number: int) -> _ExaminedShard:
    path = layout.sidecar(number)
    try:
        sidecar = Sidecar.from_bytes(path.read_bytes(), str(path))
    except FileNotFoundError:
        return _ExaminedShard(None, [f"{path}: the description of the shard is missing"])
    except CorruptShardError as error:
        return _ExaminedShard(None, [str(error)])
    problems = [*_foreign_shard(sidecar, number, identity)]
    if sidecar.samples:
        problems += _damaged_records(layout, number, sidecar)
    else:
        files = [p for p in shard_paths(layout, number) if p != path and p.exists()]
        problems += [f"{file}: an empty shard has files" for file in files]
    return _ExaminedShard(_without_origins(sidecar), problems)


def _without_origins(sidecar: Sidecar) -> Sidecar:
    """Drop the thousands of origins, because the sidecars of all shards are kept in memory."""
    return replace(sidecar, origins=type(sidecar.origins)())


def _foreign_shard(sidecar: Sidecar, number: int, identity: Identity | None) -> Iterator[str]:
    if sidecar.number != number:
        yield f"number: the index says {number}, the shard's description {sidecar.number}"
    if len(sidecar.origins) != sidecar.samples:
        yield f"{sidecar.samples} samples, but origins of {len(sidecar.origins)}"
    if identity is None:
        return
    if sidecar.fingerprint != identity.fingerprint:
        yield f"fingerprint {sidecar.fingerprint}, of a cache of {identity.fingerprint}"
    if sidecar.cache_format != identity.cache_format:
        yield f"files of {sidecar.cache_format}, in a cache of {identity.cache_format}"
    if sidecar.schema != identity.schema:
        yield f"samples of {sidecar.schema}, in a cache of {identity.schema}"


def _problems_of(row: ShardTableRow | None, examined: _ExaminedShard) -> list[str]:
    told = (
        []
        if row is None or examined.sidecar is None
        else _row_differences(row, examined.sidecar)
    )
    return [*examined.problems, *told]


def _row_differences(row: ShardTableRow, sidecar: Sidecar) -> Iterator[str]:
    names = ("group", "edition", "round", "samples", "parts", "record_bytes", "shard_bytes")
    pairs = [(name, getattr(row, name), getattr(sidecar, name)) for name in (*names, "digest")]
    for name, noted, described in [*pairs, ("holes", row.holes, len(sidecar.holes))]:
        if noted != described:
            yield f"{name}: the index says {noted}, the shard's description {described}"


def _still_live(
    layout: CacheLayout,
    rows: Mapping[int, ShardTableRow],
    problems: Mapping[int, Sequence[str]],
) -> dict[int, Sequence[str]]:
    """Return the problems of shards that were not evicted while they were read."""
    if not problems:
        return {}
    now = {row.number: row.seq for row in read_index(layout.root).shards}
    return {n: texts for n, texts in problems.items() if now.get(n) == rows[n].seq}


def _shard_findings(problems: Mapping[int, Sequence[str]]) -> Iterator[Finding]:
    for number, texts in problems.items():
        for text in texts:
            yield Finding("error", number, text, mendable=True)


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
        yield f"the shard's description is not of the files {', '.join(expected)}"
        return
    for file, memory in zip(sidecar.files, shard.memories, strict=True):
        path = layout.shard(sidecar.number, file.suffix)
        if len(memory) != file.nbytes:
            yield f"{path}: expected {file.nbytes} bytes, found {len(memory)}"
        elif file.crc32c not in (None, google_crc32c.value(np.frombuffer(memory, np.uint8))):
            yield f"{path}: wrong CRC32C"


def _shards_to_keep(
    layout: CacheLayout,
    identity: Identity | None,
    examined: Mapping[int, _ExaminedShard],
    problems: Mapping[int, Sequence[str]],
) -> ShardsOnDisk:
    """Return the shards that can be kept; those of another fingerprint are neither whole nor damaged."""
    whole: dict[int, ShardTableRow] = {}
    damaged: set[int] = set()
    table: list[Edition] = []
    told: list[ShardDeferrals] = []
    for number, found in examined.items():
        sidecar = found.sidecar
        if sidecar is None or problems[number]:
            strange = sidecar is not None and identity is not None
            if not (strange and sidecar.fingerprint != identity.fingerprint):  # type: ignore[union-attr]
                damaged.add(number)
            continue
        try:
            drawn_at = layout.sidecar(number).stat().st_mtime
        except FileNotFoundError:  # a service that runs has evicted it since it was read
            continue
        whole[number] = row_from_sidecar(layout, sidecar, seq=0, drawn_at=drawn_at)
        table = max(table, editions_in_sidecar(sidecar.editions), key=len)
        told += [sidecar.told] if sidecar.told else []
    return ShardsOnDisk(whole, frozenset(damaged), tuple(table), tuple(told))


SAMPLERS_SECONDS = 10.0  # that those of a service that died need to end


def repair(
    root: str | os.PathLike[str], on_shard: ShardProgress | None = None
) -> list[Finding]:
    """Repair a cache that no supervisor uses; return the problems and what became of them.

    ``on_shard`` is called with (done, all) after each shard.

    Raises:
        CacheMissingError: there is no cache at the path.
        CacheBusyError: a supervisor uses it.
        CacheFullError: the disk has no room for an index.
    """
    layout = CacheLayout(root)
    require_cache(layout)
    adopt(layout)
    if is_locked(layout.supervisor_lock):
        raise in_use_error(
            layout, "stop it, then repair; a check without --repair needs no stop"
        )
    with take_over(layout, SAMPLERS_SECONDS):
        finish_clear(layout)
        found = survey_cache(layout, on_shard, stopped=True)
        if all(finding.severity == "info" for finding in found.findings):
            return found.findings
        remove_torn_leases(layout)
        if found.identity is None:
            _keep_shards_only(layout)
        else:
            _repair_all(layout, found, found.identity)
    return [_after_repair(finding) for finding in found.findings]


def _after_repair(finding: Finding) -> Finding:
    return replace(finding, severity="mended") if finding.mendable else finding


def _keep_shards_only(layout: CacheLayout) -> None:
    """Keep only the shards; the next supervisor claims them if they are of its configuration."""
    for path in (*_index_files(layout), layout.identity):
        path.unlink(missing_ok=True)
    fsync_directory(layout.root)


def _index_files(layout: CacheLayout) -> Iterator[Path]:
    yield layout.index
    yield from layout.root.glob(f"{layout.index.name}-*")


def _repair_all(layout: CacheLayout, found: CacheSurvey, identity: Identity) -> None:
    editions = longest_editions(
        [found.contents.editions, read_editions(layout) or [], found.seen.editions]
    )
    issued = read_issued(layout)
    last = -1 if issued is None else issued
    kept = [deferrals_in_index(found.contents.meta), read_deferrals(layout)]
    deferrals = newest(kept) or found.seen.deferrals(last)
    made = remade_contents(found.contents, found.seen, identity, editions, deferrals, last)
    write_identity(layout.root, identity)
    write_side_files(layout, editions, issued, made)
    _write_index(layout, made, anew=not found.contents.readable)
    _set_damaged_aside(layout, found.seen.damaged)


def _write_index(layout: CacheLayout, contents: IndexContents, *, anew: bool) -> None:
    layout.ballast.unlink(missing_ok=True)  # the room for it; the next start makes it again
    if anew:
        for path in _index_files(layout):
            path.unlink(missing_ok=True)
        fsync_directory(layout.root)
    with closing(IndexDatabase.open(layout)) as index, index.transaction():
        index.replace(contents)


def _set_damaged_aside(layout: CacheLayout, numbers: frozenset[int]) -> None:
    with open_folder(layout.shards) as shards, open_folder(layout.incoming) as incoming:
        for number in sorted(numbers):
            for name in shard_names(number):
                if (layout.shards / name).exists():
                    remove_entry(incoming, SET_ASIDE_PREFIX + name)
                    os.rename(
                        name, SET_ASIDE_PREFIX + name, src_dir_fd=shards, dst_dir_fd=incoming
                    )
        os.fsync(shards)
