"""``growcache check``: is every shard what the index and its own description say?

It takes no lease and no lock, so a running service is not held up. What it finds amiss is
believed only when the index, asked again, still calls the shard live.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from growcache.cache.files import Layout, number_of
from growcache.cache.formats import CACHE_FORMATS
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
    elif layout.shard(row.number).exists():
        yield f"{layout.shard(row.number)}: an empty shard has a file"


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
    if sidecar.schema != view.identity.schema:
        yield f"samples of {sidecar.schema}, in a cache of {view.identity.schema}"


def _damage(layout: Layout, row: ShardRow, sidecar: Sidecar) -> Iterator[str]:
    path, shard_format = layout.shard(row.number), CACHE_FORMATS[sidecar.cache_format]
    try:
        shard = shard_format.open_shard(path, sidecar.schema, row.samples)
    except CacheError as error:
        yield str(error)
        return
    try:
        found = shard.digest()
        bad = shard_format.bad_records(shard)
    finally:
        shard.close()
    if found != row.digest:
        yield f"{path}: expected digest {row.digest}, found {found}"
    if bad:
        shown = ", ".join(map(str, bad[:10]))
        yield f"{path}: wrong CRC32C in {len(bad)} of {row.samples} records ({shown})"


def _litter(layout: Layout) -> Iterator[Finding]:
    """Yield files that no row speaks of; only while nobody may be about to commit them."""
    known = {row.number for row in read_index(layout.root).shards}
    for path in sorted(layout.shards.iterdir()):
        number = number_of(path)
        if number is None or number not in known:
            yield Finding("info", number, f"{path}: no live shard; the next start removes it")
    for path in sorted(layout.incoming.iterdir()):
        yield Finding("info", None, f"{path}: left by a sampler; the next start removes it")
