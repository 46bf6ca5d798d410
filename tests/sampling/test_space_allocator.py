"""When shards are retired ahead: once room has run out, as much as comes while readers hold on."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from growcache.cache.cache import Cache
from growcache.cache.eviction_policy import RETIRED_SHARE
from growcache.cache.index.reader import read_index
from growcache.cache.index.schema import KEPT_JOBS
from growcache.cache.lease_views import LeaseCounters
from growcache.cache.reader_lease import Lease
from growcache.config import CacheConfig
from growcache.sampling.space_allocator import SpaceAllocator
from tests.cache.making import MAX_BYTES, add, opened
from tests.dead_readers import killed
from tests.disks import filled_up, small_disk

SHARDS = 7
FIFTH = int(MAX_BYTES * RETIRED_SHARE)


class Clock:
    """The time as the allocator sees it."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    with opened(tmp_path / "cache") as made:
        for number in range(SHARDS):
            add(made, number, 30)
        yield made


@pytest.fixture
def lease(cache: Cache) -> Iterator[Lease]:
    """A reader that holds everything."""
    with Lease.create(cache.layout.root, "train", range(SHARDS)) as held:
        cache.poll_leases(0.0)
        yield held


def allocator_of(cache: Cache, clock: Clock | None = None) -> SpaceAllocator:
    bounds = {"path": cache.layout.root, "max_bytes": MAX_BYTES, "min_uses": 0}
    return SpaceAllocator(
        CacheConfig.model_validate(bounds), cache, evicts=True, clock=clock or Clock()
    )


def passes(allocator: SpaceAllocator, clock: Clock, seconds: float, nbytes: int) -> None:
    """Let time go by, in which shards come."""
    allocator.keep_ahead()
    clock.now += seconds
    allocator.filled(nbytes)


@pytest.mark.mutant(
    21,
    "growcache.sampling.space_allocator:SpaceAllocator.keep_ahead",
    "self.at_bound and self.evicts",
    "self.evicts",
)
def test_a_cache_that_may_yet_hold_everything_loses_nothing(
    cache: Cache, lease: Lease, clock: Clock
) -> None:
    allocator = allocator_of(cache, clock)
    passes(allocator, clock, 1.0, MAX_BYTES)
    allocator.keep_ahead()
    assert cache.totals().retired_shards == 0


@pytest.mark.mutant(
    21,
    "growcache.sampling.space_allocator:SpaceAllocator.keep_ahead",
    "coming >= wanted",
    "True",
)
def test_what_comes_while_a_snapshot_is_held_is_retired_ahead(
    cache: Cache, lease: Lease, clock: Clock
) -> None:
    allocator = allocator_of(cache, clock)
    allocator.make_room(cache.bytes_left() + 1)  # room has run out
    first = cache.totals().retired_shards
    assert 1 <= first < SHARDS / 2
    lease.drop(range(first))  # the reader lets go of those, and their places are filled
    cache.poll_leases(0.0)
    assert cache.totals().retired_shards == 0
    assert cache.reserve("others", cache.bytes_left())
    passes(allocator, clock, 1.0, 4096)
    allocator.keep_ahead()
    assert cache.totals().retired_shards == 1, "a slow store needs little, but one at least"
    passes(allocator, clock, 1.0, MAX_BYTES)
    allocator.keep_ahead()
    retired = cache.totals().retired_bytes
    assert cache.totals().retired_shards > 1
    assert retired <= FIFTH
    allocator.keep_ahead()
    assert cache.totals().retired_bytes == retired


def test_without_readers_nothing_is_retired_ahead(cache: Cache, clock: Clock) -> None:
    allocator = allocator_of(cache, clock)
    allocator.make_room(cache.bytes_left() + 1)
    passes(allocator, clock, 1.0, MAX_BYTES)
    allocator.keep_ahead()
    assert cache.totals().retired_shards == 0


def resumable(cache: Cache, job: str, numbers: Iterable[int]) -> Lease:
    """The lease of a reader that gave a state, so that it may come back."""
    return Lease.create(
        cache.layout.root, job, numbers, counters=LeaseCounters(gave_state=True)
    )


def kill(lease: Lease) -> None:
    with killed(lease):
        lease.close()


