"""The order of draws: complete, repeatable, and indifferent to how it is asked for."""

from __future__ import annotations

import functools
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from growcache.sampling.draws import Draws
from growcache.sampling.orders import Ints, Permutation, locate
from growcache.sampling.sizing import Sizing
from growcache.sampling.stratum_draws import DrawnEdition
from tests.sampling.drawn import drawn_by, edition, slowly, starts_of


def sizing(shard: int = 8, **more: object) -> Sizing:
    values = {"samples_per_object": 1, "stride_bytes": 1.0, "overhead_bytes": 0, "whole": False}
    return Sizing(**{**values, "shard_samples": shard, **more})  # type: ignore[arg-type]


def draws(seed: int, editions: list[DrawnEdition], **more: bool) -> Draws:
    return drawn_by(seed, sizing(), editions, **more)


def parts_of(order: Draws, groups: range) -> list[list[int]]:
    found = [order.group(number) for number in groups]
    return [draw.parts.tolist() for draw in found if draw]


@pytest.mark.mutant(
    3, "growcache.sampling.orders:Permutation._walk", "self._keys[::-1]", "self._keys"
)
@given(st.integers(1, 3000), st.integers(0, 2**64))
def test_permutation_is_a_bijection_and_inverse_undoes_it(size: int, key: int) -> None:
    order = Permutation(size, key)
    positions = np.arange(size)
    elements = order.forward(positions)
    assert sorted(elements.tolist()) == positions.tolist()
    assert order.inverse(elements).tolist() == positions.tolist()


def test_permutation_mixes_and_depends_on_its_key() -> None:
    size = 10_000
    first, second = (Permutation(size, key).forward(np.arange(size)) for key in (1, 2))
    assert abs(np.corrcoef(first, np.arange(size))[0, 1]) < 0.05
    assert (first == second).mean() < 0.01
    assert np.array_equal(first, Permutation(size, 1).forward(np.arange(size)))
    # neighbours of the order are no neighbours of the population
    assert np.median(np.abs(np.diff(first))) > size / 10


@pytest.mark.mutant(
    1, "growcache.sampling.stratum_draws:StratumDraws.grow", "(*last.earlier, earlier)", "()"
)
@given(
    st.integers(0, 5),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.lists(st.integers(1, 5), min_size=3, max_size=3),
)
def test_no_part_twice_before_all_were_drawn(
    seed: int, growth: list[int], gaps: list[int]
) -> None:
    """Protocol 1: the listing grows while groups are drawn."""
    total, group, editions = 0, 0, []
    for number, more in enumerate(growth):
        total += more
        editions.append(edition(number, total, group))
        group += gaps[number % 3]
    order = draws(seed, editions)
    seen: dict[int, list[int]] = {}
    number = 0
    while 1 not in seen and number < 500:
        draw = order.group(number)
        assert draw is not None
        seen.setdefault(draw.round, []).extend(draw.parts.tolist())
        number += 1
    assert len(seen[0]) == len(set(seen[0]))
    if number > editions[-1].first_group + 1:
        assert set(seen[0]) == set(range(total))


ASKED = [edition(0, 30, 0), edition(1, 75, 3), edition(2, 100, 9)]


@functools.cache
def asked_in_order(seed: int) -> list[list[int]]:
    return parts_of(draws(seed, ASKED), range(30))


@given(st.integers(0, 3), st.permutations(range(30)))
def test_any_order_of_asking_gives_the_same_groups(seed: int, asked: list[int]) -> None:
    order = draws(seed, ASKED)
    answers = {number: order.group(number) for number in asked}
    assert [answers[n].parts.tolist() for n in range(30)] == asked_in_order(seed)  # type: ignore[union-attr]


GROWN = [edition(0, 30, 0), edition(1, 75, 3), edition(2, 1000, 9)]


@functools.cache
def walked() -> list[list[int]]:
    return parts_of(draws(1, GROWN), range(402))


@given(st.integers(0, 400))
def test_leaping_to_a_group_equals_walking_there(number: int) -> None:
    """A restart finds its place without redrawing everything (guarantee 6)."""
    leapt = parts_of(draws(1, GROWN), range(number, number + 2))
    assert leapt == walked()[number : number + 2]


