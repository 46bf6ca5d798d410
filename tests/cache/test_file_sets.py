"""A shard is as whole as the set of its files, in every format and at every step."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from growcache.cache.check import check
from growcache.cache.files import CacheLayout, allocated_tree
from growcache.cache.formats import open_shard, shard_files, shard_path
from growcache.cache.index.reader import read_index
from growcache.cache.reader_lease import Lease
from growcache.cache.side_files import Identity
from growcache.errors import CorruptShardError
from tests.cache.making import KINDS, OTHER, add, equal, opened, permit_of, samples_of, write

each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def live(root: Path) -> list[int]:
    return [row.number for row in read_index(root).shards]


def files(root: Path, number: int, kind: Identity) -> list[Path]:
    return shard_files(CacheLayout(root), number, kind.cache_format)


@each_kind
def test_a_start_misses_any_file_of_a_live_shard(root: Path, kind: Identity) -> None:
    with opened(root, kind, max_bytes=10_000_000) as cache:
        add(cache, 0)
        count = len(files(root, 0, kind))
        for number in range(1, count + 1):
            add(cache, number)
    for number in range(1, count + 1):
        files(root, number, kind)[number - 1].unlink()
    with opened(root, kind) as cache:
        assert live(root) == [0]
        assert cache.totals().lost_shards == count
        assert {path.name[:8] for path in cache.layout.shards.iterdir()} == {"00000000"}
    assert check(root) == []


@each_kind
def test_a_cut_file_of_a_live_shard_is_a_lost_shard(root: Path, kind: Identity) -> None:
    with opened(root, kind) as cache:
        add(cache, 0)
        add(cache, 1)
    path = files(root, 0, kind)[-1]
    os.truncate(path, path.stat().st_size - 1)
    opened(root, kind).close()
    assert live(root) == [1]
    assert not files(root, 0, kind)


@each_kind
def test_a_lost_index_is_made_again_from_whole_shards(root: Path, kind: Identity) -> None:
    with opened(root, kind) as cache:
        for number in range(4):
            add(cache, number)
        add(cache, 4, count=0)
    CacheLayout(root).index.unlink()
    data = bytearray(files(root, 1, kind)[-1].read_bytes())
    data[-1] ^= 1
    files(root, 1, kind)[-1].write_bytes(data)
    files(root, 2, kind)[0].unlink()
    with opened(root, kind) as cache:
        assert live(root) == [0, 3, 4]
        assert cache.unfinished(cache.meta.issued + 1, 1) == [1, 2], (
            "drawn again, for they are lost"
        )
        assert allocated_tree(cache.layout.shards) >= cache.totals().bytes
    assert check(root) == []


@each_kind
def test_a_file_that_the_sampler_did_not_write_refuses_the_group(
    root: Path, kind: Identity
) -> None:
    with opened(root, kind) as cache:
        written = write(cache.layout, "p", 0, identity=kind)
        for file in written.files:
            shards = [write(cache.layout, "p", number, identity=kind) for number in (0, 1)]
            path = cache.layout.incoming_path("p", 1, file.suffix)
            os.truncate(path, path.stat().st_size - 1)
            with pytest.raises(CorruptShardError, match="expected shard 1"):
                cache.commit("p", shards)
            shards = [write(cache.layout, "p", number, identity=kind) for number in (0, 1)]
            cache.layout.incoming_path("p", 1, file.suffix).unlink()
            with pytest.raises(CorruptShardError, match="did not write"):
                cache.commit("p", shards)
            assert not list(cache.layout.incoming.iterdir())
            assert not list(cache.layout.shards.iterdir())
        assert cache.space.reserved == 0


@each_kind
def test_left_over_files_of_any_format_do_not_get_into_a_commit(
    root: Path, kind: Identity
) -> None:
    with opened(root, kind) as cache:
        directory = cache.layout.shard(0, ".npy")
        directory.mkdir()
        (directory / "left.npy").write_bytes(b"left over")
        for suffix in (".tfrecord", ".offsets.npy", ".json"):
            cache.layout.shard(0, suffix).write_bytes(b"left over")
        add(cache, 0)
        assert check(root) == []
        names = {path.name for path in cache.layout.shards.rglob("*")}
        assert "left.npy" not in names


@each_kind
def test_a_shard_is_never_seen_in_part_while_it_goes(root: Path, kind: Identity) -> None:
    """By whoever looks without a lease, as `peek` and `check` do."""
    seen: list[int] = []
    wrong: list[str] = []
    ended = threading.Event()

    def look() -> None:
        layout = CacheLayout(root)
        while not ended.is_set():
            for number in range(40):
                try:
                    shard = open_shard(layout, number, 8, kind.schema, kind.cache_format)
                except CorruptShardError as error:
                    if shard_path(layout, number, kind.cache_format).exists():
                        wrong.append(str(error))
                    continue
                if not all(map(equal, shard, samples_of(number, 8, kind.schema))):
                    wrong.append(f"shard {number} has other samples")
                seen.append(number)
                shard.close()

    with opened(root, kind, max_bytes=10_000_000) as cache:
        for number in range(40):
            add(cache, number)
        looker = threading.Thread(target=look)
        looker.start()
        try:
            while len(seen) < 60:
                ended.wait(0.01)
            for number in range(40):
                assert cache.evict([number]) == (number,)
        finally:
            ended.set()
            looker.join()
        assert not list(cache.layout.shards.iterdir())
        assert not list(cache.layout.incoming.iterdir())
    assert seen
    assert not wrong


@each_kind
def test_a_reader_keeps_every_file_of_what_it_holds(root: Path, kind: Identity) -> None:
    with opened(root, kind) as cache:
        add(cache, 0)
        before = len(files(root, 0, kind))
        with Lease.create(root, "job", [0]):
            assert cache.evict([0]) == ()
            assert len(files(root, 0, kind)) == before
        cache.poll_leases(1.0)
        cache.poll_leases(1e6)
        assert not files(root, 0, kind)


@each_kind
def test_a_cache_without_samples_is_emptied_with_all_its_litter(
    root: Path, kind: Identity
) -> None:
    with opened(root, kind) as cache:
        add(cache, 0, count=0)
        litter = cache.layout.shard(7, ".npy")
        litter.mkdir()
        (litter / "x.npy").write_bytes(b"litter")
        cache.set_identity(OTHER)
        assert not list(cache.layout.shards.iterdir())


@each_kind
def test_what_is_not_ours_stays(root: Path, kind: Identity) -> None:
    with opened(root, kind) as cache:
        add(cache, 0)
        layout = cache.layout
    for name in ("notes", "notes.npy"):
        (layout.shards / name).mkdir()
        (layout.shards / name / "0.npy").write_bytes(bytes(5000))
    (layout.shard(9, ".npy")).mkdir()
    (layout.shard(9, ".npy") / "x.npy").write_bytes(b"ours, and litter")
    (layout.incoming / f"{permit_of(3)}-00000003.npy").mkdir()
    (layout.incoming / f"{permit_of(3)}-00000003.npy" / "x.npy").write_bytes(
        b"ours, and litter"
    )
    assert {finding.severity for finding in check(root)} == {"info"}
    with opened(root, kind) as cache:
        assert (layout.shards / "notes" / "0.npy").exists()
        assert (layout.shards / "notes.npy" / "0.npy").exists()
        assert not layout.shard(9, ".npy").exists()
        assert not list(layout.incoming.iterdir())
        foreign = sum(allocated_tree(layout.shards / name) for name in ("notes", "notes.npy"))
        used = cache.bytes_used - cache.space.budget.total - cache.totals().bytes
        assert used == foreign
        assert live(root) == [0]


@pytest.mark.slow
def test_a_start_takes_no_time_in_a_cache_of_many_files(root: Path) -> None:
    kind = KINDS["npy-ragged"]
    with opened(root, kind, max_bytes=300_000_000) as cache:
        for first in range(0, 300, 50):
            numbers = range(first, first + 50)
            cache.commit("p", [write(cache.layout, "p", n, 1, kind) for n in numbers])
    began = time.process_time()
    opened(root, kind, max_bytes=300_000_000).close()
    assert time.process_time() - began < 2
