"""Every part equally likely, at every stage, whatever the weights, the listing and the nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.config import SplitConfig
from growcache.formats.grids import AxisGrid
from growcache.sampling.draws import Draws
from growcache.sampling.lanes import LANES, owned_lanes
from growcache.sampling.objects import Objects, Split
from growcache.sampling.orders import Ints, TurnOrders
from growcache.sampling.population import (
    Population,
    block_draws,
    block_quotas,
    source_shares,
    stratum_shares,
)
from growcache.sampling.sizing import Sizing
from growcache.sampling.stratum_draws import DrawnEdition, EditionStrata
from growcache.store.catalog import Catalog
from growcache.store.contract import Entry
from tests.fairness.chance import agree, balanced, planted
from tests.sampling.drawn import edition

SEEDS = 60


def sizing(shard: int = 1024, *, whole: bool = False) -> Sizing:
    return Sizing(1, 1000.0, 0, whole=whole, shard_samples=shard)


def groups(draws: Draws, numbers: range) -> Ints:
    found = [draws.group(number) for number in numbers]
    return np.concatenate([group.parts for group in found if group])


def first_groups(seed: int, parts: int, count: int, *, replacement: bool = False) -> Ints:
    draws = Draws(seed, sizing(), replacement=replacement)
    draws.add(edition(0, parts))
    return groups(draws, range(count))


# ------------------------------------------------------------------- the test itself


def test_what_is_fair_passes_and_a_bias_of_five_per_cent_does_not() -> None:
    rng = np.random.default_rng(0)
    for cells in (10, 100):
        fair = np.full(cells, 1 / cells)
        assert agree(rng.multinomial(400_000, fair), fair)
        assert not agree(rng.multinomial(400_000, planted(fair)), fair)
    assert balanced(rng.binomial(200_000, 0.5), 0.5, 200_000)
    assert not balanced(rng.binomial(200_000, 0.5 * 1.05), 0.5, 200_000)


# --------------------------------------------------------------------------- parts


@pytest.mark.parametrize("replacement", [False, True])
def test_the_first_groups_have_each_part_alike(replacement: bool) -> None:
    """What training begins with: the first 6,000 of 50,000 parts, over many seeds."""
    counts = np.zeros(50)
    for seed in range(SEEDS):
        drawn = first_groups(seed, 50_000, 22, replacement=replacement)
        counts += np.bincount(drawn // 1000, minlength=50)
    assert counts.sum() > 300_000
    fair = np.ones(50)
    assert agree(counts, fair)
    assert not agree(counts * planted(fair) * 50, fair)


def test_no_part_leads_to_another() -> None:
    """Which part follows is independent of which came before: pairs over a grid of cells."""
    pairs = np.zeros((12, 12))
    for seed in range(SEEDS):
        drawn = first_groups(seed, 48_000, 24) // 4000
        np.add.at(pairs, (drawn[:-1], drawn[1:]), 1)
    assert agree(pairs.ravel(), np.ones(144))
    biased = pairs * (1 + 6 * 0.05 * np.eye(12))  # half a row's neighbours, were it six wide
    assert not agree(biased.ravel(), np.ones(144))


@pytest.mark.slow
def test_a_growing_listing_favours_neither_old_nor_new() -> None:
    """What is left of a round when the listing grows has old and new parts as there are of them."""
    old, new, known = 0, 0, 20_000
    for seed in range(SEEDS):
        draws = Draws(seed, sizing())
        draws.add(edition(0, known))
        before = len(groups(draws, range(24)))
        draws.add(edition(1, 50_000, 24))
        drawn = groups(draws, range(24, 28))
        old, new = old + int((drawn < known).sum()), new + int((drawn >= known).sum())
    share = (known - before) / (50_000 - before)
    assert old + new > 200_000
    assert balanced(old, share, old + new)
    assert not balanced(1.05 * old, share, old + new)


def test_no_part_twice_before_all_were_drawn_however_the_listing_grows() -> None:
    for seed in range(12):
        rng = np.random.default_rng(seed)
        sizes = np.cumsum(rng.integers(50, 2000, 5)).tolist()
        draws, group, seen = Draws(seed, sizing(256)), 0, np.zeros(0, np.int64)
        for number, parts in enumerate(sizes):
            draws.add(edition(number, parts, group))
            for _ in range(int(rng.integers(1, 12)) if parts != sizes[-1] else 1000):
                if draws.round_of(group):
                    break
                seen, group = (
                    np.concatenate([seen, groups(draws, range(group, group + 1))]),
                    group + 1,
                )
            assert len(np.unique(seen)) == len(seen) <= parts
            if draws.round_of(group):  # drawn to the end before the listing went on
                break
        assert len(seen) == parts


# ------------------------------------------------------------------------- windows


@pytest.mark.parametrize(
    ("window", "stride", "pad"), [(16, 8, False), (16, 24, False), (16, 16, True)]
)
def test_every_position_of_a_window_is_equally_likely(
    window: int, stride: int, pad: bool
) -> None:
    rows, grid = 200, AxisGrid(window, stride, pad=pad, random_phase=True)
    counts = np.zeros(stride)
    for number in range(200_000):
        counts[grid.phase(rows, number // 50, number % 50, f"rec/{number % 7}")] += 1
    assert agree(counts, np.ones(stride))
    assert not agree(counts * planted(np.ones(stride)) * stride, np.ones(stride))
    # And each position is of one phase: so all come as often as their phases.
    starts = [start for phase in range(stride) for start in grid.starts(rows, phase)]
    assert sorted(starts) == list(range(grid.possible(rows)))


# ------------------------------------------------------------------------- weights


@contextmanager
def population(folder: Path, sizes: Ints, size: Sizing) -> Iterator[Population]:
    folder.mkdir(exist_ok=True)
    with Catalog.open(folder / "catalog") as catalog:
        entries = [Entry(f"sub-{n // 5}/{n}", int(s), None, 0.0) for n, s in enumerate(sizes)]
        catalog.append(entries)
        yield Population(catalog, Objects(catalog), size)


@pytest.mark.parametrize("by_objects", [False, True])
def test_objects_come_as_often_as_their_weight(tmp_path: Path, by_objects: bool) -> None:
    lengths = np.random.default_rng(0).integers(20, 200, 40)
    size = sizing(whole=by_objects)
    with population(tmp_path, 1000 * lengths, size) as source:
        total = source.parts(40)
        counts = np.zeros(40)
        for seed in range(20):
            draws = Draws(seed, size, replacement=True)
            draws.add(edition(0, total))
            drawn = groups(draws, range(20, 32))
            objects = np.searchsorted(source.starts(40), drawn, side="right") - 1
            counts += np.bincount(objects, minlength=40)
    wanted = np.ones(40) if by_objects else lengths
    assert agree(counts, wanted)
    assert not agree(counts, planted(wanted))


@pytest.mark.slow
def test_objects_that_take_turns_are_alike_and_so_are_their_parts() -> None:
    """Of objects of 1 to 12 parts, 30 of each: who comes early in a turn, which part, who next."""
    lengths = np.repeat(np.arange(1, 13), 30)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    early, low, following, seeds = np.zeros(12), 0, np.zeros(9), 1000
    for seed in range(seeds):
        order = TurnOrders(seed).make(0, starts, 0, None)
        drawn = order.forward(np.arange(2 * 360 - 30))  # two turns
        objects = np.searchsorted(starts, drawn, side="right") - 1
        assert len(np.unique(objects[:360])) == 360
        assert sorted(objects[360:]) == list(range(30, 360))
        first, within = objects[:360], (drawn - starts[objects])[:360]
        early += np.bincount(first[:180] // 30, minlength=12)
        even = lengths[first] % 2 == 0
        low += int((within[even] < lengths[first][even] // 2).sum())
        thirds = first % 3
        following += np.bincount(thirds[:-1] * 3 + thirds[1:], minlength=9)
    assert agree(early, np.ones(12))
    assert not agree(early, planted(np.ones(12)))
    assert balanced(low, 0.5, 180 * seeds)
    assert not balanced(1.05 * low, 0.5, 180 * seeds)
    # The next one is never the same object.
    pairs = np.array([119 if a == b else 120 for a in range(3) for b in range(3)])
    assert agree(following, pairs)
    assert not agree(following, planted(pairs))


@pytest.mark.parametrize("weights", ["balanced", "sqrt", "natural"])
def test_strata_come_as_often_as_asked_and_their_parts_alike(weights: str) -> None:
    parts = np.array([50, 400, 2000])
    bounds = np.concatenate([[0], np.cumsum(parts)])
    strata = EditionStrata(
        ("a", "b", "c"),
        parts,
        parts,
        parts,
        lambda stratum, local: bounds[stratum] + local,
        lambda stratum: np.arange(parts[stratum] + 1),
    )
    wanted = block_quotas(stratum_shares(["a", "b", "c"], parts, weights))
    counts, within = np.zeros(3), np.zeros(20)
    for seed in range(20):
        draws = Draws(seed, sizing())
        draws.add(DrawnEdition(0, 0, strata, quotas=wanted))
        drawn = groups(draws, range(20, 32))
        counts += np.bincount(np.searchsorted(bounds, drawn, side="right") - 1)
        within += np.bincount((drawn[drawn >= 450] - 450) // 100, minlength=20)
    assert agree(counts[::-1], wanted[::-1])
    assert not agree(counts[::-1], planted(wanted[::-1]))
    assert agree(within, np.ones(20))


# --------------------------------------------------------------------------- nodes


@pytest.mark.parametrize("nodes", [2, 5])
def test_nodes_are_disjoint_covering_and_alike(tmp_path: Path, nodes: int) -> None:
    sizes = 1000 * np.random.default_rng(0).integers(1, 400, 1000)
    owners = np.zeros(0, np.int64)
    counts, shares = np.zeros(nodes), np.zeros(nodes)
    for node in range(nodes):
        lanes = owned_lanes(node, nodes)
        assert lanes is not None
        shares[node] = int(lanes, 16).bit_count() / LANES
        with population(tmp_path / str(node), sizes, sizing()) as source:
            parts = np.arange(source.parts(1000))
            owned = source.owned(1000, lanes)
            assert owned is not None
            mine = parts[owned(parts)]
            owners, counts[node] = np.concatenate([owners, mine]), len(mine)
    assert sorted(owners.tolist()) == parts.tolist()
    assert agree(counts, shares)
    assert not agree(counts, planted(shares))
    assert np.all(np.abs(shares * nodes - 1) < 0.15)


# -------------------------------------------------------------------------- splits


def test_subsets_have_their_shares_of_the_groups() -> None:
    split = SplitConfig(fractions={"a": 0.5, "b": 0.3, "c": 0.2}, use="a")
    counts = np.zeros(3)
    for seed in range(4):
        subsets = Split(split.model_copy(update={"seed": seed}))
        counts += np.bincount(subsets.places([f"sub-{n}" for n in range(60_000)]), minlength=3)
    assert agree(counts, [0.5, 0.3, 0.2])
    assert not agree(counts, planted([0.5, 0.3, 0.2]))


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.data())
def test_samples_come_by_the_weights_however_many_a_visit_brings(
    weights: list[float], data: st.DataObject
) -> None:
    count = len(weights)
    per_visit = np.array(data.draw(st.lists(st.floats(1, 50), min_size=count, max_size=count)))
    wanted = source_shares(weights, np.ones(count, np.int64), per_visit)
    visits = block_quotas(wanted, block_draws(wanted))
    samples = visits * per_visit / (visits * per_visit).sum()
    np.testing.assert_allclose(samples, np.array(weights) / sum(weights), rtol=0.01, atol=2e-3)
