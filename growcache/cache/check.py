"""``growcache check`` and ``--repair``: compare every file of a cache with what was written.

A check takes neither a lease nor a lock, so a running supervisor is not delayed. A problem with
a shard counts only if the index still lists the shard as live after the problem was found.

Each step of a repair may be interrupted and repeated. Small files come first, because an index
can be made from them. The index is second. Finally, damaged shards are set aside, and the next
start removes them. A shard that is drawn again has the same bytes. Readers keep their maps of
the old file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from growcache.cache.deferrals import newest
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
)
from growcache.cache.folders import (
    SET_ASIDE_PREFIX,
    foreign_paths,
    is_incoming_name,
    is_shard_name,
    open_folder,
    remove_entry,
)
from growcache.cache.index.contents import IndexContents, read_contents
from growcache.cache.index.reader import read_index
from growcache.cache.index.schema import ShardState, ShardTableRow
from growcache.cache.index.writer import IndexDatabase
from growcache.cache.lease_views import remove_torn_leases, survey_leases
from growcache.cache.locks import is_locked
from growcache.cache.purge_list import is_purged, read_purge_list
from growcache.cache.recovery import count_retried_holes, remade_contents, write_side_files
from growcache.cache.shard_survey import (
    ExaminedShard,
    IsPurged,
    ShardProgress,
    ShardsOnDisk,
    examine_shards,
    numbers_on_disk,
    shards_to_keep,
)
from growcache.cache.side_files import (
    Identity,
    deferrals_in_index,
    longest_editions,
    read_deferrals,
    read_editions,
    read_identity,
    read_issued,
    write_identity,
)
from growcache.cache.sidecar import Sidecar
from growcache.errors import CacheError, CacheMissingError

Severity: TypeAlias = Literal["error", "info", "mended"]


@dataclass(frozen=True, slots=True)
class Finding:
    severity: Severity  # "info": the next start fixes it; "mended": a repaired error
    shard: int | None  # if the problem concerns one shard
    message: str  # expected and found state
    mendable: bool = False  # by --repair


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
        return known, [_identity_finding(layout, "differs from the copy in the index", known)]
    return held, []


def _identity_finding(layout: CacheLayout, what: str, known: Identity | None) -> Finding:
    way = "" if known else (
        ", and so is the copy in the index; growcache run CONFIG takes over the shards that "
        "match CONFIG"
    )  # fmt: skip
    return Finding("error", None, f"{layout.identity} {what}{way}", mendable=known is not None)


def side_file_findings(layout: CacheLayout, contents: IndexContents) -> Iterator[Finding]:
    """Yield side files that are damaged or behind the index. Each may be one change ahead."""
    editions, known = read_editions(layout), contents.editions
    deferrals, noted = read_deferrals(layout), deferrals_in_index(contents.meta)
    issued, least = read_issued(layout), max((row.group for row in contents.rows), default=-1)
    found = [
        (layout.editions, editions),
        (layout.deferrals, deferrals),
        (layout.issued, issued),
    ]
    texts = [f"{path} is damaged" for path, value in found if value is None]
    if editions is not None and editions[: len(known)] != known:
        text = f"{layout.editions}: expected the {len(known)} editions of the index"
        texts.append(f"{text}, found {len(editions)} different ones")
    if deferrals is not None and deferrals != noted and deferrals.serial <= noted.serial:
        text = f"{layout.deferrals}: expected the {noted.size} deferred visits of the index"
        texts.append(f"{text}, found {deferrals.size} different ones")
    if issued is not None and issued < least:
        texts.append(f"{layout.issued}: expected group {least} or later, found {issued}")
    for text in texts:
        yield Finding("error", None, text, mendable=True)


def lease_findings(layout: CacheLayout) -> Iterator[Finding]:
    for lease in survey_leases(layout.root)[1]:
        if lease.protects:
            # Another user's lease may be valid, because it could not be read.
            severity: Severity = "error" if lease.opened else "info"
            yield Finding(severity, None, f"{lease.path}: {lease.reason}; {lease.advice}")
        else:  # a power cut causes it, because leases are not synced
            text = (
                f"{lease.path}: {lease.reason}; no reader holds it, so the next start removes "
                "it"
            )
            yield Finding("info", None, text)


def marker_findings(layout: CacheLayout) -> Iterator[Finding]:
    """Yield a damaged marker and foreign files. The next start writes a missing marker."""
    if layout.marker.exists() and read_marker(layout) is None:
        yield Finding("info", None, f"{layout.marker} is damaged; the next start rewrites it")
    for path in foreign_paths(layout):
        yield Finding(
            "info",
            None,
            f"{path}: not a file of growcache; it stays, and counts against the bound",
        )


def litter_findings(layout: CacheLayout, known: set[int], *, whole: bool) -> Iterator[Finding]:
    """Yield files without a row. With ``whole``, the index has every shard that may exist."""
    for path in sorted(layout.shards.iterdir() if whole and layout.shards.is_dir() else ()):
        number = shard_number(path)
        if is_shard_name(path.name) and number not in known:
            yield Finding(
                "info", number, f"{path}: not a live shard; the next start removes it"
            )
    for path in sorted(layout.incoming.iterdir() if layout.incoming.is_dir() else ()):
        if not is_incoming_name(path.name):
            continue
        who = (
            "set aside by a repair"
            if path.name.startswith(SET_ASIDE_PREFIX)
            else "left by a sampler"
        )
        yield Finding("info", None, f"{path}: {who}; the next start removes it")


@dataclass(frozen=True, slots=True)
class CacheSurvey:
    findings: list[Finding]
    contents: IndexContents
    identity: Identity | None
    seen: ShardsOnDisk


def check(root: str | os.PathLike[str], on_shard: ShardProgress | None = None) -> list[Finding]:
    """Read every byte of every live shard, and return all problems."""
    layout = CacheLayout(root)
    require_cache(layout)
    stopped = not is_locked(layout.supervisor_lock)
    found = survey_cache(layout, on_shard, stopped=stopped)
    return found.findings


def survey_cache(
    layout: CacheLayout, on_shard: ShardProgress | None, *, stopped: bool
) -> CacheSurvey:
    """Read the whole cache.

    With ``stopped``, read all shards on disk rather than only live ones.
    """
    contents, findings = _index_contents(layout)
    identity, more = survey_identity(layout, contents)
    findings += more
    rows = {row.number: row for row in contents.rows if row.state == ShardState.LIVE}
    others = numbers_on_disk(layout) if stopped else ()
    purged, more = _purged_keys(layout)
    findings += more
    examined = examine_shards(layout, identity, sorted({*rows, *others}), on_shard, purged)
    examined |= {n: _compared_with_row(row, examined[n]) for n, row in rows.items()}
    # A shard without a row is litter if the index has all rows.
    problems = {
        n: found.problems
        for n, found in examined.items()
        if found.problems and (n in rows or not contents.is_complete)
    }
    findings += _shard_findings(problems if stopped else _still_live(layout, rows, problems))
    findings += side_file_findings(layout, contents)
    findings += lease_findings(layout)
    findings += marker_findings(layout)
    if stopped:
        known = {row.number for row in contents.rows if row.state != ShardState.DELETED}
        findings += litter_findings(layout, known, whole=contents.is_complete)
    if identity is None:
        findings = [replace(finding, mendable=False) for finding in findings]
    return CacheSurvey(findings, contents, identity, shards_to_keep(layout, identity, examined))


def _purged_keys(layout: CacheLayout) -> tuple[IsPurged | None, list[Finding]]:
    try:
        purges = read_purge_list(layout)
        return (is_purged(layout, purges) if purges else None), []
    except CacheError as error:
        return None, [Finding("error", None, str(error))]


def _index_contents(layout: CacheLayout) -> tuple[IndexContents, list[Finding]]:
    if layout.index.exists():
        contents = read_contents(layout)
        errors = [Finding("error", None, text, mendable=True) for text in contents.problems]
        return contents, errors
    lying = len(numbers_on_disk(layout))
    if not lying and not layout.identity.exists():
        raise CacheMissingError(
            f"no cache at {layout.directory}; fill one with: growcache run CONFIG"
        )
    text = f"{layout.index} is missing, but {lying} shards are on disk"
    return IndexContents(), [Finding("error", None, text, mendable=True)]


def _compared_with_row(row: ShardTableRow, examined: ExaminedShard) -> ExaminedShard:
    if examined.sidecar is None:
        return examined
    differences = _row_differences(row, examined.sidecar)
    return replace(examined, problems=[*examined.problems, *differences])


def _row_differences(row: ShardTableRow, sidecar: Sidecar) -> Iterator[str]:
    names = ("group", "edition", "round", "samples", "parts", "record_bytes", "shard_bytes")
    pairs = [(name, getattr(row, name), getattr(sidecar, name)) for name in (*names, "digest")]
    for name, noted, described in [*pairs, ("holes", row.holes, len(sidecar.holes))]:
        if noted != described:
            yield f"{name}: the index says {noted}, its sidecar says {described}"


def _still_live(
    layout: CacheLayout,
    rows: Mapping[int, ShardTableRow],
    problems: Mapping[int, Sequence[str]],
) -> dict[int, Sequence[str]]:
    if not problems:
        return {}
    now = {row.number: (row.seq, row.digest) for row in read_index(layout.root).shards}
    return {
        n: texts for n, texts in problems.items() if now.get(n) == (rows[n].seq, rows[n].digest)
    }


def _shard_findings(problems: Mapping[int, Sequence[str]]) -> Iterator[Finding]:
    for number, texts in problems.items():
        for text in texts:
            yield Finding("error", number, text, mendable=True)


SAMPLERS_SECONDS = 10.0  # for samplers of a dead service to end


def repair(
    root: str | os.PathLike[str], on_shard: ShardProgress | None = None
) -> list[Finding]:
    """Repair a cache without a supervisor; return the problems and their outcome."""
    layout = CacheLayout(root)
    require_cache(layout)
    adopt(layout)
    if is_locked(layout.supervisor_lock):
        raise in_use_error(
            layout, "stop it before the repair; a check without --repair works while it runs"
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
    """Keep only the shards. The next supervisor claims them if its configuration matches."""
    for path in (*_index_files(layout), layout.identity):
        path.unlink(missing_ok=True)
    fsync_directory(layout.root)


def _index_files(layout: CacheLayout) -> Iterator[Path]:
    yield layout.index
    yield from layout.root.glob(f"{layout.index.name}-*")


def _repair_all(layout: CacheLayout, found: CacheSurvey, identity: Identity) -> None:
    contents, seen = found.contents, found.seen
    editions = longest_editions([contents.editions, read_editions(layout) or [], seen.editions])
    issued = read_issued(layout)
    write_identity(layout.root, identity)
    if contents.is_complete:
        write_side_files(layout, editions, issued, contents)
        _forget_damaged(layout, contents, identity, seen.damaged)
    else:
        last = -1 if issued is None else issued
        deferrals = newest([read_deferrals(layout)]) or seen.deferrals(last)
        remade = remade_contents(seen, identity, editions, deferrals, last)
        write_side_files(layout, editions, issued, remade)
        _write_index(layout, remade)
    _set_damaged_aside(layout, seen.damaged)


def _forget_damaged(
    layout: CacheLayout, contents: IndexContents, identity: Identity, damaged: frozenset[int]
) -> None:
    rows = [row for row in contents.rows if row.number in damaged]
    if not rows:
        return
    deferrals = deferrals_in_index(contents.meta)
    retried = count_retried_holes(rows, deferrals, identity)
    with closing(IndexDatabase.open(layout)) as index, index.transaction():
        index.forget_shards(rows, retried)


def _write_index(layout: CacheLayout, contents: IndexContents) -> None:
    # Frees space for the index; the next start restores it.
    layout.ballast.unlink(missing_ok=True)
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
