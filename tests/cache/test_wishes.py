"""Wishes as values: what a lease asks for, and what has become of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.cache.files import Layout
from growcache.cache.index import IndexView, ShardRow
from growcache.cache.leases import HELD, Lease, read_leases
from growcache.cache.wishes import (
    MOST_REFUSED,
    REFUSED_META,
    outcomes,
    refused_meta,
    refused_of,
)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout = Layout(tmp_path / "cache")
    layout.create()
    return layout


def live(number: int, digest: str) -> ShardRow:
    return ShardRow(number, number, number, 0, 8, 100, digest, 0.0)


def test_rule_24_a_lease_names_shards_that_are_not_there(layout: Layout) -> None:
    with Lease.create(layout.root, "train", [7, 3], wishes={5: "five", 7: "seven"}) as lease:
        (view,) = read_leases(layout.root)
        assert view.numbers == lease.numbers == (3, 5, 7)
        assert view.wishes == lease.wishes == {5: "five", 7: "seven"}
        assert set(view.states) == {HELD}
        assert view.wishing() == {5: "five", 7: "seven"}
        lease.mark_read(7, mapped=False)
        lease.drop([3])
        (view,) = read_leases(layout.root)
        assert view.wishing() == {5: "five"}


def test_what_became_of_a_wish() -> None:
    view = IndexView(
        shards=[live(1, "one"), live(2, "two")],
        meta={REFUSED_META: refused_meta({(3, "three"): "objects are gone"})},
    )
    found = outcomes(view, {1: "one", 2: "other", 3: "three", 4: "four"})
    assert [found[n].state for n in (1, 2, 3, 4)] == ["live", "refused", "refused", "pending"]
    assert "shard 2" in found[2].reason
    assert found[3].reason == "objects are gone"
    assert outcomes(view, {3: "another digest"})[3].state == "pending"


_REFUSED = st.dictionaries(st.tuples(st.integers(0, 50), st.text(max_size=4)), st.text())


@given(_REFUSED)
def test_refused_wishes_come_back_from_the_index(refused: dict[tuple[int, str], str]) -> None:
    assert refused_of(refused_meta(refused)) == refused


def test_the_index_notes_so_many_refused_wishes_and_no_more() -> None:
    refused = {(number, "digest"): "gone" for number in range(2 * MOST_REFUSED)}
    assert list(refused_of(refused_meta(refused))) == list(refused)[:MOST_REFUSED]
