"""``growcache peek``: what the cached samples are, and where they came from.

It takes no lease: a shard that is evicted meanwhile is passed over, and one that is open
already stays readable to its end.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from growcache.cache.files import Layout
from growcache.cache.formats import open_shard, shard_path
from growcache.cache.index import IndexView, ShardRow, read_index
from growcache.cache.sidecar import Sidecar
from growcache.errors import CacheMissingError, ConfigError, CorruptShardError
from growcache.schema import Field, Origin, Sample, Schema, Value
from growcache.service.words import in_bytes, plural

EXAMPLES = 8
PRINTED_VALUES = 64
PRINTED_CHARACTERS = 2000
SHORT_CHARACTERS = 24


@dataclass(frozen=True, slots=True)
class Peeked:
    """One sample, with its place in the cache and what its shard says of itself."""

    shard: int
    i: int
    sidecar: Sidecar
    sample: Sample

    @property
    def origin(self) -> Origin:
        """Where it came from."""
        return self.sidecar.origin(self.i)


def peek_cache(root: Path, place: str | None, *, json: bool) -> None:
    """Print some samples of a cache, or the one at ``place`` ("shard:i").

    Raises:
        CacheMissingError: there is no cache, or no sample in it yet.
        ConfigError: ``place`` names no sample of the cache.
    """
    view, schema = _index_of(root)
    found = [_one(root, view, place)] if place else list(_some(root, view))
    if json:
        _print_json(view, schema, found)
    elif place:
        _print_one(found[0])
    else:
        _print_some(view, schema, found)


def sample_at(root: Path, place: str) -> Peeked:
    """Return the sample at ``place`` ("shard:i").

    Raises:
        CacheMissingError: there is no cache, or no sample in it yet.
        ConfigError: ``place`` names no sample of the cache.
    """
    view, _ = _index_of(root)
    return _one(root, view, place)


def _index_of(root: Path) -> tuple[IndexView, Schema]:
    view = read_index(root)
    if view.schema is None or not view.totals.samples:
        raise CacheMissingError(
            f"the cache at {root} holds no sample yet; see how it goes: growcache status {root}"
        )
    return view, view.schema


def _one(root: Path, view: IndexView, place: str) -> Peeked:
    match = re.fullmatch(r"(\d+):(\d+)", place)
    if not match:
        raise ConfigError(f"--sample expects SHARD:I, such as 12:0, found {place!r}")
    shard, i = int(match[1]), int(match[2])
    row = next((row for row in view.shards if row.number == shard), None)
    if row is None:
        known = [row.number for row in view.shards]
        raise ConfigError(
            f"shard {shard} is not in the cache (any more); it holds {plural(len(known), 'shard')} "
            f"from {min(known)} to {max(known)}"
        )
    if i >= row.samples:
        raise ConfigError(f"shard {shard} has {plural(row.samples, 'sample')}, counted from 0")
    return _read(root, row, i)


def _some(root: Path, view: IndexView) -> Iterator[Peeked]:
    """The first samples of shards that are evenly spread over the cache, oldest first."""
    rows = [row for row in view.shards if row.samples]
    for k in range(min(EXAMPLES, len(rows))):
        row = rows[k * len(rows) // min(EXAMPLES, len(rows))]
        try:
            yield _read(root, row, 0)
        except (FileNotFoundError, CorruptShardError):
            if shard_path(Layout(root), row.number, view.cache_format).exists():
                raise
            # evicted since the index was read


def _read(root: Path, row: ShardRow, i: int) -> Peeked:
    layout = Layout(root)
    path = layout.sidecar(row.number)
    sidecar = Sidecar.from_bytes(path.read_bytes(), str(path))
    mapped = open_shard(
        layout, row.number, sidecar.samples, sidecar.schema, sidecar.cache_format
    )
    try:
        return Peeked(row.number, i, sidecar, mapped[i])
    finally:
        mapped.close()


def summary(value: Value) -> dict[str, Any]:
    """Return dtype, shape, extremes and, if it is short, all of it; NaN becomes null.

    Of bytes and strings: how long they are (in bytes, in characters), and strings' beginning.
    """
    if isinstance(value, bytes):
        return {"dtype": "bytes", "length": len(value)}
    if isinstance(value, str):
        return {"dtype": "str", "length": len(value), "value": value[:PRINTED_CHARACTERS]}
    facts: dict[str, Any] = {"dtype": value.dtype.name, "shape": list(value.shape)}
    if value.size and value.dtype.kind in "biuf":
        facts |= {"min": value.min(), "mean": value.mean(dtype=np.float64), "max": value.max()}
        facts = {k: v.item() if isinstance(v, np.generic) else v for k, v in facts.items()}
    if value.size <= PRINTED_VALUES and value.dtype.kind in "biuf":
        facts["values"] = value.tolist()
    return facts


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


def _print_some(view: IndexView, schema: Schema, found: list[Peeked]) -> None:
    console = Console()
    table = Table(border_style="bright_black")
    table.add_column("sample", no_wrap=True)
    table.add_column("from", ratio=1, overflow="fold")
    for name in schema.names:
        table.add_column(_heading(schema[name]), justify="right")
    for peeked in found:
        values = (Text(_extremes(peeked.sample[name])) for name in schema.names)
        table.add_row(f"{peeked.shard}:{peeked.i}", Text(_where(peeked.origin)), *values)
    shards = plural(view.totals.shards, "shard")
    each = "of different sizes" if schema.is_ragged else f"each of {in_bytes(schema.nbytes)}"
    console.print(
        f"{plural(view.totals.samples, 'sample')} in {shards}, {each}: {schema}",
        markup=False,
        highlight=False,
    )
    console.print(table)


def _print_one(peeked: Peeked) -> None:
    console = Console()
    origin = peeked.origin
    lines = [f"sample {peeked.shard}:{peeked.i}", f"from   {_where(origin)}"]
    if origin.etag:
        lines.append(f"etag   {origin.etag}")
    for name, value in peeked.sample.items():
        lines += ["", *_described(name, value)]
    console.print("\n".join(lines), markup=False, highlight=False)


def _described(name: str, value: Value) -> list[str]:
    if isinstance(value, bytes):
        return [f"{name}: {len(value)} bytes", f"  {value[:PRINTED_VALUES]!r}"]
    if isinstance(value, str):
        return [f"{name}: {len(value)} characters", f"  {value[:PRINTED_CHARACTERS]!r}"]
    values = np.array2string(value, threshold=PRINTED_VALUES, edgeitems=3, prefix="  ")
    extremes = f", min, mean, max {_extremes(value)}" if value.size > 1 else ""
    return [f"{name}: {value.dtype.name}{list(value.shape)}{extremes}", f"  {values}"]


def _heading(field: Field) -> str:
    single = field.is_blob or field.shape == ()
    return field.name if single else f"{field.name}: min, mean, max"


def _where(origin: Origin) -> str:
    return f"{origin.key} [{origin.start}:{origin.stop}]"


def _extremes(value: Value) -> str:
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, str):
        return value if len(value) <= SHORT_CHARACTERS else f"{value[:SHORT_CHARACTERS]}…"
    facts = summary(value)
    if "min" not in facts:
        return "-"
    if value.size == 1:
        return f"{facts['min']:.4g}"
    return " ".join(f"{facts[k]:.4g}" for k in ("min", "mean", "max"))