@pytest.mark.mutant(
    21,
    "growcache.sampling.space_allocator:SpaceAllocator._that_clear",
    "[candidate for candidate in candidates if candidate.number not in kept]",
    "list(candidates)",
)
def test_a_reader_who_died_does_not_stop_the_turnover_of_others(cache: Cache) -> None:
    """What is kept for it is neither retired ahead nor counted as on its way out."""
    root, few = cache.layout.root, 2
    dead = resumable(cache, "dead", range(few))
    cache.retire([0])
    with Lease.create(root, "train", range(few, SHARDS)):
        kill(dead)
        cache.poll_leases(0.0)
        assert cache.lease_table.kept == set(range(few))
        assert cache.clearing_bytes == 0
        allocator_of(cache).make_room(cache.bytes_left() + 1)
        numbers = {candidate.number for candidate in cache.candidates()}
        gone = set(range(SHARDS)) - numbers - {0}
        assert gone
        assert min(gone) >= few
        assert cache.clearing_bytes > 0


@pytest.mark.mutant(
    21,
    "growcache.cache.lease_table:LeaseTable._summary",
    "kept = self._dead_readers.hold(self.leases)",
    "kept = self._dead_readers.hold(self.leases).difference(*living_shards)",
)
def test_a_reader_that_died_and_was_started_again_has_what_is_kept(cache: Cache) -> None:
    """Retiring what the dead lease still keeps frees nothing: it would empty the cache."""
    root, allocator = cache.layout.root, allocator_of(cache)
    kill(resumable(cache, "train", range(SHARDS)))
    cache.poll_leases(0.0)
    kept = cache.lease_table.kept
    assert kept
    for _ in range(3):
        live = [candidate.number for candidate in cache.candidates()]
        with Lease.create(root, "train", live) as lease:
            cache.poll_leases(0.0)
            allocator.make_room(cache.bytes_left() + 1)
            for number in live:
                lease.mark_read(number, mapped=False)
        cache.poll_leases(0.0)
    assert kept <= {candidate.number for candidate in cache.candidates()}


