from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from growcache.cache.cache import Cache
from growcache.cache.eviction_policy import choose_evictions
from growcache.cache.files import CacheLayout, allocated_tree
from growcache.cache.index.reader import read_index
from growcache.cache.locks import FileLock
from growcache.cache.reader_lease import Lease
from growcache.cache.side_files import Edition, read_issued
from growcache.cache.status import read_status
from growcache.errors import CacheBusyError, CorruptShardError, FingerprintError
from tests.cache.making import (
    IDENTITY,
    KINDS,
    MAX_BYTES,
    OTHER,
    add,
    config,
    make,
    need,
    opened,
    permit_of,
    write,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def live(root: Path) -> list[int]:
    return [row.number for row in read_index(root).shards]


def test_a_committed_shard_is_seen_by_readers_and_survives_a_restart(root: Path) -> None:
    with opened(root) as cache:
        add(cache, 0)
        add(cache, 1, count=0)
        assert live(root) == [0, 1]
        before = cache.totals()
        assert (before.samples, before.drawn, before.holes) == (8, 8, 1)
        assert cache.layout.shard(0).exists()
        assert not cache.layout.shard(1).exists()
    with opened(root) as cache:
        assert cache.totals() == before
        assert cache.meta.issued == 1
        assert cache.meta.editions == [Edition(0, 100, "digest", 0)]
        assert cache.meta.identity == IDENTITY


@pytest.mark.mutant(
    12,
    "growcache.cache.files:allocated",
    "path.lstat().st_blocks * 512",
    "path.lstat().st_size",
)
def test_what_counts_is_what_the_disk_says(root: Path) -> None:
    with opened(root) as cache:
        for number in range(6):
            add(cache, number)
        shards = sum(p.stat().st_blocks * 512 for p in cache.layout.shards.iterdir())
        assert cache.totals().bytes == shards
        assert cache.bytes_used == shards + cache.space.budget.total
        assert allocated_tree(root) <= cache.bytes_used


def test_no_more_is_promised_than_there_is(root: Path) -> None:
    with opened(root) as cache:
        room = cache.bytes_left()
        assert cache.reserve("a", room - 10)
        assert not cache.reserve("b", 11)
        assert cache.reserve("b", 10)
        assert not cache.reserve("b", 11)
        assert cache.space.reserved == room, "a refused promise must leave the old one"
        cache.space.release("a")
        assert cache.bytes_left() == room - 10


def test_the_catalog_is_charged(root: Path) -> None:
    with opened(root) as cache:
        room = cache.bytes_left()
        cache.space.catalog_bytes = 8192
        assert cache.bytes_left() == room - 8192


def test_a_commit_settles_the_promise_and_leaves_nothing_incoming(root: Path) -> None:
    with opened(root) as cache:
        add(cache, 0)
        assert cache.space.reserved == 0
        assert not list(cache.layout.incoming.iterdir())


def test_a_shard_that_is_not_as_described_is_refused_and_removed(root: Path) -> None:
    with opened(root) as cache:
        sidecar = write(cache.layout, "p", 0)
        os.truncate(cache.layout.incoming_path("p", 0, ".tfrecord"), 100)
        with pytest.raises(CorruptShardError, match="expected shard 0"):
            cache.commit("p", [sidecar])
        assert not list(cache.layout.incoming.iterdir())
        assert not list(cache.layout.shards.iterdir())
        assert live(root) == []


def test_a_group_is_committed_whole_or_not_at_all(root: Path) -> None:
    with opened(root) as cache:
        shards = [write(cache.layout, "p", 0), write(cache.layout, "p", 1)]
        cache.layout.incoming_path("p", 1, ".json").unlink()
        with pytest.raises(CorruptShardError, match="did not write"):
            cache.commit("p", shards)
        assert not list(cache.layout.shards.iterdir())
        assert live(root) == []


def test_shards_of_another_configuration_are_refused(root: Path) -> None:
    with opened(root) as cache:
        sidecar, _ = make(0, identity=OTHER)
        with pytest.raises(FingerprintError, match="another configuration"):
            cache.commit("p", [sidecar])


def test_a_group_filled_again_keeps_the_shards_it_has(root: Path) -> None:
    with opened(root) as cache:
        add(cache, 0)
        rows = cache.commit("q", [write(cache.layout, "q", 0), write(cache.layout, "q", 1)])
        assert [row.number for row in rows] == [1]
        assert cache.totals().drawn == 16


def test_files_left_over_at_the_target_do_not_get_into_a_commit(root: Path) -> None:
    with opened(root) as cache:
        cache.layout.shard(0).write_bytes(b"left over")
        add(cache, 0, count=0)
        assert not cache.layout.shard(0).exists()


def test_an_evicted_shard_is_gone_and_stays_known(root: Path) -> None:
    with opened(root) as cache:
        for number in range(3):
            add(cache, number)
        room = cache.bytes_left()
        freed = cache.totals().bytes
        assert cache.evict([0, 2]) == (0, 2)
        assert live(root) == [1]
        assert {p.stem for p in cache.layout.shards.iterdir()} == {"00000001"}
        assert cache.bytes_left() == room + freed - cache.totals().bytes
        assert cache.totals().evicted_samples == 16
        assert cache.unfinished(3, 1) == []


def test_issued_groups_without_all_their_shards_are_unfinished(root: Path) -> None:
    with opened(root) as cache:
        cache.meta.issue(2)
        cache.commit("p", [write(cache.layout, "p", n) for n in (0, 1, 3)])
        assert cache.unfinished(cache.meta.issued + 1, 2) == [1, 2]


def test_the_number_issued_never_goes_down(root: Path) -> None:
    with opened(root) as cache:
        cache.meta.issue(5)
        cache.meta.issue(3)
        assert cache.meta.issued == 5
        assert read_issued(cache.layout) == 5


@pytest.mark.mutant(29, "growcache.cache.locks:try_lock", "return False", "return True")
def test_a_second_supervisor_is_told_who_has_the_cache(root: Path) -> None:
    with opened(root), pytest.raises(CacheBusyError, match=f"pid {os.getpid()}"):
        Cache.open(root, config(root))


@pytest.mark.mutant(
    28,
    "growcache.cache.directory:take_over",
    "_wait_for_samplers(layout, samplers_seconds, before)",
    "",
)
def test_samplers_of_a_dead_service_are_waited_for(root: Path) -> None:
    opened(root).close()
    sampler = FileLock.acquire(CacheLayout(root).samplers_lock, shared=True)
    with sampler, pytest.raises(CacheBusyError, match="samplers"):
        Cache.open(root, config(root), takeover_seconds=0.05)
    opened(root).close()


def test_another_configuration_is_refused_with_what_differs(root: Path) -> None:
    with opened(root) as cache:
        add(cache, 0)
        with pytest.raises(FingerprintError, match=r"sampling\.seed \(0 → 1\)"):
            cache.set_identity(OTHER)
        with pytest.raises(FingerprintError, match=r"sampling\.seed"):
            cache.claim({"sampling.seed": 1})
        assert cache.meta.identity == IDENTITY


def test_a_cache_without_samples_belongs_to_nobody(root: Path) -> None:
    with opened(root) as cache:
        add(cache, 0, count=0)
        cache.set_identity(OTHER)
        assert cache.meta.identity == OTHER
        assert (cache.meta.issued, cache.meta.editions, cache.totals().drawn_shards) == (
            -1,
            [],
            0,
        )
        assert live(root) == []
        assert not list(cache.layout.shards.iterdir())
    with Cache.open(root, config(root)) as cache:
        assert cache.meta.identity == OTHER


def test_the_start_removes_litter_and_finds_rows_without_files(root: Path) -> None:
    with opened(root) as cache:
        for number in range(4):
            add(cache, number)
        layout = cache.layout
    layout.shard(0).unlink()
    os.truncate(layout.shard(1), 100)
    layout.sidecar(2).unlink()
    for path in (
        layout.shard(9),
        layout.sidecar(9),
        layout.incoming / f"{permit_of(10)}-00000010.tfrecord",
        layout.root / ".issued.1234abcd.tmp",
    ):
        path.write_bytes(b"litter")
    stranger = layout.shards / "notes.txt"
    stranger.write_bytes(b"not ours")
    with opened(root) as cache:
        assert live(root) == [3]
        assert cache.totals().lost_shards == 3
        assert sorted(p.name for p in layout.shards.iterdir()) == [
            "00000003.json",
            "00000003.tfrecord",
            "notes.txt",
        ]
        assert not list(layout.incoming.iterdir())
        assert not list(root.glob(".*.tmp"))
        assert cache.bytes_used - cache.space.budget.total - cache.totals().bytes == 4096


def test_a_lease_being_made_is_not_litter(root: Path) -> None:
    opened(root).close()
    young = CacheLayout(root).leases / f".{'a' * 32}.tmp"
    young.write_bytes(b"")
    old = CacheLayout(root).leases / f".{'b' * 32}.tmp"
    old.write_bytes(b"")
    os.utime(old, (time.time() - 3600,) * 2)
    with opened(root):
        assert young.exists()
        assert not old.exists()


@pytest.mark.mutant(
    14,
    "growcache.cache.shard_removal:ShardRemover.evict",
    "self.retire(numbers)\nself.lease_table.refresh()",
    "self.lease_table.refresh()\nself.retire(numbers)",
)
def test_leases_are_read_after_the_retirement_is_committed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that still saw the shard as live has its lease there by then."""
    with opened(root) as cache:
        add(cache, 0)
        write_it = cache.index_writer.write
        leases: list[Lease] = []

        def a_reader_is_quicker(change: Callable[[], None]) -> None:
            if not leases:
                leases.append(Lease.create(root, "job", live(root)))
            write_it(change)

        monkeypatch.setattr(cache.index_writer, "write", a_reader_is_quicker)
        assert cache.evict([0]) == ()
        assert cache.layout.shard(0).exists()
        leases[0].close()


@pytest.mark.mutant(
    14,
    "growcache.cache.commit:Committer._make_live",
    "install_shards(layout, permit, sidecars)",
    "",
)
def test_a_row_is_written_when_its_files_are_there(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(root) as cache:
        write_it, seen = cache.index_writer.write, []

        def look(change: Callable[[], None]) -> None:
            seen.append((cache.layout.shard(0).exists(), cache.layout.sidecar(0).exists()))
            write_it(change)

        monkeypatch.setattr(cache.index_writer, "write", look)
        cache.commit("p", [write(cache.layout, "p", 0)])
        assert seen == [(True, True)]


def test_retired_shards_that_nobody_holds_are_deleted_at_the_start(root: Path) -> None:
    with opened(root) as cache:
        add(cache, 0)
        add(cache, 1)
        cache.retire([0])
        assert live(root) == [1]
        assert cache.layout.shard(0).exists()
    with opened(root) as cache:
        assert not cache.layout.shard(0).exists()
        assert cache.totals().retired_shards == 0


@pytest.mark.mutant(
    18,
    "growcache.cache.lease_views:LeaseView.holding",
    "self._with(HELD, MAPPED, BEGUN)",
    "self._with(HELD, BEGUN)",
)
def test_no_shard_disappears_under_a_reader(root: Path) -> None:
    with opened(root) as cache:
        add(cache, 0)
        with Lease.create(root, "job", [0]) as lease:
            assert cache.evict([0]) == ()
            assert cache.layout.shard(0).exists()
            assert live(root) == []
            assert cache.totals().retired_shards == 1
            lease.mark_read(0, mapped=True)
            cache.poll_leases(1.0)
            assert cache.layout.shard(0).exists(), "it is mapped still"
            lease.mark_read(0, mapped=False)
            cache.poll_leases(2.0)
            assert not cache.layout.shard(0).exists()


@pytest.mark.mutant(
    19,
    "growcache.cache.reader_lease:_LeaseFile.close",
    "not self.kept and not is_locked(self._layout.supervisor_lock)",
    "True",
)
def test_uses_are_counted_once_and_survive(root: Path) -> None:
    with opened(root) as cache:
        add(cache, 0)
        add(cache, 1)
        with Lease.create(root, "job", [0, 1]) as lease:
            lease.mark_read(0, mapped=True)
            lease.drop([1])
        cache.poll_leases(1.0)
        cache.poll_leases(2.0)
        assert not list(cache.layout.leases.iterdir())
        assert cache.totals().delivered == 8
        assert [(c.uses, c.min_job_uses) for c in cache.candidates()] == [(1, 1), (0, 0)]
    with opened(root) as cache:
        assert [c.uses for c in cache.candidates()] == [1, 0]


def test_a_crash_between_counting_and_unlinking_counts_once(root: Path) -> None:
    with opened(root) as cache:
        add(cache, 0)
        lease = Lease.create(root, "job", [0])
        lease.mark_read(0, mapped=False)
        lease.close()
        kept = lease.path.read_bytes()
        cache.poll_leases(1.0)
    lease.path.write_bytes(kept)
    with opened(root) as cache:
        assert cache.totals().delivered == 8
        assert not lease.path.exists()


def test_a_shard_waits_until_every_living_job_used_it(root: Path) -> None:
    with opened(root) as cache:
        add(cache, 0)
        assert not choose_evictions("fifo", cache.candidates(), 1, 1).evict, "never read"
        with Lease.create(root, "done", [0]) as lease:
            lease.mark_read(0, mapped=False)
        cache.poll_leases(1.0)
        assert choose_evictions("fifo", cache.candidates(), 1, 1).evict == (0,)
        with Lease.create(root, "other", []):
            cache.poll_leases(2.0)
            assert not choose_evictions("fifo", cache.candidates(), 1, 1).evict
        with Lease.create(root, "", []):
            cache.poll_leases(3.0)
            assert choose_evictions("fifo", cache.candidates(), 1, 1).evict == (0,), (
                "only looking"
            )


def test_what_an_open_lease_has_read_counts_already(root: Path) -> None:
    with opened(root) as cache:
        add(cache, 0)
        with Lease.create(root, "job", [0]) as lease:
            lease.mark_read(0, mapped=False)
            cache.poll_leases(1.0)
            (candidate,) = cache.candidates()
            assert (candidate.uses, candidate.min_job_uses, candidate.leased) == (1, 1, False)


DYING_READER = """
import os, sys
from growcache.cache.lease_views import LeaseCounters as Counters
from growcache.cache.reader_lease import Lease
lease = Lease.create(sys.argv[1], "job", [0, 1], counters=Counters(gave_state=True))
lease.mark_read(0, mapped=True)
print("held", flush=True)
sys.stdin.read()
"""


def test_the_unread_shards_of_a_killed_reader_stay_for_a_while(root: Path) -> None:
    with opened(root, resume_seconds=100) as cache:
        add(cache, 0)
        add(cache, 1)
        with subprocess.Popen(
            [sys.executable, "-c", DYING_READER, str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"held\n"
            cache.poll_leases(10.0)
            assert cache.evict([0, 1]) == ()
            reader.kill()
            reader.wait()
        cache.poll_leases(20.0)
        assert not cache.layout.shard(0).exists(), "its map died with the reader"
        assert cache.layout.shard(1).exists()
        cache.poll_leases(119.0)
        assert cache.layout.shard(1).exists()
        cache.poll_leases(120.0)
        assert not cache.layout.shard(1).exists()
        cache.poll_leases(121.0)
        assert not list(cache.layout.leases.iterdir())


def test_a_lowered_bound_leaves_no_room_until_shards_went(root: Path) -> None:
    with opened(root) as cache:
        for number in range(10):
            add(cache, number)
        cache.max_bytes = 700_000
        assert cache.bytes_left() < 0
        assert not cache.reserve("p", 1)
        cache.evict(range(10))
        assert cache.bytes_left() > 0


@pytest.mark.mutant(8, "growcache.cache.recovery:remade_contents", "(issued + 1) * group", "0")
def test_a_lost_index_is_made_again_from_the_shards(root: Path) -> None:
    with opened(root) as cache:
        for number in range(5):
            add(cache, number)
        cache.evict([1])
        cache.meta.issue(6)
        layout, samples = cache.layout, cache.totals().samples
    layout.index.unlink()
    data = bytearray(layout.shard(3).read_bytes())
    data[50] ^= 1
    layout.shard(3).write_bytes(data)
    with opened(root) as cache:
        assert live(root) == [0, 2, 4]
        assert cache.totals().samples == samples - 8
        assert cache.unfinished(cache.meta.issued + 1, 1) == [3], "no other is drawn twice"
        assert cache.meta.editions == [Edition(0, 100, "digest", 0)]
        assert not layout.shard(3).exists()
    with opened(root) as cache:
        assert cache.totals().drawn == samples - 8


def test_a_stopped_cache_is_quiet(root: Path) -> None:
    with opened(root) as cache:
        add(cache, 0)
    names = {path.name for path in root.iterdir()}
    assert not any(name.endswith(("-wal", "-shm", ".tmp")) for name in names)
    status = read_status(root)
    assert (status.state, status.shards, status.bytes) == ("stopped", 1, allocated_tree(root))


@pytest.mark.mutant(
    12,
    "growcache.cache.index.writer:IndexWriter.ok",
    "self.log_is_short and self._pages_bytes <= self._space.budget.pages",
    "self._pages_bytes <= self._space.budget.pages",
)
def test_the_log_is_cut_and_a_reader_in_the_way_stops_permits(root: Path) -> None:
    import sqlite3

    with opened(root) as cache:
        with_reader = sqlite3.connect(root / "index.sqlite")
        with_reader.execute("BEGIN")
        with_reader.execute("SELECT * FROM shards").fetchall()
        number = 0
        while cache.index_writer.ok and number < 200:
            add(cache, number, count=0)
            cache.evict([number])
            cache.maintain()
            number += 1
        assert not cache.index_writer.ok
        assert allocated_tree(root) <= MAX_BYTES
        with_reader.close()
        cache.maintain()
        assert cache.index_writer.ok
        assert (root / "index.sqlite-wal").stat().st_size < 100_000


def test_history_is_kept_and_thinned(root: Path) -> None:
    with opened(root) as cache:
        for i in range(400):
            cache.index_writer.append_history({"i": i})
        kept = [record["i"] for _, record in cache.history()]
        assert kept[-1] == 399
        assert 0 < len(kept) <= 90
        assert kept == sorted(kept)


def test_population_and_completeness_reach_readers(root: Path) -> None:
    with opened(root) as cache:
        cache.meta.set_population(7, 12.5)
        cache.meta.set_complete(True)
        view = read_index(root)
        assert (view.population, view.population_samples, view.complete) == (7, 12.5, True)
    with opened(root) as cache:
        assert cache.meta.complete


def test_free_disk(root: Path) -> None:
    with opened(root, min_free=0.9999999) as cache:
        assert not cache.free_disk_ok()
    with opened(root, min_free=1) as cache:
        assert cache.free_disk_ok()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 1, 8, 60])
def test_need_covers_what_a_shard_takes(root: Path, kind: str, count: int) -> None:
    with opened(root, KINDS[kind]) as cache:
        before = allocated_tree(cache.layout.shards)
        add(cache, 0, count)
        taken = cache.totals().bytes
        assert taken == allocated_tree(cache.layout.shards) - before
        assert taken <= need(0, count, KINDS[kind])
        assert cache.bytes_left() == MAX_BYTES - cache.bytes_used


def test_uses_wait_while_the_log_cannot_be_cut(root: Path) -> None:
    import sqlite3

    with opened(root) as cache:
        add(cache, 0)
        reader = sqlite3.connect(root / "index.sqlite")
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM shards").fetchall()
        number = 1
        while cache.index_writer.ok:
            add(cache, number, count=0)
            cache.maintain()
            number += 1
        for finished in range(1, 40):
            with Lease.create(root, "job", [0]) as lease:
                lease.mark_read(0, mapped=False)
            cache.poll_leases(1.0)
            waiting = len(list(cache.layout.leases.iterdir()))
            assert waiting < 16
            assert cache.totals().delivered == 8 * (finished - waiting)
        assert waiting == 39 % 16
        reader.close()
        cache.maintain()
        cache.poll_leases(2.0)
        assert cache.totals().delivered == 8 * 39
