"""``growcache check``: is every shard what the index and its own description say?

It takes no lease and no lock, so a running service is not held up. What it finds amiss is
believed only when the index, asked again, still calls the shard live.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import google_crc32c
import numpy as np

from growcache.cache.adoption import require_cache
from growcache.cache.aside import (
    deferrals_finding,
    editions_finding,
    identities,
    issued_finding,
    lease_findings,
    litter,
    marker_findings,
)
from growcache.cache.beside import editions_of
from growcache.cache.deferrals import Told
from growcache.cache.files import Layout, shard_parts
from growcache.cache.findings import Finding
from growcache.cache.formats import CACHE_FORMATS, open_shard, shard_path
from growcache.cache.formats.mapped import MappedShard
from growcache.cache.identity import Identity
from growcache.cache.index import (
    Contents,
    Edition,
    ShardState,
    StockRow,
    read_contents,
    read_index,
)
from growcache.cache.locks import is_held
from growcache.cache.rebuild import Seen, numbers_in, row_of
from growcache.cache.sidecar import Sidecar
from growcache.errors import CacheError, CacheMissingError, CorruptShardError

THREADS = 4  # digests do not hold the GIL, and a disk likes several reads at once

OnShard = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Survey:
    """What was found in a cache.

    Attributes:
        findings: what is amiss.
        contents: what the index says; empty where it is missing.
        identity: of the cache; None where nothing but a configuration can tell it.
        seen: the shards that lie there.
    """

    findings: list[Finding]
    contents: Contents
    identity: Identity | None
    seen: Seen


def check(root: str | os.PathLike[str], on_shard: OnShard | None = None) -> list[Finding]:
    """Return everything that is amiss, after reading every byte of every live shard.

    Args:
        root: the cache directory.
        on_shard: told (done, all) after each shard.

    Raises:
        CacheMissingError: there is no cache at the path.
    """
    layout = Layout(root)
    require_cache(layout)
    stopped = not is_held(layout.supervisor_lock)
    found = survey(layout, on_shard, stopped=stopped)
    return found.findings


def survey(layout: Layout, on_shard: OnShard | None, *, stopped: bool) -> Survey:
    """Read everything.

    Args:
        layout: of the cache.
        on_shard: told (done, all) after each shard.
        stopped: whether no service changes it meanwhile; then all shards are read that lie
            there, not only the live ones.
    """
    contents, findings = _contents(layout)
    identity, more = identities(layout, contents)
    findings += more
    rows = {row.number: row for row in contents.rows if row.state == ShardState.LIVE}
    others = numbers_in(layout) if stopped else ()
    examined = _examine_all(layout, identity, sorted({*rows, *others}), on_shard)
    problems = {n: _wrong(rows.get(n), found) for n, found in examined.items()}
    # Of one without a row only an index that misses rows makes more than litter.
    spoilt = {
        n: texts
        for n, texts in problems.items()
        if texts and (n in rows or not contents.counted)
    }
    findings += _about_shards(spoilt if stopped else _still_live(layout, rows, spoilt))
    findings += editions_finding(layout, contents)
    findings += deferrals_finding(layout, contents)
    findings += issued_finding(layout, contents)
    findings += lease_findings(layout)
    findings += marker_findings(layout)
    if stopped:
        known = {row.number for row in contents.rows if row.state != ShardState.DELETED}
        findings += litter(layout, known, whole=contents.coherent)
    if identity is None:
        findings = [replace(finding, mendable=False) for finding in findings]
    return Survey(findings, contents, identity, _seen(layout, identity, examined, problems))


def _contents(layout: Layout) -> tuple[Contents, list[Finding]]:
    if layout.index.exists():
        contents = read_contents(layout)
        errors = [Finding("error", None, text, mendable=True) for text in contents.problems]
        return contents, errors
    lying = len(numbers_in(layout))
    if not lying and not layout.identity.exists():
        raise CacheMissingError(
            f"no cache at {layout.root}; fill one with: growcache run CONFIG"
        )
    text = f"{layout.index} is missing; {lying} shards lie there"
    return Contents(), [Finding("error", None, text, mendable=True)]


@dataclass(frozen=True, slots=True)
class _Examined:
    """A shard as it lies there: its description, if that is whole, and what is wrong."""

    sidecar: Sidecar | None
    problems: Sequence[str]


def _examine_all(
    layout: Layout, identity: Identity | None, numbers: Sequence[int], told: OnShard | None
) -> dict[int, _Examined]:
    found = {}
    with ThreadPoolExecutor(THREADS) as pool:
        each = pool.map(lambda number: _examine(layout, identity, number), numbers)
        for done, (number, examined) in enumerate(zip(numbers, each, strict=True), 1):
            found[number] = examined
            if told is not None:
                told(done, len(numbers))
    return found


def _examine(layout: Layout, identity: Identity | None, number: int) -> _Examined:
    path = layout.sidecar(number)
    try:
        sidecar = Sidecar.from_bytes(path.read_bytes(), str(path))
    except FileNotFoundError:
        return _Examined(None, [f"{path}: the description of the shard is missing"])
    except CorruptShardError as error:
        return _Examined(None, [str(error)])
    problems = [*_misplaced(sidecar, number, identity)]
    if sidecar.samples:
        problems += _damage(layout, number, sidecar)
    else:
        files = [p for p in shard_parts(layout, number) if p != path and p.exists()]
        problems += [f"{file}: an empty shard has files" for file in files]
    return _Examined(_lean(sidecar), problems)


def _lean(sidecar: Sidecar) -> Sidecar:
    """Return the description without its thousands of origins: all shards' are kept."""
    return replace(sidecar, origins=type(sidecar.origins)())


