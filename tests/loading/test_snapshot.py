"""A snapshot shows what was live, keeps it, counts its uses, and never serves a wrong byte."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from growcache.cache.formats import shard_files
from growcache.cache.formats.mapped import MappedShard
from growcache.cache.index.reader import read_index
from growcache.cache.lease_views import DROPPED, HELD, MAPPED, read_leases
from growcache.cache.reader_lease import Lease
from growcache.errors import CacheError, CacheMissingError, CorruptShardError
from growcache.loading import snapshot as snapshots
from growcache.loading.maps import MapPool, file_identity
from growcache.loading.snapshot import Snapshot
from tests.filled import open_leases
from tests.sampling.services import wait_until


def mapped_shards(root: Path) -> list[str]:
    """The lines of this process's maps that are of the cache's shards."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if f"{root.resolve()}/shards/" in line]


def test_samples_in_order_of_their_shards(cache: Any) -> None:
    cache.add(7, samples=3)
    cache.add(2, samples=0)
    cache.add(1, samples=2)
    with Snapshot.take(cache.root) as snapshot:
        assert len(snapshot) == 5
        assert [row.number for row in snapshot.shards] == [7, 1]
        assert snapshot.schema == cache.schema
        assert [int(snapshot[i]["id"]) for i in range(5)] == [7000, 7001, 7002, 1000, 1001]
        assert int(snapshot[-1]["id"]) == 1001
        assert snapshot[3]["x"].shape == (4,)
        assert snapshot.origin(4).key == "object-1-1"
        assert (snapshot.origin(2).start, snapshot.origin(2).stop) == (2, 3)
        for beyond in (5, -6):
            with pytest.raises(IndexError, match="snapshot of 5"):
                snapshot[beyond]


def test_samples_are_copies(cache: Any) -> None:
    cache.add(0)
    with Snapshot.take(cache.root) as snapshot:
        snapshot[0]["x"][:] = -1
        assert snapshot[0]["x"][0] == 0
        kept = snapshot[3]["x"]
    cache.layout.shard(0).unlink()
    np.testing.assert_array_equal(kept, np.full(4, 3))


def test_closed_it_reads_nothing_more(cache: Any) -> None:
    cache.add(0)
    with Snapshot.take(cache.root) as snapshot:
        snapshot[0]
    with pytest.raises(CacheError, match="closed"):
        snapshot[0]
    assert not mapped_shards(cache.root)


def test_what_a_window_leaves_is_not_remembered(cache: Any) -> None:
    cache.add(0, 1)
    with Snapshot.take(cache.root) as snapshot:
        snapshot.enter([0, 1])
        origins = [snapshot.origin(i) for i in range(len(snapshot))]
        snapshot.leave([0])
        for number in (0, 1):
            cache.layout.sidecar(number).unlink()
        assert [snapshot.origin(i) for i in range(10, 20)] == origins[10:]
        with pytest.raises(CorruptShardError, match="missing"):
            snapshot.origin(0)
        snapshot.leave([1])


def test_a_missing_cache_is_named(cache: Any) -> None:
    with pytest.raises(CacheMissingError, match="growcache run"):
        Snapshot.take(cache.root / "elsewhere")
    cache.layout.identity.unlink()
    with pytest.raises(CacheMissingError, match="no samples yet"):
        Snapshot.take(cache.root)


def test_its_lease_says_what_is_held_and_what_was_read(cache: Any) -> None:
    cache.add(0, 1, 2)
    with Snapshot.take(cache.root, job="mine") as snapshot:
        snapshot[11]
        (lease,) = read_leases(cache.root)
        assert (lease.job, lease.open, lease.numbers) == ("mine", True, (0, 1, 2))
        assert list(lease.states) == [HELD, MAPPED, HELD]
    (lease,) = read_leases(cache.root)
    assert (lease.closed, lease.open, lease.used()) == (True, False, (1,))


