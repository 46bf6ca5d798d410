"""The simulator of many nodes: small worlds whose outcome is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scale import in_time, write_tables
from benchmarks.scale_model import (
    GETS_PER_PREFIX,
    Deployment,
    catalog_parts,
    listings,
    load,
    moved_lanes,
    resize,
)


@pytest.mark.parametrize("phases", [(3, 2), (2, 3, 2)])
def test_a_resize_loses_nothing_and_repeats_what_moved(phases: tuple[int, ...]) -> None:
    found = resize(phases, 1000)
    assert found.missed == 0
    assert found.moved == moved_lanes(*phases[:2])
    # In the middle of a pass half of what moves was drawn before.
    assert 0.3 * found.moved < found.twice < 0.7 * found.moved


@pytest.mark.slow
def test_prefixes_bound_the_requests_of_all_nodes_together() -> None:
    few, enough = load(Deployment(10, 1)), load(Deployment(10, 8))
    assert 0.95 * GETS_PER_PREFIX < few.gets_per_second <= GETS_PER_PREFIX
    assert enough.gets_per_second > 5 * few.gets_per_second
    assert enough.pass_seconds < few.pass_seconds / 5


def test_one_listing_costs_its_pages_once() -> None:
    assert [catalog_parts(count) for count in (0, 1000, 1001, 1_000_000)] == [0, 1, 2, 21]
    each, one = (listings(10**6, 100, 36.5, shared=shared) for shared in (False, True))
    assert (each.lists, one.lists) == (100_000, 1_000)
    assert one.gets == 99 * 22


def test_tables_stand_between_their_comments(tmp_path: Path) -> None:
    page = tmp_path / "scale.md"
    begin, end = "<!-- a: written by benchmarks/scale.py -->", "<!-- a: end -->"
    page.write_text(f"before\n{begin}\nold\n{end}\nbehind\n", encoding="utf-8")
    write_tables(page, {"a": r"| \1 |"})
    assert page.read_text(encoding="utf-8") == f"before\n{begin}\n| \\1 |\n{end}\nbehind\n"
    assert [in_time(s) for s in (1.23e-6, 0.5, 200, 1e6)] == [
        "1.2 µs",
        "0.5 s",
        "3.3 min",
        "12 days",
    ]
