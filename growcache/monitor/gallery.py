"""Samples of a cache and their origins, as the page shows them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from growcache.cache.files import CacheLayout
from growcache.cache.index.inspection import IndexColumns
from growcache.cache.index.reader import known_identity
from growcache.cache.stored_samples import StoredSample, read_samples, spread_places
from growcache.errors import CorruptShardError
from growcache.monitor.sample_views import field_view, late_view
from growcache.usercode import printable

MOST_SAMPLES = 24
MOST_FIELDS = 12
SHOWN_SCHEMA_CHARACTERS = 2000
MOST_SECONDS = 2.0  # for all samples, because an image of a few bytes may have many pixels


def sample_view(stored: StoredSample, deadline: float) -> dict[str, Any]:
    """Return a sample for the page. Fields that would start after ``deadline`` are left out.

    The deadline is in monotonic seconds.
    """
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
            late_view(field)
            if time.monotonic() >= deadline
            else field_view(field, stored.sample[field.name])
            for field in fields[:MOST_FIELDS]
        ],
        "more_fields": max(0, len(fields) - MOST_FIELDS),
    }


def gallery_of(
    root: Path,
    columns: IndexColumns,
    *,
    count: int,
    turn: int,
    shard: int | None,
    most_seconds: float = MOST_SECONDS,
) -> dict[str, Any]:
    """Return samples of a generation, or of one of its shards. Each ``turn`` shows others.

    Raises the errors of `read_index`.
    """
    deadline = time.monotonic() + most_seconds
    layout = CacheLayout(root)
    identity = known_identity(layout)
    count = max(1, min(count, MOST_SAMPLES))
    live = columns.retired == 0
    numbers, lengths = columns.numbers[live], columns.samples[live]
    if shard is None:
        places = spread_places(numbers, lengths, count, turn)
    else:
        places = _places_of(shard, lengths[numbers == shard].tolist(), count, turn)
    cache_format = identity.cache_format if identity else ""
    samples: list[dict[str, Any]] = []
    damage, late = "", False
    for place in places:
        late = bool(samples) and time.monotonic() >= deadline
        if late:
            break
        try:
            found = read_samples(layout, [place], cache_format)
            samples += [sample_view(stored, deadline) for stored in found]
        except CorruptShardError as failure:
            damage = printable(str(failure))
    schema = printable(str(identity.schema)) if identity else ""
    return {
        "schema": schema[:SHOWN_SCHEMA_CHARACTERS],
        "samples": samples,
        "cached": int(lengths.sum()),
        "damage": damage,
        "late": late,
    }


def _places_of(
    shard: int, lengths: Iterable[int], count: int, turn: int
) -> list[tuple[int, int]]:
    """Return consecutive places of a shard, or none if it is evicted."""
    return [
        (shard, (turn * count + k) % length)
        for length in lengths
        for k in range(min(count, length))
    ]
