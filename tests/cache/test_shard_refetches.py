"""Wishes as values: what a lease asks for, and what has become of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.cache.cache import Cache
from growcache.cache.directory import adopt
from growcache.cache.files import CacheLayout
from growcache.cache.index.reader import IndexView, read_index
from growcache.cache.index.schema import ShardRow, merge_ranges, split_range
from growcache.cache.lease_views import HELD, READ, LeaseView, read_leases
from growcache.cache.reader_lease import Lease
from growcache.cache.shard_refetches import (
    MOST_REFUSED,
    REFUSED_META,
    RefetchOutcome,
    judge_written,
    never_fits,
    pending_refetches,
    refetch_outcome,
    refetch_outcomes,
    refused_in_index,
    refused_meta,
    still_refused,
)
from tests.cache.making import add, need, opened, write


@pytest.fixture
def layout(tmp_path: Path) -> CacheLayout:
    layout = CacheLayout(tmp_path / "cache")
    adopt(layout)
    return layout


def live(number: int, digest: str) -> ShardRow:
    return ShardRow(number, number, number, 0, 8, 100, digest, 0.0)


def test_rule_24_a_lease_names_shards_that_are_not_there(layout: CacheLayout) -> None:
    with Lease.create(layout.root, "train", [7, 3], wishes={5: "five", 7: "seven"}) as lease:
        (view,) = read_leases(layout.root)
        assert view.numbers == lease.numbers == (3, 5, 7)
        assert view.wishes == lease.wishes == {5: "five", 7: "seven"}
        assert set(view.states) == {HELD}
        assert view.wishing == {5: "five", 7: "seven"}
        lease.mark_read(7, mapped=False)
        lease.drop([3])
        (view,) = read_leases(layout.root)
        assert view.wishing == {5: "five"}


def test_what_became_of_a_wish() -> None:
    view = IndexView(
        shards=[live(1, "one"), live(2, "two")],
        meta={REFUSED_META: refused_meta({(3, "three"): "objects are gone"})},
    )
    found = refetch_outcomes(view, {1: "one", 2: "other", 3: "three", 4: "four"})
    assert [found[n].state for n in (1, 2, 3, 4)] == ["live", "refused", "refused", "pending"]
    assert "shard 2" in found[2].reason
    assert found[3].reason == "objects are gone"
    assert refetch_outcomes(view, {3: "another digest"})[3].state == "pending"


_REFUSED = st.dictionaries(st.tuples(st.integers(0, 50), st.text(max_size=4)), st.text())


@given(_REFUSED)
def test_refused_wishes_come_back_from_the_index(refused: dict[tuple[int, str], str]) -> None:
    assert refused_in_index(refused_meta(refused)) == refused


def test_the_index_notes_so_many_refused_wishes_and_no_more() -> None:
    refused = {(number, "digest"): "gone" for number in range(2 * MOST_REFUSED)}
    assert list(refused_in_index(refused_meta(refused))) == list(refused)[:MOST_REFUSED]


_THERE = st.dictionaries(st.integers(0, 9), st.sampled_from(["a", "ab", "c"]), max_size=6)
# Readers may know the beginning of a digest alone, or nothing of it.
_DIGESTS = st.sampled_from(["a", "ab", "b", "c", ""])
_WISHES = st.dictionaries(st.integers(0, 9), _DIGESTS, max_size=6)
_PAIRS = st.dictionaries(st.tuples(st.integers(0, 9), _DIGESTS), st.just("no"))


def lease(name: str, wishes: dict[int, str], states: bytes | None = None) -> LeaseView:
    numbers = tuple(sorted(wishes))
    return LeaseView(
        name=name,
        job="train",
        host="here",
        pid=1,
        command="python",
        created=float(len(name)),  # the longer the name the younger
        open=True,
        closed=False,
        numbers=numbers,
        states=bytes(len(numbers)) if states is None else states,
        wishes=wishes,
    )


@given(_WISHES, _WISHES, _THERE, _PAIRS)
def test_each_wish_is_pending_live_or_refused_and_readers_see_the_same(
    older: dict[int, str],
    younger: dict[int, str],
    there: dict[int, str],
    refused: dict[tuple[int, str], str],
) -> None:
    leases = [lease("younger", younger), lease("old", older)]
    refused = still_refused(leases, there, refused)
    asked = {*older.items(), *younger.items()}
    assert set(refused) <= asked, "what nobody asks for is forgotten"
    todo = pending_refetches(leases, there, refused)
    assert not set(todo) & set(there)
    assert not set(todo.items()) & set(refused)
    first = [number for number in sorted(older) if todo.get(number) == older[number]]
    assert list(todo)[: len(first)] == first
    for number, digest in asked:
        found = refetch_outcome(number, digest, there.get(number), refused).state
        assert found == "pending" or todo.get(number) != digest
        assert found != "pending" or number in todo
        assert (found == "live") == (number in there and there[number].startswith(digest))


def test_a_wish_that_was_read_or_whose_reader_is_gone_is_none() -> None:
    read = lease("a", {1: "a", 2: "b"}, bytes([READ, HELD]))
    assert pending_refetches([read], (), {}) == {2: "b"}
    dead = LeaseView("b", "train", "", 1, "", 0.0, False, False, (3,), bytes(1), {3: "c"})
    assert pending_refetches([dead], (), {}) == {}


@given(_THERE, st.frozensets(st.integers(0, 9)), _WISHES)
def test_only_shards_of_the_wished_digest_return(
    written: dict[int, str], known: frozenset[int], wishes: dict[int, str]
) -> None:
    merits = judge_written(written, known, wishes)
    assert merits.fresh == set(written) - known
    assert all(written[n].startswith(wishes[n]) for n in merits.returned)
    assert not any(written[n].startswith(wishes[n]) for n in merits.denied)
    assert merits.returned | merits.denied == set(written) & known & set(wishes)


def test_what_exceeds_the_bound_by_itself_is_said_with_the_figures() -> None:
    wishing = lease("a", {1: "a", 2: "b"})
    assert never_fits(wishing, {1: 60, 2: 50}, capacity=110) is None
    assert never_fits(wishing, {1: 60, 2: 50}, capacity=109) == (110, 110)


_ROWS = st.lists(st.integers(0, 9), min_size=1, max_size=20)


@given(_ROWS, st.data())
def test_a_shard_that_returns_leaves_its_range_and_the_sums_stay(
    samples: list[int], data: st.DataObject
) -> None:
    merged = merge_ranges([(n, n, 1, count) for n, count in enumerate(samples)])
    number = data.draw(st.integers(0, len(samples) - 1))
    (row,) = [row for row in merged if row[0] <= number <= row[1]]
    pieces = split_range(row, number, samples[number])
    covered = {n for first, last, *_ in pieces for n in range(first, last + 1)}
    assert covered == set(range(row[0], row[1] + 1)) - {number}
    assert sum(piece[2] for piece in pieces) == row[2] - 1
    if pieces:
        assert sum(piece[3] for piece in pieces) == row[3] - samples[number]


def refetch(cache: Cache, number: int, count: int = 8) -> None:
    """What a sampler and the supervisor do about a wish."""
    assert cache.reserve("again", need(number, count)), "no room"
    cache.commit("again", [write(cache.layout, "again", number, count)])


def balanced(cache: Cache) -> bool:
    t = cache.totals()
    return t.drawn == t.samples + t.evicted_samples + t.lost_samples


def test_rule_24_a_retired_shard_lives_again_where_its_own_lease_would_keep_it(
    tmp_path: Path,
) -> None:
    with opened(tmp_path / "cache") as cache:
        add(cache, 0)
        add(cache, 1)
        digest = read_index(cache.layout.root).shards[0].digest
        with Lease.create(cache.layout.root, "first", [0]):
            assert cache.evict([0]) == ()
            with Lease.create(cache.layout.root, "second", [], wishes={0: digest}):
                cache.poll_leases(1.0)
                view = read_index(cache.layout.root)
                assert refetch_outcomes(view, {0: digest}) == {0: RefetchOutcome("live")}
                assert view.totals.evicted_samples == view.totals.refetched_samples == 0
                assert dict(cache.refetch_queue.pending) == {}
                assert [c.number for c in cache.candidates()] == [0, 1]
                assert cache.evict([0]) == ()
                assert 0 in {row.number for row in read_index(cache.layout.root).shards}
            cache.poll_leases(2.0)
            assert balanced(cache)


@pytest.mark.parametrize("pruned", [False, True])
def test_rule_24_what_returns_is_not_drawn_twice(tmp_path: Path, pruned: bool) -> None:
    with opened(tmp_path / "cache") as cache:
        for number in range(4):
            add(cache, number)
        digest = {row.number: row.digest for row in read_index(cache.layout.root).shards}
        cache.evict([0, 1, 2])
        if pruned:
            with cache.index_writer.index.transaction():
                cache.index_writer.index.prune_deleted(0)
            assert cache.sizes([1]) == {}
        before = cache.totals()
        with Lease.create(cache.layout.root, "train", [], wishes={1: digest[1]}):
            cache.poll_leases(1.0)
            assert dict(cache.refetch_queue.pending) == {1: digest[1]}
            refetch(cache, 1)
            assert dict(cache.refetch_queue.pending) == {}
            now = cache.totals()
            assert (now.drawn, now.drawn_shards) == (before.drawn, before.drawn_shards)
            assert (now.evicted_samples, now.refetched_samples) == (16, 8)
            assert now.evicted_shards == 2
            assert balanced(cache)
            assert cache.unfinished(4, 1) == []
            refetch(cache, 1)  # a second report of the same: nothing
            assert cache.totals() == now
    with opened(tmp_path / "cache") as cache:
        assert balanced(cache)
        cache.evict([1])
        assert cache.totals().evicted_samples == 24
        assert balanced(cache)


def test_rule_24_a_lost_shard_returns_too(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    with opened(root) as cache:
        add(cache, 0)
        add(cache, 1)
        digest = read_index(root).shards[0].digest
    CacheLayout(root).shard(0).unlink()
    with opened(root) as cache, Lease.create(root, "train", [], wishes={0: digest}):
        assert (cache.totals().lost_shards, cache.totals().lost_samples) == (1, 8)
        assert balanced(cache)
        cache.poll_leases(1.0)
        refetch(cache, 0)
        assert (cache.totals().lost_shards, cache.totals().evicted_shards) == (0, 0)
        assert balanced(cache)


def test_rule_24_a_rebuilt_index_counts_what_it_did_not_know(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    with opened(root) as cache:
        for number in range(3):
            add(cache, number)
        digest = read_index(root).shards[1].digest
        cache.evict([1])
    CacheLayout(root).index.unlink()
    with opened(root) as cache, Lease.create(root, "train", [], wishes={1: digest}):
        assert cache.totals().drawn == 16
        cache.poll_leases(1.0)
        refetch(cache, 1)
        assert (cache.totals().drawn, cache.totals().evicted_shards) == (24, 0)
        assert balanced(cache)


@pytest.mark.mutant(
    24,
    "growcache.cache.shard_refetches:judge_written",
    "is_wished(written[n], wishes[n])",
    "written[n]",
)
def test_rule_24_other_bytes_are_refused_and_never_installed(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    with opened(root) as cache:
        add(cache, 0)
        cache.evict([0])
        before = cache.totals()
        with Lease.create(root, "train", [], wishes={0: "0" * 32}) as wishing:
            cache.poll_leases(1.0)
            refetch(cache, 0)
            assert refetch_outcomes(read_index(root), wishing.wishes)[0].state == "refused"
            assert list(cache.layout.shards.iterdir()) == []
            assert list(cache.layout.incoming.iterdir()) == []
            assert cache.totals() == before
            cache.poll_leases(2.0)
            assert dict(cache.refetch_queue.pending) == {}, "it is tried again"
        cache.poll_leases(3.0)
        assert read_index(root).meta[REFUSED_META] == {}, "nobody asks any more"
