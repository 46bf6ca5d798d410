"""Which parts are whose, where several machines draw from one source."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from growcache.sampling.draws import GroupDraw
from growcache.sampling.lanes import LANES, owned_lanes
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
    population = Population(catalog, Objects(catalog), SIZING)
    lanes = owned_lanes(node, nodes)
    for objects in [*steps, len(catalog)]:
        owned = population.owned(objects, lanes)
    assert owned is not None
    parts = np.arange(population.parts(len(catalog)))
    kept = parts[owned(parts)]
    assert population.own_parts(len(catalog), lanes).sum() == len(kept)
    return {
        (visit.entry.key, visit.part) for visit in population.visits(GroupDraw(0, 0, 0, kept))
    }


def test_lanes_move_to_the_node_that_is_added_and_to_no_other() -> None:
    """Protocol 3: with another number of nodes, most of what a node owned stays its own."""
    for nodes in (2, 4, 9):
        before = [lanes_of(node, nodes) for node in range(nodes)]
        after = [lanes_of(node, nodes + 1) for node in range(nodes + 1)]
        assert sorted(lane for one in after for lane in one) == list(range(LANES))
        assert all(new <= old for old, new in zip(before, after, strict=False))
        fair = LANES / (nodes + 1)
        assert all(abs(len(one) - fair) < 5 * fair**0.5 for one in after)
    assert owned_lanes(0, 1) is None


def lanes_of(node: int, nodes: int) -> set[int]:
    lanes = owned_lanes(node, nodes)
    assert lanes is not None
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(lanes), np.uint8))
    return set(np.flatnonzero(bits).tolist())


@pytest.mark.mutant(
    3,
    "growcache.sampling.population:_lanes",
    "hashes[ordinals]",
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


class NoMoreKeys(Objects):
    """Objects whose keys must not be read any more once it is closed."""

    closed = False

    def keys(self, start: int, stop: int) -> Iterator[str]:
        assert not self.closed
        return super().keys(start, stop)


def test_whose_a_part_is_needs_no_look_at_the_listing(tmp_path: Path) -> None:
    """It is asked for every part of every node, between two turns of the service's loop."""
    with Catalog.open(tmp_path / "catalog") as catalog:
        catalog.append(some(700))
        objects = NoMoreKeys(catalog)
        owned = Population(catalog, objects, SIZING).owned(700, owned_lanes(0, 2))
        assert owned is not None
        objects.closed = True
        assert 0 < owned(np.arange(2800)).sum() < 2800


def test_one_node_draws_all_and_hashes_nothing(tmp_path: Path) -> None:
    with Catalog.open(tmp_path / "catalog") as catalog:
        catalog.append(some(70))
        objects = NoMoreKeys(catalog)
        objects.closed = True
        strata = Population(catalog, objects, SIZING).strata(70, owned_lanes(0, 1))
        assert strata.owned is None
        assert strata.sizes.tolist() == strata.own.tolist() == [280]