@pytest.mark.slow
def test_what_is_remembered_of_rounds_is_bounded() -> None:
    """Where a group is all parts of a node, each is a round of its own."""
    editions = [edition(0, 8, 0), edition(1, 30, 9), edition(2, 40, 5000)]
    order = draws(1, editions)
    tracemalloc.start()
    for number in range(15_000):
        order.round_of(number)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 500_000
    for number in (3, 12, 4_999, 5_000, 5_001, 14_999):
        fresh = draws(1, editions).group(number)
        known = order.group(number)
        assert fresh is not None
        assert known is not None
        assert (known.round, known.parts.tolist()) == (fresh.round, fresh.parts.tolist())


def test_lanes_that_move_are_counted_without_the_order_of_all_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = 0
    forward = Permutation.forward

    def counted(order: Permutation, positions: Ints) -> Ints:
        nonlocal looked
        looked += len(positions)
        return forward(order, positions)

    monkeypatch.setattr(Permutation, "forward", counted)
    before = edition(0, 1 << 20, owned=lambda parts: parts % 3 == 0, lanes="a")
    order = draws(1, [before])
    order.group(30)
    order.add(edition(1, 1 << 20, 30, owned=lambda parts: parts % 4 == 0, lanes="b"))
    assert looked < 1 << 18


def test_an_edition_added_late_continues_the_round() -> None:
    """Asking which round comes next must not decide it: the listing may still grow."""
    late = draws(0, [edition(0, 10, 0)])
    groups = 0
    while late.round_of(groups) == 0:
        late.group(groups)
        groups += 1
    late.add(edition(1, 40, groups))
    assert late.round_of(groups) == 0
    known = draws(0, [edition(0, 10, 0), edition(1, 40, groups)])
    assert parts_of(late, range(20)) == parts_of(known, range(20))


@given(st.integers(1, 5), st.integers(0, 9))
def test_nodes_draw_disjoint_parts_that_cover_all(nodes: int, seed: int) -> None:
    drawn: list[int] = []
    for node in range(nodes):
        mine = lambda parts, node=node: parts % nodes == node  # noqa: E731
        drawn += first_round(draws(seed, [edition(0, 60, owned=mine)]))
    assert sorted(drawn) == list(range(60))


def first_round(order: Draws) -> list[int]:
    drawn: list[int] = []
    number = 0
    while order.round_of(number) == 0:
        draw = order.group(number)
        assert draw is not None
        drawn += draw.parts.tolist()
        number += 1
    return drawn


# What an edition adds (objects, each with some parts), how many groups draw from it, whose lanes.
HISTORIES = st.lists(
    st.tuples(
        st.lists(st.integers(1, 5), max_size=25),
        st.integers(0, 12),
        st.sampled_from([None, 2, 3, 5]),
    ),
    min_size=1,
    max_size=5,
)


def editions_of(history: list[tuple[list[int], int, int | None]]) -> list[DrawnEdition]:
    """Return editions; a node owns of several the parts that its number of nodes divides."""
    objects, group, found = [3, 4], 0, []
    for number, (more, groups, nodes) in enumerate(history):
        objects = [*objects, *more]
        mine = None if nodes is None else lambda parts, nodes=nodes: parts % nodes == 0
        lanes = None if nodes is None else str(nodes)
        found.append(edition(number, starts_of(objects), group, owned=mine, lanes=lanes))
        group += groups
    return found


@pytest.mark.mutant(3, "growcache.sampling.stratum_draws:StratumDraws.grow", "at - 1", "at")
@pytest.mark.mutant(
    3,
    "growcache.sampling.stratum_draws:StratumDraws._fresh",
    "known = known[one.edition.strata.mask(self._stratum, parts[known])]",
    "pass",
)
@given(
    st.integers(0, 9),
    HISTORIES,
    st.booleans(),
    st.sampled_from([1, 4, 8]),
    st.lists(st.integers(0, 70)),
)
def test_groups_are_those_of_a_plain_walk(
    seed: int,
    history: list[tuple[list[int], int, int | None]],
    turns: bool,
    shard: int,
    asked: list[int],
) -> None:
    """Whatever is listed, and whichever lanes are ours, meanwhile; in any order of asking."""
    editions, size = editions_of(history), sizing(shard)
    groups = editions[-1].first_group + 30
    expected = slowly(seed, size, editions, groups, turns=turns)
    order = drawn_by(seed, size, editions, turns=turns)
    for number in [*(n for n in asked if n < groups), *range(groups)]:
        draw = order.group(number)
        assert draw is not None
        assert (draw.edition, draw.round, draw.parts.tolist()) == expected[number]