def test_what_retires_while_the_lease_is_made_is_not_served(
    cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.add(0, 1, 2)

    class Slow(Lease):
        @classmethod
        def create(cls, *arguments: Any, **keywords: Any) -> Lease:
            cache.retire(1)  # the evictor, between the two looks at the index
            return Lease.create(*arguments, **keywords)

    monkeypatch.setattr(snapshots, "Lease", Slow)
    with Snapshot.take(cache.root) as snapshot:
        assert [row.number for row in snapshot.shards] == [0, 2]
        (lease,) = read_leases(cache.root)
        assert list(lease.states) == [HELD, DROPPED, HELD]


def test_what_retired_since_the_index_was_read_is_not_served(cache: Any) -> None:
    cache.add(0, 1, 2)
    view = read_index(cache.root)
    cache.retire(1)
    cache.add(3)
    with Snapshot.take(cache.root, view=view) as snapshot:
        assert [row.number for row in snapshot.shards] == [0, 2]
        (lease,) = open_leases(cache.root)
        assert lease.holding() == (0, 2)


def test_a_corrupt_shard_is_refused_and_logged_once(
    cache: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cache.add(0, 1)
    cache.damage(1)
    with Snapshot.take(cache.root) as snapshot, caplog.at_level(logging.WARNING):
        assert int(snapshot[0]["id"]) == 0
        for _ in range(2):
            with pytest.raises(CorruptShardError, match=r"00000001\.tfrecord.*growcache check"):
                snapshot[10]
    assert len(caplog.records) == 1


def test_a_shard_that_comes_back_is_looked_at_anew(cache: Any) -> None:
    """After it was mended, or drawn once more for a checkpoint, it is another file."""
    cache.add(0)
    cache.damage(0)
    keep = MapPool.of(cache.root)  # as a process has it whose loader goes on
    with Snapshot.take(cache.root) as snapshot, pytest.raises(CorruptShardError):
        snapshot[0]
    cache.damage(0)  # the bit turns back
    with Snapshot.take(cache.root) as snapshot:
        assert int(snapshot[0]["id"]) == 0
    cache.damage(0)
    with Snapshot.take(cache.root) as snapshot, pytest.raises(CorruptShardError):
        snapshot[0]
    assert MapPool.of(cache.root) is keep


def test_what_was_found_whole_is_not_read_through_again_until_it_is_touched(
    cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two iterations of a dataset its shards are not held."""
    read: list[int] = []
    digest = MappedShard.digest

    def counting(shard: MappedShard, **arguments: Any) -> str:
        read.append(len(shard))
        return digest(shard, **arguments)

    monkeypatch.setattr(MappedShard, "digest", counting)
    cache.add(0, 1)
    files = [
        *shard_files(cache.layout, 0, "tfrecord"),
        *shard_files(cache.layout, 1, "tfrecord"),
    ]
    wait_until(lambda: file_identity(files) is not None, 5, every=0.002)
    keep = MapPool.of(cache.root)

    def look(verify: Any = "first") -> int:
        read.clear()
        with Snapshot.take(cache.root, verify=verify) as snapshot:
            snapshot[0], snapshot[10]
        return len(read)

    assert [look(), look(), look("always"), look()] == [2, 0, 2, 0]
    cache.damage(1)
    with pytest.raises(CorruptShardError):
        look()
    cache.damage(1)
    assert look() == 1
    assert MapPool.of(cache.root) is keep


def test_verify_always_sees_later_damage(cache: Any) -> None:
    cache.add(0)
    with (
        Snapshot.take(cache.root) as first,
        Snapshot.take(cache.root, verify="always") as always,
    ):
        first[0]
        always[0]
        cache.damage(0)
        first[0]
        with pytest.raises(CorruptShardError):
            always[0]


def test_maps_pass_on_and_go_with_the_last_snapshot(cache: Any) -> None:
    cache.add(0, 1)
    first = Snapshot.take(cache.root)
    shard, gone = first.mapped(0), first.mapped(1)
    cache.retire(1)
    second = Snapshot.take(cache.root)
    first.close()
    assert second.mapped(0) is shard
    assert len(shard) == 10
    assert len(gone) == 0
    second.close()
    assert not mapped_shards(cache.root)


def test_a_forgotten_snapshot_frees_its_lease(cache: Any) -> None:
    cache.add(0)
    snapshot = Snapshot.take(cache.root)
    assert [lease.open for lease in read_leases(cache.root)] == [True]
    del snapshot
    gc.collect()
    assert [lease.open for lease in read_leases(cache.root)] == [False]


def test_a_cache_filled_anew_is_not_the_old_one(make_cache: Any, tmp_path: Any) -> None:
    old = make_cache("a")
    old.add(0)
    with Snapshot.take(old.root) as snapshot:
        snapshot[0]
        keep = MapPool.of(old.root)  # as long as a loader lives
    old.close()
    old.root.rename(tmp_path / "away")
    new = make_cache("a", shape=(6,))
    new.add(0)
    with Snapshot.take(new.root) as snapshot:
        assert snapshot[0]["x"].shape == (6,)
    assert MapPool.of(new.root) is keep
