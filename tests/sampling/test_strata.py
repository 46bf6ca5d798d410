"""Strata: shares that are exact, no part twice before all were drawn, weights that undo it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from growcache.cache.files import CacheLayout
from growcache.cache.side_files import read_editions
from growcache.cache.status import read_status
from growcache.cli.cli import main
from growcache.errors import ConfigError
from growcache.loading.snapshot import Snapshot
from growcache.sampling.draws import Draws, GroupDraw, StratumBlocks
from growcache.sampling.lanes import owned_lanes
from growcache.sampling.objects import Objects
from growcache.sampling.population import (
    BLOCK_DRAWS,
    ObjectStrata,
    Population,
    block_quotas,
    stratum_shares,
)
from growcache.sampling.sizing import Sizing
from growcache.sampling.stratum_counts import MOST_ROWS, stratum_statuses
from growcache.sampling.stratum_draws import DrawnEdition, EditionStrata, IndependentDraws
from growcache.store.catalog import Catalog
from growcache.store.contract import Entry
from tests.sampling.drawn import edition
from tests.sampling.services import run, write_config

COUNTS = st.lists(st.integers(0, 5000), min_size=1, max_size=40).filter(any)


# ------------------------------------------------------------------------- shares


@given(COUNTS, st.sampled_from(["balanced", "natural", "sqrt"]))
def test_shares_add_up_and_leave_out_what_is_empty(counts: list[int], rule: str) -> None:
    found = stratum_shares([str(n) for n in range(len(counts))], np.array(counts), rule)
    assert found.sum() == pytest.approx(1)
    assert ((found > 0) == (np.array(counts) > 0)).all()


def test_shares_by_name() -> None:
    counts = np.array([10, 1000, 10, 0])
    found = stratum_shares(["a", "b", "c", "d"], counts, {"a": 2, "c": 0})
    np.testing.assert_allclose(found, [2 / 3, 1 / 3, 0, 0])


def test_a_stratum_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="there is no stratum dog; the source has cat, cow"):
        stratum_shares(["cow", "cat"], np.array([1, 1]), {"dog": 2})
    with pytest.raises(ConfigError, match="found none among cow"):
        stratum_shares(["cow"], np.array([1]), {"cow": 0})


@given(COUNTS, st.sampled_from(["balanced", "natural", "sqrt"]))
def test_quotas_are_near_the_shares_and_never_none(counts: list[int], rule: str) -> None:
    wanted = stratum_shares([str(n) for n in range(len(counts))], np.array(counts), rule)
    found = block_quotas(wanted)
    total = int(found.sum())
    assert total >= BLOCK_DRAWS
    assert ((found > 0) == (wanted > 0)).all()
    # One draw of a block, and what those take that would have less than one.
    raised = np.maximum(0, 1 - wanted[wanted > 0] * total).sum()
    assert (np.abs(found - wanted * total) <= 2 + raised).all()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), st.data())
def test_slots_are_counted_as_they_are_dealt(counts: list[int], data: st.DataObject) -> None:
    slots = StratumBlocks(np.array(counts), 0, "test")
    stop = data.draw(st.integers(0, 4 * sum(counts)))
    start = data.draw(st.integers(0, stop))
    run_ = slots.run(start, stop)
    assert len(run_) == stop - start
    before = np.bincount(run_, minlength=len(counts))
    np.testing.assert_array_equal(slots.before(start) + before, slots.before(stop))
    np.testing.assert_array_equal(slots.before(3 * sum(counts)), 3 * np.array(counts))


# ------------------------------------------------------------------------- one stratum


@pytest.mark.mutant(
    3,
    "growcache.sampling.stratum_draws:StratumDraws._fresh",
    "one.order.inverse(parts[known]) < one.positions",
    "parts[known] < 0",
)
@settings(max_examples=30)
@given(
    grown=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 40)), max_size=4),
    first=st.integers(3, 40),
    turns=st.booleans(),
)
def test_no_part_of_a_stratum_comes_twice_before_all_came(
    grown: list[tuple[int, int]], first: int, turns: bool
) -> None:
    """Of strata that grow at any draw of theirs, also in the middle of a group."""
    parts, group, draws = [first, 50], 0, Draws(0, sizing(shard_samples=16), turns=turns)
    draws.add(dealt(0, parts, "balanced"))
    drawn_parts: list[tuple[int, int]] = []  # round, part; of the first stratum
    sizes: list[int] = []  # when the draw was made
    for number, (groups, more) in enumerate([*grown, (25, 0)], 1):
        for at in range(group, group + groups):
            drawn = draws.group(at)
            assert drawn is not None
            assert drawn.rounds is not None
            mine = drawn.parts < parts[0]
            drawn_parts += zip(
                drawn.rounds[mine].tolist(), drawn.parts[mine].tolist(), strict=True
            )
            sizes += [parts[0]] * int(mine.sum())
        group, parts = group + groups, [parts[0] + more, 50]
        draws.add(dealt(number, parts, "balanced", group))
    assert len(set(drawn_parts)) == len(drawn_parts)  # none twice in a round
    rounds = [round_ for round_, _ in drawn_parts]
    assert rounds == sorted(rounds)
    for round_, count in Counter(rounds).items():
        if round_ != rounds[-1]:  # each but the last has every part that there was at its end
            end = max(i for i, found in enumerate(rounds) if found == round_)
            assert count == sizes[end]


def test_independent_draws_are_uniform_and_repeatable() -> None:
    # 99 degrees of freedom: 186 is the quantile of 10^-7.
    draws = IndependentDraws(0, 0, "test")
    draws.grow(edition(0, 100), 0)
    found, rounds = draws.draw(0, 20_000)
    counts = np.bincount(found, minlength=100)
    assert ((counts - 200) ** 2 / 200).sum() < 186
    np.testing.assert_array_equal(draws.draw(500, 600)[0], found[500:600])
    assert len(set(rounds.tolist())) == 20_000


def test_independent_draws_of_a_node_are_of_its_lanes() -> None:
    draws = IndependentDraws(0, 0, "test")
    draws.grow(edition(0, 200, owned=lambda parts: parts % 10 == 3), 0)
    found, _ = draws.draw(0, 4000)
    counts = np.bincount(found, minlength=200)[3::10]
    assert counts.sum() == 4000
    assert ((counts - 200) ** 2 / 200).sum() < 62  # 19 degrees of freedom, 10^-6


def test_independent_draws_without_a_lane_are_refused() -> None:
    """They must not go on with the lanes that the node had before."""
    draws = IndependentDraws(0, 0, "test")
    draws.grow(edition(0, 200), 0)
    draws.grow(edition(1, 200, owned=lambda parts: parts < 0, lanes="none"), 50)
    assert len(draws.draw(0, 50)[0]) == 50
    with pytest.raises(LookupError, match="no part for this node"):
        draws.draw(50, 60)


# ------------------------------------------------------------------------- groups


def sizing(**more: object) -> Sizing:
    values = {"samples_per_object": 1, "stride_bytes": 1000.0, "overhead_bytes": 0}
    return Sizing(**{**values, "whole": False, "shard_samples": 64, **more})  # type: ignore[arg-type]


def simple(parts: list[int]) -> EditionStrata:
    starts = np.concatenate([[0], np.cumsum(parts)])
    names = tuple(str(n) for n in range(len(parts)))
    counts = np.array(parts)
    return EditionStrata(
        names,
        counts,
        counts,
        counts,
        lambda stratum, local: starts[stratum] + local,
        lambda stratum: np.arange(counts[stratum] + 1),
    )


def dealt(
    number: int, parts: list[int], weights: str | dict[str, float], first_group: int = 0
) -> DrawnEdition:
    strata = simple(parts)
    quotas = block_quotas(stratum_shares(strata.names, strata.natural, weights))
    return DrawnEdition(number, first_group, strata, quotas=quotas)


def stratified(weights: str | dict[str, float], *parts: list[int], **more: object) -> Draws:
    draws = Draws(0, sizing(**more))
    for number, counts in enumerate(parts):
        draws.add(dealt(number, counts, weights, 40 * number))
    return draws


@pytest.mark.parametrize("weights", ["balanced", "natural", "sqrt"])
def test_groups_have_the_shares_in_any_order_of_asking(weights: str) -> None:
    parts = [30, 3000, 300]
    draws = stratified(weights, parts)
    groups = [draws.group(number) for number in range(120)]
    found = np.concatenate([group.parts for group in groups if group])
    bounds = np.cumsum(parts)
    counts = np.bincount(np.searchsorted(bounds, found, side="right"), minlength=3)
    wanted = stratum_shares(["0", "1", "2"], np.array(parts), weights)
    np.testing.assert_allclose(counts / len(found), wanted, atol=0.012)
    again = stratified(weights, parts)
    for number in (97, 3, 50):
        group, expected = again.group(number), groups[number]
        assert group is not None
        assert expected is not None
        np.testing.assert_array_equal(group.parts, expected.parts)
        np.testing.assert_array_equal(group.rounds, expected.rounds)


def test_weights_undo_the_shares() -> None:
    parts = [30, 3000, 300]
    draws = stratified("balanced", parts)
    bounds = np.cumsum(parts)
    sums = np.zeros(3)
    for number in range(200):
        group = draws.group(number)
        assert group is not None
        assert group.weights is not None
        strata = np.searchsorted(bounds, group.parts, side="right")
        np.add.at(sums, strata, group.weights)
    np.testing.assert_allclose(sums / sums.sum(), np.array(parts) / sum(parts), rtol=0.03)


def test_a_small_stratum_is_drawn_round_after_round_within_a_group() -> None:
    draws = stratified("balanced", [3, 3000])
    group = draws.group(30)
    assert group is not None
    assert group.rounds is not None
    small = group.parts < 3
    assert 20 <= small.sum() <= 44
    pairs = set(zip(group.parts[small].tolist(), group.rounds[small].tolist(), strict=True))
    assert len(pairs) == small.sum()  # another round each time, so other windows of it
    assert group.round == 0  # the large one is in its first
    assert draws.round_of(30) == 0


def test_the_round_ends_when_every_stratum_was_drawn() -> None:
    draws = stratified("balanced", [10, 200])
    numbers = range(60)
    first = next(n for n in numbers if draws.round_of(n) == 1)
    seen: set[int] = set()
    for number in range(first):
        assert len(seen) < 210
        assert draws.distinct(number) == len(seen)
        group = draws.group(number)
        assert group is not None
        seen |= set(group.parts.tolist())
    assert draws.distinct(first) == len(seen) == 210


def test_a_fixed_set_ends() -> None:
    draws = stratified("balanced", [30, 3000], max_parts=100)
    found = [draws.group(number) for number in range(60)]
    assert sum(len(group.parts) for group in found if group) == 100
    assert found[-1] is None


def test_a_later_edition_goes_on_where_the_strata_were() -> None:
    before, after = [30, 1000], [50, 1500, 70]
    draws = stratified("balanced", before, after)
    old = [draws.group(number) for number in range(40)]
    alone = stratified("balanced", before)
    for number, group in enumerate(old):
        expected = alone.group(number)
        assert group is not None
        assert expected is not None
        np.testing.assert_array_equal(group.parts, expected.parts)
    later = [draws.group(number) for number in range(40, 120)]
    new = np.concatenate([group.parts for group in later if group])
    counts = np.bincount(np.searchsorted(np.cumsum(after), new, side="right"), minlength=3)
    np.testing.assert_allclose(counts / len(new), 1 / 3, atol=0.02)


# ------------------------------------------------------------------------- the listing


def first_letters(objects: Objects, start: int, stop: int) -> list[str]:
    return [key[0] for key in objects.keys(start, stop)]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    names=st.lists(st.sampled_from("abcd"), min_size=1, max_size=60),
    sizes=st.lists(st.integers(0, 9), min_size=60, max_size=60),
    nodes=st.sampled_from([1, 3]),
)
def test_each_part_has_one_place_in_one_stratum_of_one_node(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], sizes: list[int], nodes: int
) -> None:
    with Catalog.open(tmp_path_factory.mktemp("c") / "catalog") as catalog:
        catalog.append(
            [Entry(f"{name}/{n}", 1000 * sizes[n], None, 0.0) for n, name in enumerate(names)]
        )
        found: list[int] = []
        for node in range(nodes):
            objects = Objects(catalog)
            population = Population(catalog, objects, sizing())
            by = ObjectStrata(objects, population, first_letters)
            half = by.strata(len(names) // 2, owned_lanes(node, nodes))
            strata = by.strata(len(names), owned_lanes(node, nodes))
            assert set(strata.names) == set(names)
            for number, name in enumerate(strata.names):
                local = np.arange(strata.sizes[number])
                places = strata.place(number, local)
                visits = population.visits(GroupDraw(0, 0, 0, places))
                assert {visit.entry.key[0] for visit in visits} <= {name}
                own = places[strata.mask(number, local)]
                assert len(own) == strata.own[number]
                found += own.tolist()
                if number < len(half.sizes):  # numbers within a stratum never change
                    np.testing.assert_array_equal(
                        half.place(number, np.arange(half.sizes[number])),
                        places[: half.sizes[number]],
                    )
        assert sorted(found) == list(range(population.parts(len(names))))


# ------------------------------------------------------------------------- a service


def labelled(folder: Path) -> str:
    for name, count in (("rare", 4), ("common", 60)):
        (folder / name).mkdir(parents=True)
        for n in range(count):
            np.save(folder / name / f"{n}.npy", np.full(512, n, "<f4"))
    return f"{folder}/*/*.npy"


BY_FOLDER = "/(?P<stratum>[a-z]+)/[0-9]+[.]npy$"


def test_a_balanced_cache(tmp_path: Path) -> None:
    config = write_config(
        tmp_path / "c.yaml",
        labelled(tmp_path / "data"),
        sampling={"strata": {"by": BY_FOLDER, "weights": "balanced"}},
    )
    assert run(config, "--until-full") == (0, "")
    status = read_status(tmp_path / "c")
    assert (status.state, status.complete, status.coverage) == ("stopped", True, 1.0)
    with Snapshot.take(tmp_path / "c") as snapshot:
        keys = [snapshot.origin(i).key.split("/")[-2] for i in range(len(snapshot))]
        weights = np.array([float(snapshot[i]["_weight"]) for i in range(len(snapshot))])
    rare = np.array([key == "rare" for key in keys])
    assert 0.4 < rare.mean() < 0.6
    assert (~rare).sum() >= 60
    np.testing.assert_allclose(weights[rare], 2 * 4 / 64, rtol=1e-6)
    np.testing.assert_allclose(weights[~rare], 2 * 60 / 64, rtol=1e-6)
    assert run_peek(tmp_path, config) == 0


@given(
    st.lists(st.tuples(st.integers(1, 99), st.integers(0, 300)), max_size=120), st.booleans()
)
def test_rows_of_strata_add_up(counts: list[tuple[int, int]], replacement: bool) -> None:
    parts, drawn = np.array(counts, np.int64).reshape(-1, 2).T
    names = [str(number) for number in range(len(counts))]
    rows = stratum_statuses(names, parts, drawn, replacement=replacement)
    assert len(rows) == min(len(counts), MOST_ROWS)
    assert sum(row.strata for row in rows) == len(counts)
    assert sum(row.drawn for row in rows) == drawn.sum()
    assert sum(row.parts for row in rows) == parts.sum()
    assert all(0 <= row.coverage <= 1 for row in rows)


def test_strata_by_a_label(tmp_path: Path) -> None:
    url = labelled(tmp_path / "data")
    lines = [f"{path.name},{path.parent.name}" for path in (tmp_path / "data").glob("rare/*")]
    lines += [f"common/{n}.npy,common" for n in range(60)]
    table = "\n".join(
        ["path,kind", *(line if "/" in line else f"rare/{line}" for line in lines)]
    )
    (tmp_path / "labels.csv").write_text(table)
    config = write_config(
        tmp_path / "c.yaml",
        url,
        source={
            "labels": {"url": f"{tmp_path}/labels.csv", "key": "path", "columns": ["kind"]}
        },
        sampling={"strata": {"by": "kind"}},
    )
    assert run(config, "--until-full") == (0, "")
    with Snapshot.take(tmp_path / "c") as snapshot:
        kinds = Counter(str(snapshot[i]["kind"]) for i in range(len(snapshot)))
        for i in range(len(snapshot)):
            assert snapshot.origin(i).key.split("/")[-2] == snapshot[i]["kind"]
    assert 0.6 < kinds["rare"] / kinds["common"] < 1.6
    shown = read_status(tmp_path / "c").strata
    assert {one.name: (one.parts, one.coverage) for one in shown} == {
        "rare": (4, 1.0),
        "common": (60, 1.0),
    }
    assert sum(one.drawn for one in shown) >= len(snapshot)
    assert main(["report", str(tmp_path / "c"), "-o", str(tmp_path / "r.html")]) == 0
    page = (tmp_path / "r.html").read_text()
    assert "Visits since the cache began, by kind" in page
    assert '<td><bdi>rare</bdi></td><td class="number">4</td>' in page


def run_peek(folder: Path, config: Path) -> int:
    return main(
        ["peek", str(folder / "c"), "--sample", "0:0", "--refetch", "--config", str(config)]
    )


@pytest.mark.parametrize(
    ("strata", "said"),
    [
        ({"by": "label"}, "a regular expression with"),
        ({"by": "(?P<stratum>no)/"}, "to match every key, found"),
        ({"by": BY_FOLDER, "weights": {"rara": 3}}, "there is no stratum rara"),
        ({"by": BY_FOLDER, "weights": "even"}, "sampling.strata"),
    ],
)
def test_strata_that_cannot_be_meant(
    tmp_path: Path, strata: dict[str, object], said: str
) -> None:
    config = write_config(
        tmp_path / "c.yaml", labelled(tmp_path / "data"), sampling={"strata": strata}
    )
    code, errors = run(config, "--until-full")
    assert code == 2
    assert said in errors
    assert read_editions(CacheLayout(tmp_path / "c")) == []  # nothing can be drawn from one
