"""``growcache peek``: what the cached samples are, and where they came from."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import orjson

from growcache.cache.index import IndexView
from growcache.schema import Schema
from growcache.service.peek_view import print_one, print_some
from growcache.service.peeked import Peeked, index_of, one, some, summary


def peek_cache(root: Path, place: str | None, *, json: bool) -> None:
    """Print some samples of a cache, or the one at ``place`` ("shard:i").

    Raises:
        CacheMissingError: there is no cache, or no sample in it yet.
        ConfigError: ``place`` names no sample of the cache.
    """
    view, schema = index_of(root)
    found = [one(root, view, place)] if place else list(some(root, view))
    if json:
        _print_json(view, schema, found)
    elif place:
        print_one(found[0])
    else:
        print_some(view, schema, found)


def _print_json(view: IndexView, schema: Schema, found: list[Peeked]) -> None:
    value = {
        "schema": [
            {"name": f.name, "dtype": f.dtype if f.is_blob else f.item.name, "shape": f.shape}
            for f in schema.fields
        ],
        "shards": view.totals.shards,
        "samples": view.totals.samples,
        "examples": [
            {
                "shard": p.shard,
                "i": p.i,
                "origin": asdict(p.origin),
                "arrays": {name: summary(value) for name, value in p.sample.items()},
            }
            for p in found
        ],
    }
    sys.stdout.buffer.write(orjson.dumps(value) + b"\n")
    sys.stdout.buffer.flush()
