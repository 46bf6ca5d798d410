"""The order in which objects take turns: a bijection, fair after each turn, also while it grows."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.sampling.draws import Draws
from growcache.sampling.orders import (
    CohortStart,
    ManyPermutations,
    TurnOrder,
    TurnOrders,
    TurnTable,
    locate,
)
from growcache.sampling.sizing import Sizing
from tests.sampling.drawn import drawn_by, edition, starts_of

SIZING = Sizing(1, 1.0, 0, False, 32)
counts = st.lists(st.integers(0, 12) | st.sampled_from([40, 200]), min_size=1, max_size=40)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 5)), min_size=1, max_size=20))
def test_permutations_are_bijections(which: list[tuple[int, int]]) -> None:
    sizes = np.concatenate([np.full(size, size, np.int64) for size, _ in which])
    keys = np.concatenate([np.full(size, key, np.uint64) for size, key in which])
    values = np.concatenate([np.arange(size) for size, _ in which])
    many = ManyPermutations(sizes, keys)
    found = many.forward(values)
    assert (many.inverse(found) == values).all()
    at = 0
    for size, _ in which:
        assert sorted(found[at : at + size]) == list(range(size))
        at += size


@given(counts, st.integers(0, 3))
def test_every_part_comes_once_and_all_objects_alike(parts: list[int], seed: int) -> None:
    starts = starts_of(parts)
    if not starts[-1]:
        return
    order = TurnOrder(TurnTable(starts), seed, seed + 1)
    found = order.forward(np.arange(order.size))
    assert sorted(found) == list(range(order.size))
    assert (order.inverse(found) == np.arange(order.size)).all()
    objects, _ = locate(starts, found)
    visits = np.zeros(len(parts), np.int64)
    left = np.array(parts)
    for number in objects:  # none is a visit ahead of another that has parts left
        waiting = visits[(left - visits) > 0]
        assert visits[number] == waiting.min()
        visits[number] += 1


@pytest.mark.slow
@given(counts, st.lists(st.tuples(counts, st.integers(0, 400)), max_size=4), st.integers(0, 3))
def test_a_round_that_grows_is_whole_and_fair(
    first: list[int], more: list[tuple[list[int], int]], seed: int
) -> None:
    """New objects join the turn that has started: from then on no object is a visit behind."""
    parts, spans = list(first), [(0, list(first))]
    drawn = 0
    for added, after in more:
        parts = [*parts, *added]
        drawn += after
        spans.append((drawn, list(parts)))
    tables = [starts_of(one) for _, one in spans]
    if not tables[0][-1]:
        return
    groups = [group_before(passed) for passed, _ in spans]
    editions = [
        edition(number, table, group)
        for number, (group, table) in enumerate(zip(groups, tables, strict=True))
    ]
    draws = drawn_by(seed, SIZING, editions, turns=True)
    seen: list[int] = []
    group = 0
    while len(seen) < int(tables[-1][-1]) and group < 2000:
        draw = draws.group(group)
        assert draw is not None
        if draw.round:
            break
        seen += draw.parts.tolist()
        group += 1
    if groups[-1] <= group:  # all of it was known before the round ended
        assert sorted(seen) == list(range(int(tables[-1][-1])))
    else:
        assert len(seen) == len(set(seen))


def group_before(passed: int) -> int:
    return next(group for group in range(10_000) if SIZING.parts_before(group) >= passed)


def test_new_objects_take_part_at_once_and_do_not_catch_up() -> None:
    old = starts_of([50] * 10)
    order = TurnOrders(1)
    before = order.make(0, old, 0, None)
    passed = 205  # half of turn 20
    drawn = before.forward(np.arange(passed))
    new = starts_of([50] * 20)
    after = order.make(1, new, 0, (before, passed))
    parts = after.forward(np.arange(after.size))
    fresh = parts[~np.isin(parts, drawn)]
    assert len(fresh) == 1000 - passed
    objects, _ = locate(new, fresh)
    first = Counter((objects[:15] >= 10).tolist())  # what is left of the turn: 5 old, 10 new
    assert first == {True: 10, False: 5}
    for turn in range(10):
        at = 15 + 20 * turn
        assert sorted(objects[at : at + 20]) == list(range(20))


def test_a_later_round_has_another_order_of_the_same_parts() -> None:
    starts = starts_of([3, 1, 5])
    made = TurnOrders(7)
    rounds = [tuple(made.make(0, starts, n, None).forward(np.arange(9))) for n in range(4)]
    assert len(set(rounds)) == 4
    assert all(sorted(one) == list(range(9)) for one in rounds)


def test_old_groups_are_found_again_from_anywhere() -> None:
    later = starts_of([4] * 9 + [30, 1, 0, 7])
    editions = [edition(0, starts_of([4] * 9)), edition(1, later, 5)]

    def made() -> Draws:
        return drawn_by(3, Sizing(1, 1.0, 0, False, 64), editions, turns=True)

    forwards = made()
    known = [forwards.group(group) for group in range(60)]
    for group in (59, 7, 30, 0, 5, 58):
        again, one = made().group(group), known[group]
        assert again is not None
        assert one is not None
        assert (again.parts == one.parts).all()
        assert again.round == one.round


@pytest.mark.parametrize("nodes", [1, 3])
def test_nodes_share_out_all_parts(nodes: int) -> None:
    table = starts_of([5, 1, 9, 2, 2])
    found: list[int] = []
    for node in range(nodes):
        mine = lambda parts, node=node: parts % nodes == node  # noqa: E731
        draws = drawn_by(2, SIZING, [edition(0, table, owned=mine)], turns=True)
        for group in range(40):
            draw = draws.group(group)
            assert draw is not None
            if draw.round:
                break
            found += draw.parts.tolist()
    assert sorted(found) == list(range(19))


def test_a_long_tail_of_one_object_is_quick() -> None:
    """A million turns of one object each take no million steps in Python."""
    order = TurnOrder(TurnTable(starts_of([1_000_000, *[3] * 1000])), 1, 2)
    found = order.forward(np.arange(order.size - 65_536, order.size))
    assert (order.inverse(found) == np.arange(order.size - 65_536, order.size)).all()


def test_who_joins_is_there_from_that_turn_on() -> None:
    table = TurnTable(starts_of([2, 4, 3]), (CohortStart(0, 0), CohortStart(2, 1)))
    turns = np.arange(5)
    assert table.counts(turns).tolist() == [2, 3, 2, 2, 0]
    assert table.before(turns).tolist() == [0, 2, 5, 7, 9]
    assert table.end == 4
