"""A disk that is really full: a small tmpfs, where mounting one is allowed."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from growcache.cache.check import check
from growcache.cache.files import allocated_tree
from growcache.cache.incoming import write_incoming
from growcache.cache.side_files import Identity
from growcache.cache.status import write_status
from growcache.cache.status_model import Status, WorkerStatus
from growcache.errors import CacheFullError
from tests.cache.making import KINDS, add, make, need, opened, write

DISK_BYTES = 3_000_000
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(tmp_path)]
    done = subprocess.run(mount, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def fill_up(disk: Path, spare: int = 0) -> Path:
    """Somebody else takes the rest of the disk, but for ``spare`` bytes."""
    other = disk / "other"
    with other.open("wb") as file:
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        os.posix_fallocate(file.fileno(), 0, max(1, free - spare))
    return other


@each_kind
def test_a_sampler_leaves_nothing_behind(disk: Path, kind: Identity) -> None:
    with opened(disk / "cache", kind, max_bytes=10_000_000) as cache:
        fill_up(disk, spare=8192)
        sidecar, buffers = make(1, 60, identity=kind)
        with pytest.raises(OSError, match="No space left") as error:
            write_incoming(cache.layout, "p1", sidecar, buffers)
        assert error.value.errno == errno.ENOSPC
        assert list(cache.layout.incoming.iterdir()) == []


@pytest.mark.mutant(
    13, "growcache.cache.space:Ballast.drop", "allocated(self.path) > 0", "False"
)
@each_kind
def test_the_ballast_lets_an_eviction_through(disk: Path, kind: Identity) -> None:
    with opened(disk / "cache", kind, max_bytes=10_000_000) as cache:
        for number in range(4):
            add(cache, number, 30)
        ballast = cache.layout.ballast
        assert ballast.exists()
        # With the log cut to nothing and the disk full, a COMMIT has no block to write to.
        assert cache.index_writer.index.checkpoint()
        other = fill_up(disk)
        gone = list(cache.evict([0, 1]))
        assert not ballast.exists(), "it was not needed: the test tests nothing"
        for number in (2, 3):
            gone += cache.evict([number])
        assert gone == [0, 1, 2, 3]
        assert not list(cache.layout.shards.iterdir())
        other.unlink()
        cache.maintain()
        assert ballast.exists(), "it is made again as soon as there is room"
        add(cache, 9)
    assert check(disk / "cache") == []


def test_a_status_that_is_too_long_for_a_full_disk_says_the_rest(disk: Path) -> None:
    errors = [f"{number}: {'no room ' * 150}" for number in range(5)]
    with opened(disk / "cache", max_bytes=10_000_000) as cache:
        root, path = cache.layout.root, cache.layout.status
        write_status(root, Status(state="running"))
        fill_up(disk)
        for count, left in ((5, errors[-1:]), (1, errors[:1])):
            said = Status(state="waiting", waiting_for="space", last_errors=errors[:count])
            write_status(root, said)
            assert Status.from_json(path.read_bytes()) == replace(said, last_errors=left)
        many = [WorkerStatus(id=n, pid=None, state="idle") for n in range(500)]
        write_status(root, Status(state="waiting", waiting_for="more", worker_states=many))
        assert Status.from_json(path.read_bytes()).waiting_for == "more"


@each_kind
def test_a_commit_without_room_leaves_no_trace(disk: Path, kind: Identity) -> None:
    with opened(disk / "cache", kind, max_bytes=10_000_000) as cache:
        add(cache, 0)
        before = sorted(cache.layout.shards.rglob("*"))
        written = write(cache.layout, "p1", 1, identity=kind)
        assert cache.reserve("p1", need(1, identity=kind))
        cache.layout.ballast.unlink()
        assert cache.index_writer.index.checkpoint()
        other = fill_up(disk)
        with pytest.raises(CacheFullError, match="no room"):
            cache.commit("p1", [written])
        assert cache.totals().shards == 1
        assert sorted(cache.layout.shards.rglob("*")) == before
        assert list(cache.layout.incoming.iterdir()) == []
        assert cache.space.reserved == 0
        other.unlink()
        assert allocated_tree(disk / "cache") <= DISK_BYTES
    assert [f for f in check(disk / "cache") if f.severity == "error"] == []
