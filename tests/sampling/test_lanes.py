"""Protocol 3: nodes draw disjoint parts that cover all, however often their number changes."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from growcache.cache.side_files import Edition
from growcache.sampling import lanes as lanes_module
from growcache.sampling.draw_notes import NOTED_POSITIONS, DrawNotes
from growcache.sampling.draws import Draws
from growcache.sampling.lanes import FEW_NODES, FINE_LANES
from growcache.sampling.sizing import Sizing
from growcache.sampling.stratum_draws import DrawnEdition, Mask
from tests.sampling.drawn import drawn_by, edition

SIZING = Sizing(samples_per_object=1, stride_bytes=1.0, overhead_bytes=0, whole=False, shard_samples=8)  # fmt: skip
PARTS = 200
owned_lanes = functools.cache(lanes_module.owned_lanes)
lane_mask = functools.cache(lanes_module.lane_mask)
LANE_OF = np.random.default_rng(0).integers(0, FINE_LANES, PARTS)


@pytest.mark.mutant(
    3,
    "growcache.sampling.lanes:_owners",
    'derive_seed("lane", lane, one)',
    'derive_seed("lane", lane, one, nodes)',
)
@given(st.integers(1, 9) | st.integers(FEW_NODES - 3, FEW_NODES + 5), st.integers(1, 3))
def test_only_lanes_of_a_node_that_comes_or_goes_move(nodes: int, more: int) -> None:
    before, after = (
        np.array([lane_mask(owned_lanes(node, total)) for node in range(total)])
        for total in (nodes, nodes + more)
    )
    assert (before.sum(0) == 1).all()
    assert (after.sum(0) == 1).all()
    assert not (after[:nodes] & ~before).any()


@pytest.mark.parametrize("nodes", [FEW_NODES, FEW_NODES + 1, 125, 400])
def test_each_node_owns_about_its_share(nodes: int) -> None:
    """Of 256 lanes alone, 14 of 125 nodes had none, and their services ended."""
    owned = [int(lane_mask(owned_lanes(node, nodes)).sum()) for node in range(nodes)]
    share = FINE_LANES / nodes
    assert 0.6 * share < min(owned)
    assert max(owned) < 1.5 * share


@dataclass
class Node:
    """A node's cache: it stays while the node is away."""

    number: int
    seed: int
    notes: DrawNotes = field(default_factory=DrawNotes)
    draws: Draws = field(init=False)
    editions: list[DrawnEdition] = field(default_factory=list)
    lanes: list[tuple[int, str | None]] = field(default_factory=list)  # from which group on
    drawn: list[tuple[int, int, int]] = field(default_factory=list)  # group, round, part
    groups: int = 0

    def __post_init__(self) -> None:
        self.draws = Draws(self.seed, SIZING, notes=self.notes)

    def join(self, nodes: int, listed: int) -> None:
        lanes = owned_lanes(self.number, nodes)
        mask = lane_mask(lanes)
        made = edition(
            len(self.lanes), listed, self.groups, owned=lambda p: mask[LANE_OF[p]], lanes=lanes
        )
        strata = replace(made.strata, lane_of=lambda _, parts: LANE_OF[parts])
        self.editions.append(replace(made, strata=strata, lanes=lanes))
        self.draws.add(self.editions[-1])
        self.lanes.append((self.groups, lanes))

    def draw(self, groups: int) -> None:
        for group in range(self.groups, self.groups + groups):
            found = self.draws.group(group)
            assert found is not None
            self.drawn += [(group, found.round, part) for part in found.parts.tolist()]
        self.groups += groups

    def finish(self) -> None:
        """Draw to the end of the pass."""
        while self.draws.round_of(self.groups) == self.drawn[-1][1]:
            self.draw(1)

    def of_round(self, round_: int) -> list[int]:
        return [part for _, found, part in self.drawn if found == round_]

    def moved(self) -> int:
        """Count, one by one, draws in lanes that were another node's earlier in their pass."""
        held: dict[int, Mask] = {}  # by pass: lanes that were always this node's
        turns, mask, count = [*self.lanes], lane_mask(None), 0
        for group, round_, part in self.drawn:
            while turns and turns[0][0] <= group:
                mask = lane_mask(turns.pop(0)[1])
            held[round_] = held.get(round_, mask) & mask
            count += not held[round_][LANE_OF[part]]
        return count


def in_phases(seed: int, phases: list[tuple[int, int, list[int]]]) -> tuple[list[Node], int]:
    """Return all nodes there ever were, and how many there are in the last phase."""
    nodes: list[Node] = []
    listed = 0
    for total, more, groups in phases:
        listed = min(PARTS, listed + more)
        nodes += [Node(number, seed) for number in range(len(nodes), total)]
        for node in nodes[:total]:
            node.join(total, listed)
            node.draw(groups[node.number])
    return nodes, phases[-1][0]


PHASES = st.lists(
    st.tuples(st.integers(1, 4), st.integers(40, 80), st.lists(st.integers(1, 25), min_size=4, max_size=4)),
    min_size=2,
    max_size=5,
)  # fmt: skip


@pytest.mark.mutant(
    3,
    "growcache.sampling.stratum_draws:StratumDraws._moved_among",
    "[lane_mask(one.edition.lanes) for one in run.earlier]",
    "[lane_mask(run.earlier[-1].edition.lanes)]",
)
@settings(max_examples=15)
@given(st.integers(0, 9), PHASES)
def test_whatever_the_resizes_nodes_cover_all_and_draw_twice_what_is_reported(
    seed: int, phases: list[tuple[int, int, list[int]]]
) -> None:
    check_resizes(seed, phases)


