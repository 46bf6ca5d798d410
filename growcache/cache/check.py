"""``growcache check``: is every shard what the index and its own description say?

It takes no lease and no lock, so a running service is not held up. What it finds amiss is
believed only when the index, asked again, still calls the shard live.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import google_crc32c
import numpy as np

from growcache.cache.files import Layout, number_of, shard_parts
from growcache.cache.formats import CACHE_FORMATS, open_shard, shard_path
from growcache.cache.formats.mapped import MappedShard
from growcache.cache.index import IndexView, ShardRow, index_problems, read_index
from growcache.cache.locks import is_held
from growcache.cache.sidecar import Sidecar
from growcache.errors import CacheError, CorruptShardError


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be.

    Attributes:
        severity: ``info`` for what the next start clears up by itself.
        shard: the number, where it is about one.
        message: what was expected and what was found.
    """

    severity: Literal["error", "info"]
    shard: int | None
    message: str


def check(
    root: str | os.PathLike[str], on_shard: Callable[[int, int], None] | None = None
) -> list[Finding]:
    """Return everything that is amiss, after reading every byte of every live shard.

    Args:
        root: the cache directory.
        on_shard: told (done, all) after each shard.

    Raises:
        CacheMissingError: there is no cache at the path.
        CacheError: the index cannot be read at all.
    """
    layout = Layout(root)
    findings = [Finding("error", None, problem) for problem in index_problems(root)]
    view = read_index(root)
    for done, row in enumerate(view.shards, 1):
        problems = list(_problems(layout, view, row))
        if problems and _still_live(root, row):
            findings += [Finding("error", row.number, problem) for problem in problems]
        if on_shard is not None:
            on_shard(done, len(view.shards))
    if not is_held(layout.supervisor_lock):
        findings += _litter(layout)
    return findings


def _still_live(root: str | os.PathLike[str], row: ShardRow) -> bool:
    return any(
        now.number == row.number and now.seq == row.seq for now in read_index(root).shards
    )


def _problems(layout: Layout, view: IndexView, row: ShardRow) -> Iterator[str]:
    path = layout.sidecar(row.number)
    try:
        sidecar = Sidecar.from_bytes(path.read_bytes(), str(path))
    except FileNotFoundError:
        yield f"{path}: the description of the shard is missing"
        return
    except CorruptShardError as error:
        yield str(error)
        return
    yield from _disagreements(view, row, sidecar)
    if row.samples:
        yield from _damage(layout, row, sidecar)
        return
    for path in shard_parts(layout, row.number):
        if path != layout.sidecar(row.number) and path.exists():
            yield f"{path}: an empty shard has files"


def _disagreements(view: IndexView, row: ShardRow, sidecar: Sidecar) -> Iterator[str]:
    for name in ("number", "group", "edition", "samples", "shard_bytes", "digest"):
        noted, described = getattr(row, name), getattr(sidecar, name)
        if noted != described:
            yield f"{name}: the index says {noted}, the shard's description {described}"
    if len(sidecar.origins) != sidecar.samples:
        yield f"{sidecar.samples} samples, but origins of {len(sidecar.origins)}"
    if view.identity is None:
        yield "the cache has samples but no identity.json"
        return
    if sidecar.fingerprint != view.identity.fingerprint:
        yield f"fingerprint {sidecar.fingerprint}, of a cache of {view.identity.fingerprint}"
    if sidecar.cache_format != view.cache_format:
        yield f"files of {sidecar.cache_format}, in a cache of {view.cache_format}"
    if sidecar.schema != view.identity.schema:
        yield f"samples of {sidecar.schema}, in a cache of {view.identity.schema}"


def _damage(layout: Layout, row: ShardRow, sidecar: Sidecar) -> Iterator[str]:
    shard_format = CACHE_FORMATS.get(sidecar.cache_format)
    if shard_format is None:
        yield f"there is no cache format {sidecar.cache_format!r}"
        return
    path = shard_path(layout, row.number, sidecar.cache_format)
    try:
        shard = open_shard(
            layout, row.number, row.samples, sidecar.schema, sidecar.cache_format
        )
    except CacheError as error:
        yield str(error)
        return
    try:
        found = shard.digest()
        bad = shard_format.bad_records(shard)
        yield from _damaged_files(layout, sidecar, shard)
    finally:
        shard.close()
    if found != row.digest:
        yield f"{path}: expected digest {row.digest}, found {found}"
    if bad:
        shown = ", ".join(map(str, bad[:10]))
        yield f"{path}: wrong CRC32C in {len(bad)} of {row.samples} records ({shown})"


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


def _litter(layout: Layout) -> Iterator[Finding]:
    """Yield files that no row speaks of; only while nobody may be about to commit them."""
    known = {row.number for row in read_index(layout.root).shards}
    for path in sorted(layout.shards.iterdir()):
        number = number_of(path)
        if number is None or number not in known:
            yield Finding("info", number, f"{path}: no live shard; the next start removes it")
    for path in sorted(layout.incoming.iterdir()):
        yield Finding("info", None, f"{path}: left by a sampler; the next start removes it")