def _misplaced(sidecar: Sidecar, number: int, identity: Identity | None) -> Iterator[str]:
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


def _wrong(row: StockRow | None, examined: _Examined) -> list[str]:
    """Return what is wrong with a shard, and where its row says otherwise."""
    told = [] if row is None or examined.sidecar is None else _differing(row, examined.sidecar)
    return [*examined.problems, *told]


def _differing(row: StockRow, sidecar: Sidecar) -> Iterator[str]:
    names = ("group", "edition", "round", "samples", "parts", "record_bytes", "shard_bytes")
    pairs = [(name, getattr(row, name), getattr(sidecar, name)) for name in (*names, "digest")]
    for name, noted, described in [*pairs, ("holes", row.holes, len(sidecar.holes))]:
        if noted != described:
            yield f"{name}: the index says {noted}, the shard's description {described}"


def _still_live(
    layout: Layout, rows: Mapping[int, StockRow], problems: Mapping[int, Sequence[str]]
) -> dict[int, Sequence[str]]:
    """Return the problems of shards that did not go while they were read."""
    if not problems:
        return {}
    now = {row.number: row.seq for row in read_index(layout.root).shards}
    return {n: texts for n, texts in problems.items() if now.get(n) == rows[n].seq}


def _about_shards(problems: Mapping[int, Sequence[str]]) -> Iterator[Finding]:
    for number, texts in problems.items():
        for text in texts:
            yield Finding("error", number, text, mendable=True)


def _damage(layout: Layout, number: int, sidecar: Sidecar) -> Iterator[str]:
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


def _damaged_files(layout: Layout, sidecar: Sidecar, shard: MappedShard) -> Iterator[str]:
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


def _seen(
    layout: Layout,
    identity: Identity | None,
    examined: Mapping[int, _Examined],
    problems: Mapping[int, Sequence[str]],
) -> Seen:
    """Return which shards can be kept; what is another configuration's is neither."""
    whole: dict[int, StockRow] = {}
    damaged: set[int] = set()
    table: list[Edition] = []
    told: list[Told] = []
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
        whole[number] = row_of(layout, sidecar, seq=0, drawn_at=drawn_at)
        table = max(table, editions_of(sidecar.editions), key=len)
        told += [sidecar.told] if sidecar.told else []
    return Seen(whole, frozenset(damaged), tuple(table), tuple(told))
