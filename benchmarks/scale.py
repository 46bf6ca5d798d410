"""Where the design ends: 1 to 1,000 nodes on one bucket, up to 10^12 samples; docs/deploy/scale.md is written by this.

Four tables. The cost of a node's own structures is measured here, on the real population, lanes and permutation. The
cost of resizes is counted: every node draws a whole pass, part by part. The load on the bucket is simulated
(`benchmarks/scale_model.py`) with the service's own decisions. The cost of a listing follows from the sizes of pages and
parts. Seconds are CPU time of this process, so a busy machine changes little.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.measure import machine, parser, report
from benchmarks.scale_model import (
    GETS_PER_PREFIX,
    LISTS_PER_PREFIX,
    TRAINERS_PER_NODE,
    USUAL_SHARDS,
    Deployment,
    Node,
    listings,
    load,
    population,
    resize,
)
from growcache.monitor.prices import find_price
from growcache.sampling.draw_notes import DrawNotes
from growcache.sampling.lanes import lane_mask, owned_lanes
from growcache.sampling.population import Population

NODES = (1, 10, 125, 1000)
RESIZES = ((2, 3), (2, 3, 2), (15, 18), (100, 101), (1000, 900))
BYTES_PER_KEY = 36.5  # of a catalog, measured by benchmarks/shared_catalog.py
DRAWS = 4_096  # of a node that are timed


def cpu_seconds(call: Callable[[], object]) -> float:
    """Return what a call takes of the processor."""
    began = time.process_time()
    call()
    return time.process_time() - began


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of one node.

    Attributes:
        draw: for one of its own parts.
        count: for counting its parts when an edition begins, per 10^9 parts of all nodes.
        change: for counting what is left after a change of the number of nodes, per 10^9 parts.
        start: of a later start, until the next group is drawn, with notes
        walk: and without them, per 10^6 parts that it drew in the pass.
    """

    draw: float
    count: float
    change: float
    start: float
    walk: float


