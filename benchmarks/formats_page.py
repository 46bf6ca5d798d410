"""Writes the figures of benchmarks/formats.py between the markers in docs/reference/formats.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.formats_cases import CASES

Figures: TypeAlias = dict[str, Any]
BEGIN, END = "<!-- formats: written by benchmarks/formats.py -->", "<!-- formats: end -->"
_COLUMNS = {
    "format": "data",
    "samples/s": "samples/s",
    "MB/s": "MB/s",
    "CPU ms": "CPU, ms per sample",
    "by hand/s": "by hand, samples/s",
    "its CPU ms": "its CPU, ms",
    "pool/s": "32 threads, samples/s",
    "pool's CPU ms": "their CPU, ms",
    "x by hand": "growcache : by hand",
    "x pool": ": 32 threads",
}
_FAR = {"amplification": "bytes fetched : needed", "first look MB": "of them a first look, MB"}
_STARTS = {
    "format": "data",
    "start s": "growcache: to the first shard, s",
    "whole run s": "the whole run, s",
    "whole run CPU ms": "its CPU, ms per sample",
    "its start s": "by hand: opening, s",
    "pool's start s": "32 threads: opening, s",
}


def write_page(page: Path, documents: Sequence[Mapping[str, Any]], part: str = "") -> None:
    """Write the figures of several runs between the markers of a page, or of a part of it."""
    before = page.read_text(encoding="utf-8")
    begin = BEGIN.replace("formats:", f"formats {part}:", 1) if part else BEGIN
    head, _, rest = before.partition(begin)
    _, _, tail = rest.partition(END)
    page.write_text(f"{head}{begin}\n{section(documents)}\n{END}{tail}", encoding="utf-8")


def section(documents: Sequence[Mapping[str, Any]]) -> str:
    """Return one table per latency, preceded by the names of the machines."""
    rows = [row for document in documents for row in document["rows"]]
    rows.sort(key=lambda row: list(CASES).index(row["format"]))
    parts = [_about(documents, rows)]
    for latency in sorted({row["ms"] for row in rows}, reverse=True):
        some = [row for row in rows if row["ms"] == latency]
        parts += [f"At {latency:g} ms per request:", _table(some, _COLUMNS | _FAR)]
    latency = max(row["ms"] for row in rows)
    far = [row for row in rows if row["ms"] == latency]
    heading = f"Before and after the middle, at {latency:g} ms per request:"
    parts += [heading, _table(far, _STARTS)]
    return "\n\n".join(parts)


def _about(documents: Sequence[Mapping[str, Any]], rows: Sequence[Figures]) -> str:
    machines = {
        f"{about['cores']} cores of an {about['cpu']} with {about['memory_gib']} GiB, Python "
        f"{about['python']}, Linux {about['kernel']}"
        for about in (document["machine"] for document in documents)
    }
    sizes = [row["MB"] for row in rows]
    counts = sorted({row.get("objects", 8) for row in rows})
    rounds = min(row["rounds"] for row in rows)
    kept = f"Medians of {rounds} rounds" if rounds > 1 else "One round"
    load = max(document["machine"].get("load_before", 0) for document in documents)
    loaded = f" The machine had other work (load {load:.0f})." if load > 2 else ""
    servers = {document["title"].split(" from ")[1].split(",")[0] for document in documents}
    return (
        f"{kept} on {' and '.join(sorted(machines))}, "
        f"which also ran the server ({' and '.join(sorted(servers))}). "
        f"{min(sizes):.0f} to {max(sizes):.0f} MB in "
        f"{' or '.join(map(str, counts))} objects.{loaded}"
    )


def _table(rows: Sequence[Figures], columns: Mapping[str, str]) -> str:
    names = [name for name in columns if any(name in row for row in rows)]
    lines = [
        "| " + " | ".join(columns[name] for name in names) + " |",
        "|" + " --- |" * len(names),
        *("| " + " | ".join(_cell(row.get(name)) for name in names) + " |" for row in rows),
    ]
    return "\n".join(lines)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)