@pytest.mark.mutant(
    21,
    "growcache.cache.dead_readers:DeadReaders.hold",
    "row is not None and nbytes <= left",
    "row is not None",
)
def test_all_dead_readers_together_keep_a_fifth_of_the_bound(cache: Cache) -> None:
    """The latest one first; a shard without a reader goes when its room is needed."""
    allocator = allocator_of(cache)
    kill(resumable(cache, "old", range(SHARDS)))
    cache.poll_leases(0.0)
    kill(resumable(cache, "new", range(SHARDS // 2, SHARDS)))
    cache.poll_leases(1.0)
    kept = cache.lease_table.kept
    sizes = {candidate.number: candidate.allocated for candidate in cache.candidates()}
    assert 0 < sum(sizes[number] for number in kept) <= FIFTH
    assert min(kept) >= SHARDS // 2
    assert {one.lease.job: one.seconds for one in cache.lease_table.kept_for()}["new"] == 600.0
    assert kept == {number for one in cache.lease_table.kept_for() for number in one.shards}
    for _ in range(SHARDS):
        allocator.make_room(cache.bytes_left() + 1)
    assert {candidate.number for candidate in cache.candidates()} == kept
    assert cache.lease_table.kept == kept
    cache.poll_leases(700.0)
    assert cache.lease_table.kept == frozenset()


def test_a_dead_reader_that_never_gave_a_state_keeps_nothing(cache: Cache) -> None:
    dead = Lease.create(cache.layout.root, "train", range(SHARDS))
    dead.mark_read(3, mapped=True)
    kill(dead)
    cache.poll_leases(0.0)
    assert cache.lease_table.kept == frozenset()
    assert cache.leases == []
    (used,) = [candidate.number for candidate in cache.candidates() if candidate.uses]
    assert used == 3
    assert not any(candidate.leased for candidate in cache.candidates())


def test_nobody_waits_for_a_dead_reader_to_use_what_it_does_not_keep(cache: Cache) -> None:
    """`min_uses` asks living jobs: the dead one uses nothing any more."""
    used = Lease.create(cache.layout.root, "train", range(SHARDS))
    used.mark_read(*range(SHARDS), mapped=False)
    used.close()
    kill(resumable(cache, "train", []))
    cache.poll_leases(0.0)
    assert {candidate.min_job_uses for candidate in cache.candidates()} == {1}


def test_a_reader_that_dies_again_and_again_keeps_most_of_the_cache(cache: Cache) -> None:
    """Each time it had read all but what was just retired, so that this is kept for it."""
    allocator, wanted = allocator_of(cache), cache.bytes_left() + 1
    for _ in range(3):
        live = [candidate.number for candidate in cache.candidates()]
        lease = resumable(cache, "train", live)
        cache.poll_leases(0.0)
        allocator.make_room(wanted)
        for candidate in cache.candidates():
            lease.mark_read(candidate.number, mapped=False)
        kill(lease)
        cache.poll_leases(0.0)
    largest = max(candidate.allocated for candidate in cache.candidates())
    assert cache.totals().retired_bytes <= 2 * FIFTH + largest
    assert cache.totals().shards


def test_who_waits_for_a_dead_reader_says_so(cache: Cache) -> None:
    root, allocator = cache.layout.root, allocator_of(cache)
    kill(resumable(cache, "train", range(SHARDS)))
    with Lease.create(root, "train", range(SHARDS)):
        cache.poll_leases(0.0)
        allocator.make_room(cache.bytes_left() + 1)
        assert "whose reader died and may come back" in allocator.awaited()


def test_a_full_disk_is_named_before_the_readers_whom_it_stops(tmp_path: Path) -> None:
    """They hold what must go, for their next snapshot needs room too."""
    with small_disk(tmp_path / "disk", 2 * MAX_BYTES) as disk, opened(disk / "cache") as cache:
        for number in range(SHARDS):
            add(cache, number, 30)
        with Lease.create(cache.layout.root, "train", range(SHARDS)):
            cache.poll_leases(0.0)
            allocator = allocator_of(cache)
            allocator.make_room(cache.bytes_left() + 1)
            with filled_up(disk):
                assert allocator.awaited().startswith("free space on the disk")
            assert allocator.awaited().startswith("readers to release shards")


def test_what_is_wished_for_stays_until_it_was_read_and_who_waits_says_so(cache: Cache) -> None:
    digests = {row.number: row.digest for row in read_index(cache.layout.root).shards}
    with Lease.create(cache.layout.root, "train", [], wishes=digests):
        cache.poll_leases(0.0)
        cache.max_bytes = MAX_BYTES // 2
        allocator = allocator_of(cache)
        allocator.shrink()
        assert cache.totals().retired_shards == 0
        assert "a snapshot is held" in allocator.awaited_to_shrink()[0]
        assert "a snapshot is held" in allocator.awaited() == allocator.unused()


def test_uses_of_what_is_gone_are_not_kept(cache: Cache) -> None:
    """A shard may go as soon as it was read, while its lease lives on: for ever, in the end."""
    with Lease.create(cache.layout.root, "train", range(SHARDS)) as lease:
        for number in range(SHARDS):
            lease.mark_read(number, mapped=False)
        assert cache.evict(range(SHARDS - 1)) == tuple(range(SHARDS - 1))
    cache.poll_leases(0.0)
    assert cache.lease_table.uses == {"train": {SHARDS - 1: 1}}


def test_nothing_is_retired_ahead_for_a_dead_reader(cache: Cache, clock: Clock) -> None:
    """A shard without a holder goes when its room is needed, and not before."""
    kill(resumable(cache, "train", range(SHARDS // 2)))
    cache.poll_leases(0.0)
    allocator = allocator_of(cache, clock)
    allocator.make_room(cache.bytes_left() + 1)
    assert cache.reserve("others", cache.bytes_left())
    live = cache.totals().shards
    passes(allocator, clock, 1.0, MAX_BYTES)
    allocator.keep_ahead()
    assert cache.totals().shards == live


def test_uses_of_jobs_of_long_ago_are_forgotten(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as made:
        add(made, 0)
        for number in range(KEPT_JOBS + 3):
            with Lease.create(made.layout.root, f"job {number}", [0]) as lease:
                lease.mark_read(0, mapped=False)
            made.poll_leases(float(number))
        left = made.lease_table.uses
        assert list(left) == [f"job {number}" for number in range(3, KEPT_JOBS + 3)]
    with opened(tmp_path / "cache") as made:
        assert made.lease_table.uses == left


@pytest.mark.mutant(
    18,
    "growcache.cache.lease_table:LeaseTable._summary",
    "may_live = frozenset[int]().union(*living_shards, *self._there.values())",
    "may_live = frozenset[int]().union(*living_shards)",
)
def test_what_cannot_be_read_and_is_held_protects_all_that_was_there(cache: Cache) -> None:
    path = cache.layout.leases / "later.lease"
    path.write_bytes(b"GCLEASE9 of another version")
    with path.open() as reader:
        fcntl.flock(reader, fcntl.LOCK_EX)
        cache.poll_leases(0.0)
        add(cache, SHARDS, 1)
        assert cache.evict(range(SHARDS + 1)) == (SHARDS,), "it came later"
        said = allocator_of(cache).awaited()
        assert "later.lease" in said
        assert f"pid {os.getpid()}" in said
    cache.poll_leases(1.0)
    assert cache.totals().retired_shards == 0
