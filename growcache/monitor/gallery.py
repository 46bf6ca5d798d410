"""Samples of a cache and where they came from, as the page shows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from growcache.cache.files import CacheLayout
from growcache.cache.index.reader import IndexView, read_index
from growcache.cache.stored_samples import (
    StoredSample,
    read_stored_sample,
    samples_spread_over,
)
from growcache.errors import CorruptShardError, PurgedSampleError
from growcache.loading.waiting import shown_generation
from growcache.monitor.sample_views import field_view
from growcache.usercode import printable

MOST_SAMPLES = 24
MOST_FIELDS = 12
SHOWN_SCHEMA_CHARACTERS = 2000


def sample_view(stored: StoredSample) -> dict[str, Any]:
    origin, schema = stored.origin, stored.sidecar.schema
    fields = list(schema.fields)
    return {
        "shard": stored.shard,
        "i": stored.i,
        "key": printable(origin.key),
        "etag": None if origin.etag is None else printable(origin.etag),
        "start": origin.start,
        "stop": origin.stop,
        "fields": [
            field_view(field, stored.sample[field.name]) for field in fields[:MOST_FIELDS]
        ],
        "more_fields": max(0, len(fields) - MOST_FIELDS),
    }


def gallery_of(cache: Path, count: int, turn: int, shard: int | None) -> dict[str, Any]:
    """Return samples of the whole cache, or of one shard; each ``turn`` shows others. Raises as `read_index`."""
    root = shown_generation(cache)
    layout, view = CacheLayout(root), read_index(root)
    count = max(1, min(count, MOST_SAMPLES))
    try:
        found = (
            _of_cache(layout, view, count, turn)
            if shard is None
            else _of_shard(layout, view, count, turn, shard)
        )
        samples, error = [sample_view(stored) for stored in found], ""
    except (CorruptShardError, PurgedSampleError) as failure:
        samples, error = [], printable(str(failure))
    schema = printable(str(view.schema)) if view.schema else ""
    return {
        "schema": schema[:SHOWN_SCHEMA_CHARACTERS],
        "samples": samples,
        "cached": view.totals.samples,
        "error": error,
    }


def _of_cache(
    layout: CacheLayout, view: IndexView, count: int, turn: int
) -> Iterable[StoredSample]:
    return samples_spread_over(layout, view, count, turn)


def _of_shard(
    layout: CacheLayout, view: IndexView, count: int, turn: int, shard: int
) -> Iterator[StoredSample]:
    row = next((row for row in view.shards if row.number == shard), None)
    if row is None:
        return
    for k in range(min(count, row.samples)):
        try:
            yield read_stored_sample(layout, row, (turn * count + k) % row.samples)
        except FileNotFoundError:  # evicted since the index was read
            return
