"""Samples of a cache and where they came from, as the page shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from growcache.cache.files import CacheLayout
from growcache.cache.index.inspection import ShardColumns, read_shard_columns
from growcache.cache.index.reader import known_identity
from growcache.cache.stored_samples import StoredSample, read_samples, spread_places
from growcache.errors import CorruptShardError
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
    layout = CacheLayout(shown_generation(cache))
    columns, identity = read_shard_columns(layout.root), known_identity(layout)
    count = max(1, min(count, MOST_SAMPLES))
    places = (
        _places_in(columns, count, turn)
        if shard is None
        else _places_of(columns, count, turn, shard)
    )
    samples, error = [], ""
    try:
        for stored in read_samples(layout, places, identity.cache_format if identity else ""):
            samples.append(sample_view(stored))
    except CorruptShardError as failure:
        error = printable(str(failure))
    schema = printable(str(identity.schema)) if identity else ""
    return {
        "schema": schema[:SHOWN_SCHEMA_CHARACTERS],
        "samples": samples,
        "cached": int(columns.samples[columns.retired == 0].sum()),
        "error": error,
    }


def _places_in(columns: ShardColumns, count: int, turn: int) -> list[tuple[int, int]]:
    live = columns.retired == 0
    shards = zip(columns.numbers[live].tolist(), columns.samples[live].tolist(), strict=True)
    return spread_places(list(shards), count, turn)


def _places_of(
    columns: ShardColumns, count: int, turn: int, shard: int
) -> list[tuple[int, int]]:
    """Return consecutive places of a shard; none where it is evicted."""
    found = columns.samples[(columns.numbers == shard) & (columns.retired == 0)].tolist()
    return [
        (shard, (turn * count + k) % samples)
        for samples in found
        for k in range(min(count, samples))
    ]
