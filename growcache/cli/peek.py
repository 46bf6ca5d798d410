"""``growcache peek``. It takes no lease, so it skips shards that are evicted meanwhile."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from growcache.cache.files import CacheLayout, generation_in
from growcache.cache.index.reader import IndexView, read_index
from growcache.cache.stored_samples import (
    StoredSample,
    read_samples,
    read_stored_sample,
    spread_places,
)
from growcache.cli.terminal import print_json
from growcache.errors import CacheMissingError, ConfigError
from growcache.formats.image import image_kind
from growcache.humanize import generation_note, in_bytes, keep_end, plural
from growcache.loading.waiting import shown_generation
from growcache.schema import Field, Schema, Value
from growcache.usercode import printable

MAX_PEEKED = 8
PRINTED_VALUES = 64
PRINTED_CHARACTERS = 2000


def sample_at(root: Path, place: str) -> StoredSample:
    """Return the sample at ``place`` ("shard:i") of a generation."""
    return _sample_in_view(root, _read_filled_index(root), place)


def _read_filled_index(root: Path) -> IndexView:
    view = read_index(root)
    if view.schema is None or not view.totals.samples:
        raise CacheMissingError(
            f"the cache at {root} holds no sample yet; see its progress: growcache status "
            f"{root}",
            code="GC402",
        )
    return view


def _sample_in_view(root: Path, view: IndexView, place: str) -> StoredSample:
    match = re.fullmatch(r"(\d+):(\d+)", place)
    if not match:
        raise ConfigError(
            f"--sample expects SHARD:I, such as 12:0, found {place!r}", code="GC105"
        )
    shard, i = int(match[1]), int(match[2])
    row = next((row for row in view.shards if row.number == shard), None)
    if row is None:
        known = [row.number for row in view.shards]
        raise ConfigError(
            f"shard {shard} is not in the cache (any more); it holds {plural(len(known), 'shard')} "
            f"from {min(known)} to {max(known)}",
            code="GC105",
        )
    if i >= row.samples:
        raise ConfigError(
            f"shard {shard} has {plural(row.samples, 'sample')}, counted from 0", code="GC105"
        )
    return read_stored_sample(CacheLayout(root), shard, i)


def summarize_value(value: Value) -> dict[str, Any]:
    """Return dtype, shape and extremes of an array, and all values of a short one.

    NaN becomes null.

    Of a string, the start is returned.
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


def peek_cache(root: Path, place: str | None, *, json: bool) -> None:
    root = shown_generation(root)
    view = _read_filled_index(root)
    schema = view.schema
    assert schema is not None
    if place:
        found = [_sample_in_view(root, view, place)]
    else:
        rows = sorted(row for row in view.shards if row.samples)
        numbers, lengths = [row.number for row in rows], [row.samples for row in rows]
        places = spread_places(numbers, lengths, MAX_PEEKED)
        found = list(read_samples(CacheLayout(root), places, view.cache_format))
    if json:
        _print_json(view, schema, found)
    elif place:
        _print_sample(found[0])
    else:
        _print_samples(view, schema, found)


def _print_json(view: IndexView, schema: Schema, found: list[StoredSample]) -> None:
    value = {
        "schema": [
            {
                "name": f.name,
                "dtype": f.dtype if f.is_blob else f.item_dtype.name,
                "shape": f.shape,
            }
            for f in schema.fields
        ],
        "generation": (generation_in(view.root) if view.root else None) or 0,
        "shards": view.totals.shards,
        "samples": view.totals.samples,
        "examples": [
            {
                "shard": p.shard,
                "i": p.i,
                "origin": asdict(p.origin),
                "arrays": {name: summarize_value(value) for name, value in p.sample.items()},
            }
            for p in found
        ],
    }
    print_json(orjson.dumps(value))


SHORT_CHARACTERS = 24
MIN_ORIGIN_WIDTH = 24  # cells for the origins, below which a table is not worthwhile
BORDER_WIDTH = 3  # cells between two columns


def _print_samples(view: IndexView, schema: Schema, found: Sequence[StoredSample]) -> None:
    console = Console()
    shards = plural(view.totals.shards, "shard")
    each = "of different sizes" if schema.is_ragged else f"each of {in_bytes(schema.nbytes)}"
    folder = common_folder([peeked.origin.key for peeked in found])
    note = generation_note(view.root) if view.root else ""
    _print_unwrapped(
        console,
        f"{plural(view.totals.samples, 'sample')} in {shards}, {each}: {printable(str(schema))}{note}",
    )
    if folder:
        _print_unwrapped(console, f"from {printable(folder)}")
    table = _sample_table(schema, found, folder, console.width)
    if table is not None:
        console.print(table)
        return
    for peeked in found:
        _print_unwrapped(console, "\n" + _sample_lines(peeked, folder))