def test_resizes_between_few_and_many_nodes_do_the_same() -> None:
    many = FEW_NODES + 2
    check_resizes(0, [(n, 80, [2] * many) for n in (2, many, many - 1, 3)])


def check_resizes(seed: int, phases: list[tuple[int, int, list[int]]]) -> None:
    nodes, total = in_phases(seed, phases)
    present, covered = nodes[:total], set[int]()
    for node in present:
        left = node.draws.moved(node.groups)
        ahead = node.draws.round_of(node.groups) > node.drawn[-1][1]
        node.finish()
        drawn = node.draws.moved(node.groups)
        assert drawn == (left[0] + left[1], 0)
        assert left[1] == 0 or not ahead
        covered |= set(node.of_round(node.drawn[-1][1]))
    assert covered == set(range(min(PARTS, sum(more for _, more, _ in phases))))

    for node in nodes:
        assert node.draws.moved(node.groups)[0] == node.moved()
        for round_ in {round_ for _, round_, _ in node.drawn}:
            assert max(Counter(node.of_round(round_)).values()) == 1
    # Within a pass a part comes once from each owner of its lane; all but the first of them know,
    # unless they came later than the pass began.
    first = Counter(part for node in nodes for part in node.of_round(0))
    late = sum(len(node.of_round(0)) for node in nodes[phases[0][0] :])
    assert sum(first.values()) - len(first) <= sum(node.moved() for node in nodes) + late


@pytest.mark.parametrize("node", [0, 1])
def test_a_lane_that_comes_back_brings_only_what_was_not_drawn(node: int) -> None:
    """2 → 3 → 2 nodes: what a node drew itself, before its lane went, does not come again."""
    one = Node(node, 1)
    one.join(2, PARTS)
    one.draw(10)
    assert one.draws.moved(one.groups) == (0, 0)
    one.join(3, PARTS)
    one.draw(2)
    assert one.draws.moved(one.groups) == (0, 0)  # it lost lanes and got none
    one.join(2, PARTS)
    lost = lane_mask(owned_lanes(node, 2)) & ~lane_mask(owned_lanes(node, 3))
    known = {part for _, _, part in one.drawn}
    expected = {part for part in range(PARTS) if lost[LANE_OF[part]]} - known
    assert one.draws.moved(one.groups) == (0, len(expected))
    one.finish()
    assert one.draws.moved(one.groups) == (len(expected), 0)
    assert expected <= set(one.of_round(0))
    one.draw(5)
    assert one.draws.moved(one.groups) == (len(expected), 0)  # another pass moves nothing


def restarted(node: Node) -> Draws:
    """The draws as a service has them that reads the notes of the one before."""
    notes = DrawNotes(orjson.loads(orjson.dumps(node.notes.values([]))))
    found = Draws(node.seed, SIZING, notes=notes)
    for one in node.editions:
        found.add(one)
    found.recall()
    return found


@pytest.mark.mutant(
    3, "growcache.sampling.draw_notes:DrawNotes.place", "found[0] == edition", "True"
)
@pytest.mark.parametrize("grows", [False, True])
@settings(max_examples=5)
@given(seed=st.integers(0, 9), phases=PHASES)
def test_a_start_with_notes_draws_and_reports_the_same(
    seed: int, phases: list[tuple[int, int, list[int]]], *, grows: bool
) -> None:
    nodes, total = in_phases(seed, phases)
    for node in nodes[:total]:
        if grows:  # after a look at a group that then is of the new edition
            node.draws.group(node.groups)
            node.join(total + 1, PARTS)
        reported = node.draws.moved(node.groups)
        again = restarted(node)
        assert again.moved(node.groups) == reported
        for group in (*range(node.groups, node.groups + 9), *range(node.groups)):
            one, other = again.group(group), node.draws.group(group)
            assert one is not None
            assert other is not None
            assert (one.parts.tolist(), one.round) == (other.parts.tolist(), other.round)


def test_notes_save_the_walk_through_all_earlier_draws() -> None:
    """Without them a service that drew 10^7 parts of 125 nodes took minutes to start."""
    parts, lanes = 2 * NOTED_POSITIONS, owned_lanes(0, 2)
    made = edition(0, parts, owned=lambda p: p % 2 == 0, lanes=lanes)
    first = DrawNotes()
    drawn_by(0, SIZING, [made], notes=first).group(parts // 2 // 8 - 100)
    assert first.are_due
    second = DrawNotes(first.values([]))
    draws = drawn_by(0, SIZING, [made], notes=second)
    draws.recall()
    draws.group(parts // 2 // 8 - 99)
    assert not second.are_due


def test_notes_of_other_editions_are_dropped() -> None:
    known = [Edition(0, 9, "a", 0, "00"), Edition(1, 18, "b", 4, "01")]
    notes = DrawNotes()
    notes.note_own(known[0], 7, 9)
    stored = notes.values(known[:1])
    assert DrawNotes.of(stored, known).own(known[0]) == 7
    assert DrawNotes.of(stored, [replace(known[0], digest="c")]).own(known[0]) is None
    assert DrawNotes.of(notes.values(known), known[:1]).own(known[0]) is None
    assert DrawNotes.of(None, known).own(known[0]) is None
