"""The tables of docs/deploy/ray.md that the benchmark `ray_engine` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import machine

Rows = Sequence[Mapping[str, Any]]

# Headings and names of figures, by table.
THROUGHPUT = (
    {
        "samples": "case",
        "samplers": "engine",
        "MB/s": "MB/s",
        "× local": "ratio",
        "first shard, s": "first shard, s",
        "CPU, s": "CPU s until then",
        "then CPU s per GB": "CPU s per GB",
        "× local ": "CPU ratio",
    },
    {
        "samples": "case",
        "samplers": "engine",
        "fetch, ms": "fetch ms",
        "transform": "transform ms",
        "encode": "encode ms",
        "wait for room": "reserve ms",
        "write": "write ms",
        "CPU s: samplers": "workers CPU s",
        "supervisor": "supervisor CPU s",
        "writer": "writer CPU s",
        "Ray": "Ray CPU s",
    },
)
RAY_DATA = (
    {
        "loop over": "way",
        "first batch, s": "first batch, s",
        "all, s": "all, s",
        "samples/s": "samples/s",
        "different samples": "different",
        "bytes read ÷ dataset": "read ÷ dataset",
        "CPU, s": "CPU s",
        "object stores ÷ dataset": "stored ÷ dataset",
        "spilled, MB": "spilled MB",
    },
)
TABLES = {"throughput": THROUGHPUT, "ray-data": RAY_DATA}


def write_part(page: Path, part: str, rows: Rows, rounds: int) -> None:
    """Put a part's tables between its markers of a page."""
    begin = f"<!-- ray {part}: written by benchmarks/ray_engine.py -->"
    end = f"<!-- ray {part}: end -->"
    text = page.read_text(encoding="utf-8")
    if begin not in text or end not in text:
        raise SystemExit(
            f"{page} has no {begin} … {end}; put the two lines where the tables go"
        )
    head, _, rest = text.partition(begin)
    tail = rest.partition(end)[2]
    section = "\n\n".join([*_tables(part, rows), _machine_words(rounds)])
    page.write_text(f"{head}{begin}\n{section}\n{end}{tail}", encoding="utf-8")


def _tables(part: str, rows: Rows) -> list[str]:
    if part not in TABLES:
        (counts,) = rows
        return [_table(["counted", "number"], [[name, counts[name]] for name in counts])]
    return [
        _table(list(columns), [[row[name] for name in columns.values()] for row in rows])
        for columns in TABLES[part]
    ]


def _table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table of Markdown.

    >>> print(_table(["way", "s"], [["a", 12.345]]))
    | way | s |
    | --- | --: |
    | a | 12.3 |
    """
    lines = [headings, ["---", *["--:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value).strip()


def _machine_words(rounds: int) -> str:
    about = machine()
    words = f"On {about['cores']} cores ({about['cpu']}) for everything, the server too"
    return f"{words}; load {about['load_before']} at the end; rounds: {rounds}."
