"""Which parts are whose, where several machines draw from one source."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from growcache.cache.side_files import Edition
from growcache.sampling.draws import GroupDraw
from growcache.sampling.objects import Objects
from growcache.sampling.population import Population
from growcache.sampling.sizing import Sizing
from growcache.store.catalog import Catalog
from growcache.store.contract import Entry

# One part for each thousand bytes.
SIZING = Sizing(1, 1000.0, 0, whole=False, shard_samples=8)


def some(count: int) -> list[Entry]:
    return [Entry(f"rec/{n}.npy", 1000 * (1 + n % 7), None, float(n)) for n in range(count)]


def drawn_by(catalog: Catalog, node: int, nodes: int, *steps: int) -> set[tuple[str, int]]:
    population = Population(catalog, Objects(catalog), SIZING, node, nodes)
    for objects in steps:
        population.parts(objects)
    assert population.mine is not None
    parts = np.arange(population.parts(len(catalog)))
    kept = parts[population.mine(parts)]
    return {(stop.entry.key, stop.part) for stop in population.stops(GroupDraw(0, 0, 0, kept))}


@pytest.mark.mutant(
    3,
    "growcache.sampling.population:Population._mine",
    "self._hashes[ordinals]",
    "ordinals.astype(np.uint64)",
)
@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_nodes_that_list_in_another_order_share_the_parts(tmp_path: Path, nodes: int) -> None:
    entries = some(700)
    shares: list[set[tuple[str, int]]] = []
    for node in range(nodes):
        random.Random(node).shuffle(entries)
        with Catalog.open(tmp_path / f"{node}") as catalog:
            catalog.append(entries)
            shares.append(drawn_by(catalog, node, nodes))
    everything = {(entry.key, part) for entry in entries for part in range(entry.size // 1000)}
    assert Counter(part for share in shares for part in share) == Counter(everything)
    fair = len(everything) / nodes
    assert all(abs(len(share) - fair) < 4 * fair**0.5 for share in shares)


def test_a_growing_listing_changes_no_owner(tmp_path: Path) -> None:
    with Catalog.open(tmp_path / "catalog") as catalog:
        catalog.append(some(700))  # of which the last are in no block yet
        at_once = drawn_by(catalog, 1, 3)
        assert drawn_by(catalog, 1, 3, 1, 64, 100, 690) == at_once


def test_the_parts_of_one_object_are_dealt_to_all(tmp_path: Path) -> None:
    with Catalog.open(tmp_path / "catalog") as catalog:
        catalog.append([Entry("large.npy", 10_000_000, None, None)])
        counts = [len(drawn_by(catalog, node, 4)) for node in range(4)]
    assert sum(counts) == 10_000
    assert all(abs(count - 2500) < 200 for count in counts)


def test_whose_a_part_is_needs_no_look_at_the_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for every part of every node, between two turns of the service's loop."""
    with Catalog.open(tmp_path / "catalog") as catalog:
        catalog.append(some(700))
        population = Population(catalog, Objects(catalog), SIZING, 0, 2)
        parts = np.arange(population.span(Edition(0, 700, catalog.digest(700), 0)).parts)
        assert population.mine is not None
        expected = population.mine(parts)
        for name in ("entry", "entries", "keys"):
            monkeypatch.delattr(Catalog, name)
        np.testing.assert_array_equal(population.mine(parts), expected)
        assert 0 < expected.sum() < len(parts)


def test_one_node_draws_all_and_hashes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Catalog.open(tmp_path / "catalog") as catalog:
        catalog.append(some(70))
        monkeypatch.delattr(Catalog, "keys")
        population = Population(catalog, Objects(catalog), SIZING)
        assert population.parts(70) == 280
        assert population.mine is None