def common_folder(keys: Sequence[str]) -> str:
    """Return the deepest folder that contains all keys, with its slash, or "".

    >>> common_folder(["a/b/1.npy", "a/b/c/2.npy"]), common_folder(["a/1", "ab/1"])
    ('a/b/', '')
    """
    if len(set(keys)) < 2:
        return ""
    first, last = min(keys), max(keys)  # a common start of both is common to all keys
    pairs = zip(first, last, strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return first[: first.rfind("/", 0, shared) + 1]


def _sample_table(
    schema: Schema, found: Sequence[StoredSample], folder: str, width: int
) -> Table | None:
    """Return the samples as a table, or None if it would be too wide to read."""
    headings = ["sample", "from", *(_column_heading(schema[name]) for name in schema.names)]
    rows = [
        [
            _place_text(p),
            _origin_text(p, folder),
            *(_cell_text(schema[n], p.sample[n]) for n in schema.names),
        ]
        for p in found
    ]
    widths = [max(map(cell_len, column)) for column in zip(headings, *rows, strict=True)]
    origin = widths[1] + min(0, width - sum(widths) - BORDER_WIDTH * len(widths) - 1)
    if origin < min(widths[1], MIN_ORIGIN_WIDTH):
        return None
    table = Table(border_style="bright_black")
    for i, heading in enumerate(headings):
        table.add_column(Text(heading), no_wrap=True, justify="left" if i < 2 else "right")
    for place, where, *values in rows:
        table.add_row(*map(Text, (place, keep_end(where, origin), *values)))
    return table


def _sample_lines(peeked: StoredSample, folder: str) -> str:
    widest = max(map(len, peeked.sample))
    values = peeked.sample.items()
    fields = (f"  {printable(name):<{widest}}  {_value_text(value)}" for name, value in values)
    return "\n".join((f"{_place_text(peeked)}  {_origin_text(peeked, folder)}", *fields))


def _print_sample(peeked: StoredSample) -> None:
    console = Console()
    _print_unwrapped(console, f"sample {_place_text(peeked)}\nfrom   {_origin_text(peeked)}")
    if peeked.origin.etag:
        _print_unwrapped(console, f"etag   {printable(peeked.origin.etag)}")
    for name, value in peeked.sample.items():
        _print_unwrapped(console, "\n" + _field_text(printable(name), value, console.width))


def _field_text(name: str, value: Value, width: int) -> str:
    if isinstance(value, bytes):
        more = " …" if len(value) > PRINTED_VALUES else ""
        return f"{name}: {_value_text(value)}\n  {value[:PRINTED_VALUES]!r}{more}"
    if isinstance(value, str):
        more = " …" if len(value) > PRINTED_CHARACTERS else ""
        size = plural(len(value), "character")
        return f"{name}: {size}\n  {value[:PRINTED_CHARACTERS]!r}{more}"
    values = np.array2string(
        value, width - 1, precision=5, threshold=PRINTED_VALUES, edgeitems=3, prefix="  "
    )
    return f"{name}: {value.dtype.name}{_value_text(value) if value.ndim else ''}\n  {values}"


def _print_unwrapped(console: Console, text: str) -> None:
    # Soft wraps keep a line whole when it is selected with the mouse.
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _place_text(peeked: StoredSample) -> str:
    return f"{peeked.shard}:{peeked.i}"


def _origin_text(peeked: StoredSample, folder: str = "") -> str:
    origin = peeked.origin
    return printable(f"{origin.key.removeprefix(folder)} [{origin.start}:{origin.stop}]")


def _column_heading(field: Field) -> str:
    if field.is_blob or field.shape == ():
        return printable(field.name)
    return f"{printable(field.name)}: {'shape, ' if field.is_ragged else ''}min, mean, max"


def _cell_text(field: Field, value: Value) -> str:
    if not isinstance(value, np.ndarray):
        return _value_text(value)
    facts = summarize_value(value)
    figures = [_number_text(facts[k]) for k in ("min", "mean", "max") if k in facts]
    if field.shape == ():
        return figures[0] if figures else "-"
    shape = [str(list(value.shape))] if field.is_ragged else []
    return " ".join([*shape, *(figures or ["-"])])


def _value_text(value: Value) -> str:
    if isinstance(value, bytes):
        kind = image_kind(value)
        return f"{kind}, {in_bytes(len(value))}" if kind else in_bytes(len(value))
    if isinstance(value, str):
        text = printable(value)
        return text if len(text) <= SHORT_CHARACTERS else f"{text[:SHORT_CHARACTERS]}…"
    facts = summarize_value(value)
    if "min" not in facts:
        return str(list(value.shape)) if value.ndim else "-"
    least, mean, most = (_number_text(facts[key]) for key in ("min", "mean", "max"))
    if not value.ndim:
        return least
    return f"{list(value.shape)}, {least} to {most}, mean {mean}"


def _number_text(number: bool | int | float) -> str:
    """Return a float with three digits, or an integer with all of them.

    >>> _number_text(12345), _number_text(0.0123456), _number_text(True)
    ('12345', '0.0123', 'True')
    """
    return f"{number:.3g}" if isinstance(number, float) else str(number)
