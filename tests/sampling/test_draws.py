"""The order of draws: complete, repeatable, and indifferent to how it is asked for."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.sampling.draws import DrawnEdition, Draws
from growcache.sampling.orders import Permutation, locate
from growcache.sampling.sizing import Sizing


def sizing(shard: int = 8, **more: object) -> Sizing:
    values = {"samples_per_object": 1, "stride_bytes": 1.0, "overhead_bytes": 0, "whole": False}
    return Sizing(**{**values, "shard_samples": shard, **more})  # type: ignore[arg-type]


def draws(seed: int, spans: list[DrawnEdition], **more: object) -> Draws:
    result = Draws(seed, sizing(), **more)  # type: ignore[arg-type]
    for span in spans:
        result.add(span)
    return result


def parts_of(order: Draws, groups: range) -> list[list[int]]:
    found = [order.group(number) for number in groups]
    return [draw.parts.tolist() for draw in found if draw]


@pytest.mark.mutant(
    3, "growcache.sampling.orders:Permutation._decrypt", "reversed(self._keys)", "self._keys"
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
    1,
    "growcache.sampling.draws:Draws._settle",
    "(*segment.earlier, (segment.order, cursor.position))",
    "()",
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
    total, group, spans = 0, 0, []
    for edition, more in enumerate(growth):
        total += more
        spans.append(DrawnEdition(edition, total, group))
        group += gaps[edition % 3]
    order = draws(seed, spans)
    seen: dict[int, list[int]] = {}
    number = 0
    while 1 not in seen and number < 500:
        draw = order.group(number)
        assert draw is not None
        seen.setdefault(draw.round, []).extend(draw.parts.tolist())
        number += 1
    assert len(seen[0]) == len(set(seen[0]))
    if number > spans[-1].first_group + 1:
        assert set(seen[0]) == set(range(total))


@given(st.integers(0, 3), st.permutations(range(30)))
def test_any_order_of_asking_gives_the_same_groups(seed: int, asked: list[int]) -> None:
    spans = [DrawnEdition(0, 30, 0), DrawnEdition(1, 75, 3), DrawnEdition(2, 100, 9)]
    expected = parts_of(draws(seed, spans), range(30))
    order = draws(seed, spans)
    answers = {number: order.group(number) for number in asked}
    assert [answers[n].parts.tolist() for n in range(30)] == expected  # type: ignore[union-attr]


@given(st.integers(0, 400))
def test_leaping_to_a_group_equals_walking_there(number: int) -> None:
    """A restart finds its place without redrawing everything (guarantee 6)."""
    spans = [DrawnEdition(0, 30, 0), DrawnEdition(1, 75, 3), DrawnEdition(2, 1000, 9)]
    walked = draws(1, spans)
    for group in range(number):
        walked.group(group)
    leapt = draws(1, spans)
    assert parts_of(leapt, range(number, number + 2)) == parts_of(
        walked, range(number, number + 2)
    )


def test_an_edition_added_late_continues_the_round() -> None:
    """Asking which round comes next must not decide it: the listing may still grow."""
    late = draws(0, [DrawnEdition(0, 10, 0)])
    groups = 0
    while late.round_of(groups) == 0:
        late.group(groups)
        groups += 1
    late.add(DrawnEdition(1, 40, groups))
    assert late.round_of(groups) == 0
    known = draws(0, [DrawnEdition(0, 10, 0), DrawnEdition(1, 40, groups)])
    assert parts_of(late, range(20)) == parts_of(known, range(20))


@given(st.integers(1, 5), st.integers(0, 9))
def test_nodes_draw_disjoint_parts_that_cover_all(nodes: int, seed: int) -> None:
    drawn: list[int] = []
    for node in range(nodes):
        mine = lambda parts, node=node: parts % nodes == node  # noqa: E731
        order = draws(seed, [DrawnEdition(0, 60, 0)], mine=mine)
        number = 0
        while order.round_of(number) == 0:
            draw = order.group(number)
            assert draw is not None
            drawn += draw.parts.tolist()
            number += 1
    assert sorted(drawn) == list(range(60))


def test_replacement_draws_repeat_and_are_repeatable() -> None:
    one, two = (draws(seed, [DrawnEdition(0, 20, 0)], replacement=True) for seed in (0, 0))
    drawn = parts_of(one, range(40))
    assert drawn == parts_of(two, range(40))
    flat = [part for group in drawn for part in group]
    assert len(set(flat)) <= 20 < len(flat)


def test_seeds_matter() -> None:
    spans = [DrawnEdition(0, 1000, 0)]
    assert parts_of(draws(0, spans), range(9)) != parts_of(draws(1, spans), range(9))


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
    order = Draws(0, sizing(64, max_parts=100))
    order.add(DrawnEdition(0, 1000, 0))
    drawn = [order.group(number) for number in range(200)]
    assert sum(len(draw.parts) for draw in drawn if draw) == 100
    assert drawn[-1] is None


@pytest.mark.mutant(2, "growcache.sampling.sizing:Partitioning.parts", "self.whole", "True")
def test_long_recordings_are_visited_more_often() -> None:
    """Protocol 2: 99 small recordings and one large."""
    sizes = np.array([100] * 99 + [100_000])
    counts = sizing(stride_bytes=10.0, overhead_bytes=0).cut().parts(sizes)
    assert counts.tolist() == [10] * 99 + [10_000]
    assert sizing(stride_bytes=10.0, samples_per_object=4).cut().parts(sizes)[0] == 3
    assert sizing(whole=True).cut().parts(sizes).tolist() == [1] * 100


def test_locate_finds_object_and_part() -> None:
    starts = np.array([0, 3, 4, 10])
    ordinals, within = locate(starts, np.array([0, 2, 3, 4, 9]))
    assert ordinals.tolist() == [0, 0, 1, 2, 2]
    assert within.tolist() == [0, 2, 0, 0, 5]


def test_a_group_before_any_edition_is_refused() -> None:
    with pytest.raises(LookupError, match="no edition"):
        Draws(0, sizing()).group(0)
