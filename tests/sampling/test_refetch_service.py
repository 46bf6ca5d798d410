"""Wishes (protocol 24): shards that a checkpoint names come back, byte for byte, or are refused."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.cache.cache import Cache
from growcache.cache.check import check
from growcache.cache.index.reader import read_index
from growcache.cache.index.schema import ShardRow
from growcache.cache.reader_lease import Lease
from growcache.cache.shard_refetches import REFUSED_META, RefetchOutcome, refetch_outcomes
from growcache.sampling.group_queue import LONGEST_DELAY_SECONDS, GroupQueue, shards_by_group
from growcache.sampling.rate_limiter import LimiterInputs, decide
from tests.cache.making import config as bounded
from tests.sampling.services import (
    digests,
    make_source,
    run,
    service,
    status,
    wait_until,
    write_config,
)

OTHER_BYTES = "0" * 32


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_source(tmp_path_factory.mktemp("remote") / "objects")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, url: str) -> Path:
    """A cache of 1 MB that is full and has no reader."""
    config = write_config(
        tmp_path_factory.mktemp("filled") / "c.yaml", url, cache={"max_bytes": 1_000_000}
    )
    assert run(config, "--until-full")[0] == 0
    return config.with_suffix("")


@pytest.fixture
def cache(filled: Path, tmp_path: Path) -> Path:
    shutil.copytree(filled, tmp_path / "c")
    return tmp_path / "c"


def live(cache: Path) -> dict[int, ShardRow]:
    return {row.number: row for row in read_index(cache).shards if row.samples}


def evict(cache: Path, numbers: Iterable[int]) -> dict[int, str]:
    """Let shards leave a cache; return the digests that they had."""
    gone = {number: live(cache)[number].digest for number in numbers}
    with Cache.open(cache, bounded(cache, max_bytes=1_000_000)) as it:
        assert sorted(it.evict(gone)) == sorted(gone)
    return gone


def tight(cache: Path, url: str, path: Path) -> Path:
    """A config whose bound leaves no room for more than the cache holds."""
    config = bounded(cache, max_bytes=1_000_000)
    with Cache.open(cache, config) as it:
        it.space.catalog_bytes = (cache / "catalog.bin").stat().st_blocks * 512
        bound = it.max_bytes - it.bytes_left()
    return write_config(path, url, cache={"path": str(cache), "max_bytes": bound})


@contextmanager
def wishing(cache: Path, wishes: dict[int, str]) -> Iterator[Lease]:
    with Lease.create(cache, "resumed", [], wishes=wishes) as lease:
        yield lease


def fates(cache: Path, lease: Lease) -> dict[int, RefetchOutcome]:
    return refetch_outcomes(read_index(cache), lease.wishes)


def wait_for(state: str, cache: Path, lease: Lease) -> None:
    """Wait until all wishes of the lease have come to this."""
    wait_until(lambda: all_are(state, fates(cache, lease)))


def all_are(state: str, found: dict[int, RefetchOutcome]) -> bool:
    return {outcome.state for outcome in found.values()} == {state}


def test_rule_24_shards_come_back_byte_for_byte_into_a_full_cache_that_nobody_reads(
    cache: Path, url: str
) -> None:
    """With min_uses 1 nothing may be evicted, but for wishes."""
    before, totals = digests(cache), read_index(cache).totals
    gone = evict(cache, list(live(cache))[-3:])
    config = tight(cache, url, cache.parent / "tight.yaml")
    with wishing(cache, gone) as lease:
        assert all_are("pending", fates(cache, lease))
        assert status(cache).wishes == 3
        with service(config):
            wait_for("live", cache, lease)
            wait_until(lambda: status(cache).wishes == 0)
            names = [f"{n:08d}{suffix}" for n in gone for suffix in (".tfrecord", ".json")]
            after = digests(cache)
            assert {name: after[name] for name in names} == {n: before[n] for n in names}
            assert status(cache).refetched_samples == sum(live(cache)[n].samples for n in gone)
    now = read_index(cache).totals
    assert now.refetched_shards == 3
    assert now.evicted_shards > 0, "there was room: the test says nothing"
    assert (now.drawn, now.drawn_parts) == (totals.drawn, totals.drawn_parts)
    assert now.drawn == now.samples + now.evicted_samples
    assert [f for f in check(cache) if f.severity == "error"] == []


@pytest.mark.slow
def test_rule_24_a_fresh_cache_draws_the_same_bytes(
    cache: Path, tmp_path: Path, url: str
) -> None:
    rows = live(cache)
    wishes = {number: rows[number].digest for number in sorted(rows)[-3:]}
    config, here = write_config(tmp_path / "here.yaml", url), tmp_path / "here"
    assert run(config, "--samples", "1")[0] == 0
    with wishing(here, wishes) as lease:
        with service(config, "--set", "sampling.max_bytes_per_second=150000"):
            wait_for("live", here, lease)
            assert set(live(here)) < set(rows), "all was drawn, not only what was wished for"
        assert run(config, "--until-full")[0] == 0
    expected = digests(cache)
    assert {name: digests(here)[name] for name in expected} == expected
    totals = read_index(here).totals
    assert (totals.drawn, totals.refetched_samples) == (120, 0)
    assert status(here).complete


def test_rule_24_other_bytes_are_refused_once_and_nothing_of_them_is_committed(
    cache: Path, url: str
) -> None:
    gone = evict(cache, list(live(cache))[:2])
    config = write_config(cache.parent / "c.yaml", url)
    with wishing(cache, dict.fromkeys(gone, OTHER_BYTES) | {10**9: OTHER_BYTES}) as lease:
        with service(config):
            wait_for("refused", cache, lease)
            found = fates(cache, lease)
            assert "rewritten" in found[min(gone)].reason
            assert "100,000 groups ahead" in found[10**9].reason
            wait_until(lambda: status(cache).wishes == 0 and status(cache).drawn >= 120)
        assert not set(gone) & set(live(cache))
        assert read_index(cache).totals.refetched_samples == 0
    assert read_index(cache).meta[REFUSED_META]
    with Cache.open(cache, bounded(cache)):
        assert not read_index(cache).meta[REFUSED_META], "no reader asks any more"


@pytest.mark.slow
def test_rule_24_an_object_that_is_gone_is_named(cache: Path, tmp_path: Path, url: str) -> None:
    # One stays: where nothing answers, it is the store that is away.
    objects, elsewhere = Path(url).parent, tmp_path / "elsewhere"
    elsewhere.mkdir()
    gone_files = sorted(objects.iterdir())[1:]
    for path in gone_files:
        path.rename(elsewhere / path.name)
    try:
        gone = evict(cache, list(live(cache))[:1])
        config = write_config(cache.parent / "c.yaml", url)
        with wishing(cache, gone) as lease, service(config):
            wait_for("refused", cache, lease)
            reason = fates(cache, lease)[min(gone)].reason
            assert "removed" in reason
            assert ".npy" in reason
            assert status(cache).holes == 0, "holes of a refused shard are counted"
    finally:
        for path in gone_files:
            (elsewhere / path.name).rename(path)


@pytest.mark.slow
def test_rule_24_wishes_that_exceed_the_bound_are_refused_with_the_figures(
    cache: Path, url: str
) -> None:
    config = write_config(cache.parent / "c.yaml", url, cache={"max_bytes": 1_000_000})
    wishes = dict.fromkeys(range(100, 200), OTHER_BYTES)
    with wishing(cache, wishes) as lease, service(config):
        wait_for("refused", cache, lease)
        assert "cache.max_bytes leaves" in fates(cache, lease)[100].reason


@pytest.mark.slow
def test_rule_24_who_keeps_the_room_for_wishes_is_named(cache: Path, url: str) -> None:
    gone = evict(cache, list(live(cache))[:3])
    config = tight(cache, url, cache.parent / "tight.yaml")
    greedy = Lease.create(cache, "greedy", live(cache))
    with greedy, wishing(cache, gone) as lease, service(config):
        wait_until(lambda: "checkpoint" in (status(cache).waiting_for or ""))
        message = status(cache).waiting_for or ""
        assert "greedy" in message
        assert str(os.getpid()) in message
        greedy.close()
        wait_for("live", cache, lease)


def test_wishes_come_first_and_only_the_room_for_them_counts() -> None:
    ready = LimiterInputs(group_bytes=10, room_bytes=100)
    verdict = decide(LimiterInputs(refetches=2, complete=True))
    assert not verdict.granted
    assert not verdict.final
    assert "refetches first: 2 groups" in (verdict.waiting_for or "")
    assert "listing" in (
        decide(LimiterInputs(refetches=1, refetches_unlisted=True)).waiting_for or ""
    )
    assert decide(LimiterInputs(for_refetch=True, complete=True, evicts=False)).granted
    assert decide(ready).granted
    full = LimiterInputs(for_refetch=True, group_bytes=10, evictable_bytes=4, holders="job a")
    assert "job a" in (decide(full).waiting_for or "")
    spent = decide(LimiterInputs(for_refetch=True, egress_bytes=9, max_egress_bytes=9))
    assert "max_egress" in (spent.waiting_for or "")


@given(st.lists(st.integers(0, 60), unique=True), st.integers(1, 4))
def test_groups_of_wishes_keep_the_order_in_which_they_were_first_asked_for(
    numbers: list[int], group_shards: int
) -> None:
    groups = shards_by_group(numbers, group_shards)
    assert sorted(n for mine in groups.values() for n in mine) == sorted(numbers)
    assert list(groups) == list(dict.fromkeys(n // group_shards for n in numbers))
    assert all(n // group_shards == group for group, mine in groups.items() for n in mine)


_STEPS = st.lists(
    st.tuples(st.sampled_from(["wish", "take", "done", "fail", "die"]), st.integers(0, 12)),
    max_size=80,
)


@given(_STEPS)
def test_the_queue_fills_what_is_wished_for_first_and_loses_no_group(
    steps: list[tuple[str, int]],
) -> None:
    """Against a model: what is committed, what is filled, what is wished for."""
    queue, committed, filling, now = GroupQueue(3, [0, 2]), {1}, [], 0.0
    issued = 3
    wished: list[int] = []
    for step, number in steps:
        now += LONGEST_DELAY_SECONDS
        if step == "wish":
            wished = [n for n in (number, number + 3) if n not in wished or n == number]
            queue.follow_refetches(wished)
        elif step == "take":
            wish = queue.due_refetch(now)
            expected = [g for g in wished if g not in filling]
            assert wish == (expected[0] if expected else None)
            group = wish if wish is not None else queue.due(now)
            group = queue.next_new if group is None else group
            assert group not in filling
            assert group not in committed or group == wish
            queue.start(group, again=group in committed)
            issued = max(issued, group + 1)
            filling.append(group)
        elif filling:
            group = filling.pop(0)
            if step == "done":
                queue.done(group)
                committed.add(group)
                wished = [g for g in wished if g != group]
                queue.follow_refetches(wished)
            elif step == "fail":
                queue.failed(group, now)
            else:
                queue.abandoned(group)
        assert queue.next_new == issued
        assert queue.settled == (set(range(issued)) <= committed)
    queue.follow_refetches([])
    now += LONGEST_DELAY_SECONDS
    for group in filling:
        queue.done(group)
        committed.add(group)
    while (due := queue.due(now)) is not None:
        assert due not in committed
        queue.start(due)
        queue.done(due)
        committed.add(due)
    assert queue.settled
    assert committed == set(range(issued))


def test_a_wish_that_fails_lets_new_groups_go_on() -> None:
    queue = GroupQueue(5, [])
    queue.follow_refetches([1, 2])
    assert queue.urgent == 2
    queue.start(1, again=True)
    assert (queue.urgent, queue.due_refetch(0.0)) == (2, 2)
    queue.failed(1, now=100.0)
    assert (queue.urgent, queue.due_refetch(100.0), queue.failing) == (1, 2, 0)
    assert queue.due_refetch(101.0) == 1
    assert queue.start(1, again=True) == 1


def test_old_groups_are_the_same_whenever_they_are_asked_for() -> None:
    from growcache.sampling.draws import Draws
    from growcache.sampling.sizing import Sizing
    from tests.sampling.drawn import drawn_by, edition

    sizing = Sizing(1, 1.0, 0, whole=True, shard_samples=32)
    asked = [5, 40, 41, 3, 900, 40, 0, 899, 6, 2000, 900]

    def fresh() -> Draws:
        mine = lambda parts: parts % 3 == 0  # noqa: E731
        return drawn_by(
            7, sizing, [edition(0, 700, owned=mine), edition(1, 2000, 30, owned=mine)]
        )

    draws = fresh()
    for group in asked:
        found, expected = draws.group(group), fresh().group(group)
        assert found is not None
        assert expected is not None
        assert (found.round, found.edition) == (expected.round, expected.edition)
        assert np.array_equal(found.parts, expected.parts)
