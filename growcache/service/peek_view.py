"""Cached samples as a person reads them: a table where there is room for it, else a list."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from growcache.cache.index import IndexView
from growcache.remote.formats.image import image_kind
from growcache.schema import Field, Schema, Value
from growcache.service.peeked import PRINTED_CHARACTERS, PRINTED_VALUES, Peeked, summary
from growcache.service.words import in_bytes, plural
from growcache.usercode import printable

SHORT_CHARACTERS = 24
LEAST_ORIGIN = 24  # cells of where samples are from, for a table to be worth it
BORDERS = 3  # cells between two columns


def print_some(view: IndexView, schema: Schema, found: Sequence[Peeked]) -> None:
    """Print what a cache holds, and some of its samples."""
    console = Console()
    shards = plural(view.totals.shards, "shard")
    each = "of different sizes" if schema.is_ragged else f"each of {in_bytes(schema.nbytes)}"
    folder = common_folder([peeked.origin.key for peeked in found])
    _say(
        console,
        f"{plural(view.totals.samples, 'sample')} in {shards}, {each}: {printable(str(schema))}",
    )
    if folder:
        _say(console, f"from {printable(folder)}")
    table = _table(schema, found, folder, console.width)
    if table is not None:
        console.print(table)
        return
    for peeked in found:
        _say(console, "\n" + _listed(peeked, folder))


def common_folder(keys: Sequence[str]) -> str:
    """Return the folder that all keys are in, with its slash; empty where there is none.

    >>> common_folder(["a/b/1.npy", "a/b/c/2.npy"]), common_folder(["a/1", "ab/1"])
    ('a/b/', '')
    """
    if len(set(keys)) < 2:
        return ""
    first, last = min(keys), max(keys)  # what these two share, all between them share
    pairs = zip(first, last, strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return first[: first.rfind("/", 0, shared) + 1]


def _table(schema: Schema, found: Sequence[Peeked], folder: str, width: int) -> Table | None:
    """Return the samples as a table; None where that would be too wide to read."""
    headings = ["sample", "from", *(_heading(schema[name]) for name in schema.names)]
    rows = [
        [_place(p), _where(p, folder), *(_cell(schema[n], p.sample[n]) for n in schema.names)]
        for p in found
    ]
    widths = [max(map(cell_len, column)) for column in zip(headings, *rows, strict=True)]
    origin = widths[1] + min(0, width - sum(widths) - BORDERS * len(widths) - 1)
    if origin < min(widths[1], LEAST_ORIGIN):
        return None
    table = Table(border_style="bright_black")
    for i, heading in enumerate(headings):
        table.add_column(Text(heading), no_wrap=True, justify="left" if i < 2 else "right")
    for place, where, *values in rows:
        table.add_row(*map(Text, (place, _tail(where, origin), *values)))
    return table


def _listed(peeked: Peeked, folder: str) -> str:
    widest = max(map(len, peeked.sample))
    values = peeked.sample.items()
    fields = (f"  {printable(name):<{widest}}  {_words(value)}" for name, value in values)
    return "\n".join((f"{_place(peeked)}  {_where(peeked, folder)}", *fields))


def print_one(peeked: Peeked) -> None:
    """Print a sample with where it came from."""
    console = Console()
    _say(console, f"sample {_place(peeked)}\nfrom   {_where(peeked)}")
    if peeked.origin.etag:
        _say(console, f"etag   {printable(peeked.origin.etag)}")
    for name, value in peeked.sample.items():
        _say(console, "\n" + _described(printable(name), value, console.width))


def _described(name: str, value: Value, width: int) -> str:
    if isinstance(value, bytes):
        more = " …" if len(value) > PRINTED_VALUES else ""
        return f"{name}: {_words(value)}\n  {value[:PRINTED_VALUES]!r}{more}"
    if isinstance(value, str):
        more = " …" if len(value) > PRINTED_CHARACTERS else ""
        size = plural(len(value), "character")
        return f"{name}: {size}\n  {value[:PRINTED_CHARACTERS]!r}{more}"
    values = np.array2string(
        value, width - 1, precision=5, threshold=PRINTED_VALUES, edgeitems=3, prefix="  "
    )
    return f"{name}: {value.dtype.name}{_words(value) if value.ndim else ''}\n  {values}"


def _say(console: Console, text: str) -> None:
    # Soft wraps: what is selected with the mouse is one line, as it was written.
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _place(peeked: Peeked) -> str:
    return f"{peeked.shard}:{peeked.i}"


def _where(peeked: Peeked, folder: str = "") -> str:
    origin = peeked.origin
    return printable(f"{origin.key.removeprefix(folder)} [{origin.start}:{origin.stop}]")


def _heading(field: Field) -> str:
    if field.is_blob or field.shape == ():
        return printable(field.name)
    return f"{printable(field.name)}: {'shape, ' if field.is_ragged else ''}min, mean, max"


def _cell(field: Field, value: Value) -> str:
    """Return what a table tells of a value, below `_heading`."""
    if not isinstance(value, np.ndarray):
        return _words(value)
    facts = summary(value)
    figures = [_figure(facts[k]) for k in ("min", "mean", "max") if k in facts]
    if field.shape == ():
        return figures[0] if figures else "-"
    shape = [str(list(value.shape))] if field.is_ragged else []
    return " ".join([*shape, *(figures or ["-"])])


def _words(value: Value) -> str:
    """Return what a value is, where there is no heading."""
    if isinstance(value, bytes):
        kind = image_kind(value)
        return f"{kind}, {in_bytes(len(value))}" if kind else in_bytes(len(value))
    if isinstance(value, str):
        text = printable(value)
        return text if len(text) <= SHORT_CHARACTERS else f"{text[:SHORT_CHARACTERS]}…"
    facts = summary(value)
    if "min" not in facts:
        return str(list(value.shape)) if value.ndim else "-"
    least, mean, most = (_figure(facts[key]) for key in ("min", "mean", "max"))
    if not value.ndim:
        return least
    return f"{list(value.shape)}, {least} to {most}, mean {mean}"


def _figure(number: bool | int | float) -> str:
    """Return a number in three digits; one that counts something, in all of them.

    >>> _figure(12345), _figure(0.0123456), _figure(True)
    ('12345', '0.0123', 'True')
    """
    return f"{number:.3g}" if isinstance(number, float) else str(number)


def _tail(text: str, width: int) -> str:
    return text if len(text) <= width else f"…{text[len(text) - width + 1 :]}"
