"""A lost index is made again from the shards, which describe themselves.

Uses and history are lost. Every number up to the highest that was issued counts as drawn,
also those of which nothing is left, so that nothing is drawn twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import orjson

from growcache.cache.files import (
    Layout,
    allocated_tree,
    number_of,
    shard_parts,
    write_atomic,
)
from growcache.cache.formats import CACHE_FORMATS, open_shard
from growcache.cache.identity import Identity
from growcache.cache.index import Edition, ShardState, StockRow
from growcache.cache.sidecar import Sidecar
from growcache.errors import CorruptShardError


def row_of(layout: Layout, sidecar: Sidecar, *, seq: int, drawn_at: float) -> StockRow:
    """Return the row of a shard that lies at its place."""
    number = sidecar.number
    return StockRow(
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
        allocated=sum(map(allocated_tree, shard_parts(layout, number))),
        record_bytes=sidecar.record_bytes,
        digest=sidecar.digest,
        drawn_at=drawn_at,
        uses=0,
    )


def adoptable(layout: Layout, identity: Identity | None) -> Iterator[tuple[StockRow, Sidecar]]:
    """Yield the whole, undamaged shards of this identity, in order of number."""
    if identity is None:
        return
    numbers = sorted(n for p in layout.shards.glob("*.json") if (n := number_of(p)) is not None)
    for seq, number in enumerate(numbers):
        try:
            sidecar = whole_shard(layout, number)
        except (CorruptShardError, OSError):
            continue
        if sidecar.fingerprint == identity.fingerprint:
            drawn_at = layout.sidecar(number).stat().st_mtime
            yield row_of(layout, sidecar, seq=seq, drawn_at=drawn_at), sidecar


def whole_shard(layout: Layout, number: int) -> Sidecar:
    """Return the description of a shard whose every byte is as described.

    Raises:
        CorruptShardError: file or description are damaged, or not of one another.
        OSError: the description cannot be read.
    """
    path = layout.sidecar(number)
    sidecar = Sidecar.from_bytes(path.read_bytes(), str(path))
    if sidecar.number != number:
        raise CorruptShardError(f"{path}: describes shard {sidecar.number}")
    if not sidecar.samples:
        return sidecar
    if sidecar.cache_format not in CACHE_FORMATS:
        raise CorruptShardError(f"{path}: there is no cache format {sidecar.cache_format!r}")
    shard = open_shard(layout, number, sidecar.samples, sidecar.schema, sidecar.cache_format)
    try:
        if shard.digest() != sidecar.digest:
            raise CorruptShardError(f"{path}: the shard's bytes were changed; remove it")
    finally:
        shard.close()
    return sidecar


def gaps(numbers: Sequence[int], stop: int) -> list[tuple[int, int]]:
    """Return the ranges [first, stop) below ``stop`` that ascending ``numbers`` leave out.

    >>> gaps([1, 2, 5], 8)
    [(0, 1), (3, 5), (6, 8)]
    """
    edges = [-1, *(n for n in numbers if n < stop), stop]
    pairs = itertools.pairwise(edges)
    return [(low + 1, high) for low, high in pairs if high > low + 1]


def write_editions(layout: Layout, editions: Iterable[Edition]) -> None:
    """Keep the editions beside the index too: without them its shards name nothing."""
    rows = [[e.edition, e.objects, e.digest, e.first_group] for e in editions]
    write_atomic(layout.editions, orjson.dumps(rows))


def read_editions(layout: Layout) -> list[Edition]:
    """Return the editions that were recorded; none where the file is missing or damaged."""
    try:
        return [Edition(*row) for row in orjson.loads(layout.editions.read_bytes())]
    except (FileNotFoundError, ValueError, TypeError):
        return []
