"""A loader's report adds up, and warns once where training outruns the store."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator

import pytest

from growcache.cache.side_files import Edition
from growcache.loading.report import DeliveryCounts, PassFacts, Report
from growcache.loading.snapshot import Snapshot
from growcache.numpy import EpochLoader
from tests.filled import Filled


@pytest.fixture
def loader(cache: Filled) -> Iterator[EpochLoader]:
    with EpochLoader(cache.root, batch_size=10, min_samples=1) as made:
        yield made


def read(loader: EpochLoader, times: int = 1) -> Report:
    """Epochs over what is cached now, and the report after them."""
    loader.close()  # or the first one's snapshot may be older
    for _ in range(times):
        for _batch in loader:
            pass
    return loader.report


def replace(cache: Filled, old: tuple[int, ...], new: tuple[int, ...]) -> None:
    cache.retire(*old)
    cache.add(*new)


def test_the_effective_sample_size_is_that_of_the_uses(
    cache: Filled, loader: EpochLoader
) -> None:
    cache.add(0)
    assert read(loader, 2).ess_samples == pytest.approx(10)
    cache.add(1)
    report = read(loader)  # 10 samples were used 3 times, 10 once
    assert report.ess_samples == pytest.approx((30 + 10) ** 2 / (10 * 9 + 10 * 1))
    assert (report.samples, report.new_samples, report.cache_samples) == (20, 10, 20)
    assert (report.passes, report.uses_max, report.reuse) == (3, 3.0, 2.0)


def test_what_an_older_iterator_delivered_is_not_of_the_newer_ones_epoch(
    cache: Filled, loader: EpochLoader
) -> None:
    cache.add(0, 1, 2)
    older, newer = iter(loader), iter(loader)
    next(older)
    next(newer)
    del older
    assert sum(1 for _ in newer) == 2
    assert loader.report.samples == 30
    assert loader.report.reuse == pytest.approx(40 / 30)


def test_coverage_of_samples_and_of_objects(cache: Filled, loader: EpochLoader) -> None:
    cache.add(0)
    report = read(loader)
    assert (report.coverage_samples, report.coverage_objects) == (None, None)
    cache.cache.meta.add_edition(Edition(0, 40, "digest", 0))
    assert read(loader).coverage_objects is None  # not all is listed, or nothing ever will be
    cache.population(80.0)
    cache.add(1)
    report = read(loader)  # every sample of these caches is an object of its own
    assert report.coverage_objects == pytest.approx(20 / 40)
    assert report.coverage_samples == pytest.approx(20 / 80)
    replace(cache, (0,), (2,))
    assert read(loader).coverage_objects == pytest.approx(30 / 40)


def test_ages_are_those_of_the_snapshot(cache: Filled, loader: EpochLoader) -> None:
    cache.add(0, 1)
    report = read(loader)
    assert 0 <= report.age_seconds_mean <= report.age_seconds_max < 60


def test_shards_that_are_gone_count_on(cache: Filled, loader: EpochLoader) -> None:
    """The figures are those of all shards, as if each were known still."""
    uses: dict[int, int] = {}
    for number in range(40):
        cache.add(number)
        cache.retire(*range(number - 1))  # two are there
        times = 1 + number % 3
        report = read(loader, times)
        for each in range(max(0, number - 1), number + 1):
            uses[each] = uses.get(each, 0) + times
        total, squares = sum(uses.values()), sum(u**2 for u in uses.values())
        assert report.ess_samples == pytest.approx(10 * total**2 / squares)
        assert report.uses_max == max(uses.values())
        assert report.reuse == pytest.approx(total / len(uses))
        assert report.new_samples == (10 if times == 1 else 0)


def test_a_shard_that_is_gone_leaves_nothing_that_grows(cache: Filled) -> None:
    tally, sizes = DeliveryCounts(cache.root), list[int]()
    for number in range(40):
        cache.add(number)
        cache.retire(*range(number - 1))  # two are there
        with Snapshot.take(cache.root) as snapshot:
            tally.begin_pass(number, PassFacts.of(snapshot, 0.0))
            tally.deliver({row.number: row.samples for row in snapshot.shards}, 1)
            tally.enter(number)
        sizes.append(len(pickle.dumps(tally)))
    assert max(sizes[20:]) <= 1.05 * sizes[20]


def test_shards_that_a_snapshot_leaves_out_are_not_gone(cache: Filled) -> None:
    """As a limit on reuse does, until all are used as often."""
    cache.add(0, 1)
    tally = DeliveryCounts(cache.root)
    for number, without in enumerate([(), (0,), (), (0,), ()]):
        with Snapshot.take(cache.root, without=without) as snapshot:
            tally.begin_pass(number, PassFacts.of(snapshot, 0.0))
            tally.deliver({row.number: row.samples for row in snapshot.shards}, 1)
            tally.enter(number)
    report = tally.report()
    assert (report.reuse, report.uses_max) == (80 / 20, 5.0)


def test_what_is_told_late_of_a_shard_that_is_gone_is_no_new_sample(cache: Filled) -> None:
    cache.add(0)
    tally = DeliveryCounts(cache.root)
    for number in range(2):
        with Snapshot.take(cache.root) as snapshot:
            tally.begin_pass(number, PassFacts.of(snapshot, 0.0))
        tally.deliver({number: 5}, 1)
        tally.enter(number)
        replace(cache, (number,), (number + 1,))
    tally.deliver({0: 5, 1: 5}, 1)
    report = tally.report()
    assert (report.samples, report.new_samples, report.reuse) == (20, 15, 20 / 15)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "training outruns" in r.getMessage()]


def test_it_warns_once_where_a_turnover_takes_many_passes(
    cache: Filled, loader: EpochLoader, caplog: pytest.LogCaptureFixture
) -> None:
    cache.add(0, 1)
    with caplog.at_level(logging.WARNING):
        read(loader, 9)
        assert warnings_of(caplog) == []  # the cache is read often while it fills
        replace(cache, (0,), (2,))
        read(loader, 6)
        assert warnings_of(caplog) == []  # half of it was replaced
        replace(cache, (1,), (3,))
        report = read(loader, 6)
        assert report.reuse_recent > 4
        (text,) = warnings_of(caplog)
        assert "sampling.workers" in text
        for number in range(4, 8):
            replace(cache, (number - 2,), (number,))
            report = read(loader, 6)
        assert report.reuse_recent > 4
        assert len(warnings_of(caplog)) == 1


def test_recent_reuse_is_that_since_the_beginning_where_nothing_leaves_the_cache(
    cache: Filled, loader: EpochLoader
) -> None:
    cache.add(0, 1)
    report = read(loader, 3)
    assert (report.reuse, report.reuse_recent) == (3, 3)
    cache.add(2)
    report = read(loader, 1)
    assert report.reuse_recent == report.reuse


def test_it_does_not_warn_where_the_store_keeps_up(
    cache: Filled, loader: EpochLoader, caplog: pytest.LogCaptureFixture
) -> None:
    cache.add(0, 1)
    with caplog.at_level(logging.WARNING):
        for number in range(2, 10):
            replace(cache, (number - 2,), (number,))
            report = read(loader, 1)
    assert 0 < report.reuse_recent < 4
    assert warnings_of(caplog) == []