def costs(nodes: int, shared: Population, objects: int) -> Costs:
    """Measure one node."""
    for others in (nodes, nodes + 1):  # once for all editions
        lane_mask(owned_lanes(nodes // 2, others))
    node = Node(nodes // 2, shared, objects, USUAL_SHARDS)
    count = cpu_seconds(lambda: node.join(nodes)) / objects
    node.draw(DRAWS)  # which also makes what is made once
    wanted = min(DRAWS, objects // nodes // 4)
    draw = cpu_seconds(lambda: node.draw(wanted)) / wanted
    start, walk = starts(node, nodes)
    change = cpu_seconds(lambda: node.join(nodes + 1)) / objects if nodes > 1 else 0.0
    return Costs(draw, count * 1e9, change * 1e9, start, walk * 1e6)


def starts(node: Node, nodes: int) -> tuple[float, float]:
    """Return the seconds of a start with the notes of a node, and without them per part that it drew."""
    own = int(node.editions[-1].strata.own[0])
    found = []
    for notes in (node.notes, DrawNotes()):
        again = Node(node.number, node.population, node.objects, USUAL_SHARDS, notes)
        found.append(cpu_seconds(partial(again.start, nodes, own, node.groups)))
    return found[0], found[1] / sum(map(len, node.drawn))


def node_rows(objects: int) -> list[dict[str, object]]:
    """Return a row for each number of nodes."""
    shared = population()
    shared.strata(objects, owned_lanes(0, 2))  # hashes of all keys, once
    rows: list[dict[str, object]] = []
    for nodes in NODES:
        found = costs(nodes, shared, objects)
        rows.append(
            {
                "nodes": f"{nodes:,}",
                "CPU of a draw": in_time(found.draw),
                "draws/s that take half a core": f"{0.5 / found.draw:,.0f}",
                "a new edition, per 10⁹ parts": in_time(found.count),
                "a resize, per 10⁹ parts": in_time(found.change) if nodes > 1 else "–",
                "a start": in_time(found.start),
                "without notes, per 10⁶ draws": in_time(found.walk),
            }
        )
    return rows


def resize_rows(objects: int, cases: Sequence[tuple[int, ...]]) -> list[dict[str, object]]:
    """Return a row for each resize."""
    rows: list[dict[str, object]] = []
    for phases in cases:
        found = resize(phases, objects)
        rows.append(
            {
                "nodes": " → ".join(f"{one:,}" for one in phases),
                "lanes that move": f"{found.moved:.1%}",
                "parts drawn twice in the pass": f"{found.twice:.1%}",
                "status says": f"{found.reported:.1%}",
                "parts that no node drew": f"{found.missed:.1%}",
            }
        )
    return rows


def load_rows(cases: Sequence[Deployment]) -> list[dict[str, object]]:
    """Return a row for each deployment."""
    rows: list[dict[str, object]] = []
    for one in cases:
        found = load(one)
        rows.append(
            {
                "nodes": f"{one.nodes:,}",
                "trainers": f"{one.nodes * TRAINERS_PER_NODE:,}",
                "samples": f"10{_SUPERSCRIPTS[round(np.log10(one.samples))]}",
                "a request": f"{one.visit * 256:,} KiB",
                "prefixes": f"{one.prefixes:,}",
                "GET/s": f"{found.gets_per_second:,.0f}",
                "GB/s": f"{found.bytes_per_second / 1e9:,.1f}",
                "first batch": in_time(found.first_batch_seconds),
                "coverage in a day": f"{found.coverage_day:.1%}",
                "a whole pass": in_time(found.pass_seconds),
                "reuse": f"{found.reuse:,.0f}",
            }
        )
    return rows


_SUPERSCRIPTS = {9: "⁹", 10: "¹⁰", 12: "¹²"}


def listing_rows(objects: Sequence[int]) -> list[dict[str, object]]:
    """Return two rows for each number of objects: all nodes list, and one does."""
    price = find_price("us-east-1/standard")
    rows: list[dict[str, object]] = []
    for count in objects:
        for shared in (False, True):
            found = listings(count, 125, BYTES_PER_KEY, shared=shared)
            dollars = price.dollars(0.0, found.gets, found.lists + found.puts)
            rows.append(
                {
                    "objects": f"{count:,}",
                    "of 125 nodes": "one lists" if shared else "each lists",
                    "LIST": f"{found.lists:,.0f}",
                    "GET": f"{found.gets:,.0f}",
                    "PUT": f"{found.puts:,.0f}",
                    "GB read": f"{found.nbytes / 1e9:,.1f}",
                    "at least": in_time(found.lists / LISTS_PER_PREFIX),
                    "USD": f"{dollars:,.2f}",
                }
            )
    return rows


def in_time(seconds: float) -> str:
    """Return seconds in a unit that suits them.

    >>> in_time(0.00000123), in_time(0.5), in_time(200), in_time(1e6)
    ('1.2 µs', '0.5 s', '3.3 min', '12 days')
    """
    units = ((86_400, "days"), (3_600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (1e-6, "µs"))
    if not np.isfinite(seconds):
        return "never"
    size, unit = next((u for u in units if seconds >= 2 * u[0] or u[0] == 1e-6), units[-1])
    if 0.1 <= seconds < 2:
        size, unit = 1, "s"
    value = seconds / size
    return (
        f"{value:.1f} {unit}" if value < 10 and value != round(value) else f"{value:.0f} {unit}"
    )


def markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows as a table."""
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([str(row[n]) for n in names] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def write_tables(page: Path, tables: Mapping[str, str]) -> None:
    """Put each table between its two comments."""
    text = page.read_text(encoding="utf-8")
    for name, table in tables.items():
        begin, end = f"<!-- {name}: written by benchmarks/scale.py -->", f"<!-- {name}: end -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.S)
        assert pattern.search(text), f"{page} has no {begin}"
        whole = f"{begin}\n{table}\n{end}"
        text = pattern.sub(lambda _, whole=whole: whole, text)  # type: ignore[misc]
    page.write_text(text, encoding="utf-8")


def deployments() -> list[Deployment]:
    """Return what the table of the bucket shows: few prefixes, enough of them, larger requests, more samples."""
    return [
        Deployment(1, 1),
        Deployment(10, 1),
        Deployment(10, 8),
        Deployment(125, 1),
        Deployment(125, 1, visit=16),
        Deployment(125, 1, visit=128),
        Deployment(125, 100),
        Deployment(125, 1, visit=128, samples=1e12),
        Deployment(1000, 1, visit=16),
        Deployment(1000, 8, visit=128, samples=1e12),
    ]


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--page", type=Path, help="also write the tables of this page")
    given = arguments.parse_args()
    objects = 100_000 if given.quick else 10_000_000
    drawn = 4_000 if given.quick else 50_000
    cases = deployments()[:2] if given.quick else deployments()
    tables = {
        "nodes": node_rows(objects),
        "resizes": resize_rows(drawn, RESIZES[:2] if given.quick else RESIZES),
        "bucket": load_rows(cases),
        "listing": listing_rows((10**6, 10**9)),
    }
    for name, rows in tables.items():
        report(f"{name} (S3: {GETS_PER_PREFIX:,} GET/s per prefix)", rows, None)
    if given.page is not None:
        about = machine()
        note = f"\n\nMeasured with {objects:,} objects of one part, on {about['cpu']}."
        texts = {name: markdown(rows) for name, rows in tables.items()}
        texts["nodes"] += note
        write_tables(given.page, texts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