@pytest.mark.slow
@settings(max_examples=30)
@given(st.integers(0, 9), HISTORIES, st.booleans())
def test_an_edition_that_comes_late_finds_the_same(
    seed: int, history: list[tuple[list[int], int, int | None]], turns: bool
) -> None:
    """A service adds an edition once it is listed; a restart knows all of them."""
    editions = editions_of(history)
    known, late = (
        drawn_by(seed, sizing(), editions, turns=turns),
        Draws(seed, sizing(), turns=turns),
    )
    stops = [*(one.first_group for one in editions[1:]), editions[-1].first_group + 9]
    for one, stop in zip(editions, stops, strict=True):
        late.add(one)
        assert parts_of(late, range(one.first_group, stop)) == parts_of(
            known, range(one.first_group, stop)
        )


@given(st.integers(0, 9), st.integers(20, 90), st.integers(0, 60), st.integers(0, 12))
def test_nodes_that_become_more_and_fewer_draw_nothing_twice(
    seed: int, parts: int, more: int, group: int
) -> None:
    """Protocol 3: what a node drew itself is not drawn again in that pass; its new lanes are."""
    mine = {
        nodes: lambda parts, nodes=nodes: parts % 7 < 7 - nodes  # fewer lanes with more nodes
        for nodes in (4, 6)
    }
    order = drawn_by(
        seed,
        sizing(4),
        [
            edition(
                number,
                parts + number * more,
                number * group,
                owned=mine[nodes],
                lanes=str(nodes),
            )
            for number, nodes in enumerate((4, 6, 4))
        ],
    )
    drawn = first_round(order)
    assert len(drawn) == len(set(drawn))
    last = np.arange(parts + 2 * more)
    if order.round_of(2 * group) == 0:  # all three editions are of the first round
        assert set(last[mine[4](last)].tolist()) <= set(drawn)


def test_replacement_draws_repeat_and_are_repeatable() -> None:
    one, two = (draws(seed, [edition(0, 20, 0)], replacement=True) for seed in (0, 0))
    drawn = parts_of(one, range(40))
    assert drawn == parts_of(two, range(40))
    flat = [part for group in drawn for part in group]
    assert len(set(flat)) <= 20 < len(flat)


def test_seeds_matter() -> None:
    editions = [edition(0, 1000, 0)]
    assert parts_of(draws(0, editions), range(9)) != parts_of(draws(1, editions), range(9))


@pytest.mark.mutant(
    7,
    "growcache.sampling.sizing:Sizing.group_parts",
    "max(0, self.doublings - group // RAMP_GROUPS)",
    "0",
)
def test_first_groups_are_small_and_sizes_never_shrink() -> None:
    counts = [sizing(256).group_parts(number) for number in range(40)]
    assert counts[0] == 8
    assert counts[-1] == 256
    assert all(a <= b for a, b in pairwise(counts))
    assert [sizing(256).parts_before(n) for n in (0, 1, 30)] == [0, 8, sum(counts[:30])]


def test_a_fixed_set_ends_exactly() -> None:
    order = drawn_by(0, sizing(64, max_parts=100), [edition(0, 1000)])
    drawn = [order.group(number) for number in range(200)]
    assert sum(len(draw.parts) for draw in drawn if draw) == 100
    assert drawn[-1] is None


@pytest.mark.mutant(2, "growcache.sampling.sizing:Partitioning.parts", "self.whole", "True")
def test_long_recordings_are_visited_more_often() -> None:
    """Protocol 2: 99 small recordings and one large."""
    sizes = np.array([100] * 99 + [100_000])
    counts = sizing(stride_bytes=10.0, overhead_bytes=0).partitionings[0].parts(sizes)
    assert counts.tolist() == [10] * 99 + [10_000]
    assert sizing(stride_bytes=10.0, samples_per_object=4).partitionings[0].parts(sizes)[0] == 3
    assert sizing(whole=True).partitionings[0].parts(sizes).tolist() == [1] * 100


def test_locate_finds_object_and_part() -> None:
    starts = np.array([0, 3, 4, 10])
    ordinals, within = locate(starts, np.array([0, 2, 3, 4, 9]))
    assert ordinals.tolist() == [0, 0, 1, 2, 2]
    assert within.tolist() == [0, 2, 0, 0, 5]


def test_a_group_before_any_edition_is_refused() -> None:
    with pytest.raises(LookupError, match="no edition"):
        Draws(0, sizing()).group(0)
