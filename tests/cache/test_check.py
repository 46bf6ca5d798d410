from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from growcache.cache.check import check
from growcache.cache.files import CacheLayout
from growcache.cache.index.reader import read_index
from growcache.cache.reader_lease import Lease
from growcache.cache.status import read_status, write_status
from growcache.cache.status_model import Status, WorkerStatus
from growcache.errors import CacheError, CacheMissingError
from tests.cache.making import add, opened, permit_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "cache"
    with opened(root) as cache:
        for number in range(3):
            add(cache, number)
        add(cache, 3, 0)
    return root


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_good_cache_has_no_findings(root: Path) -> None:
    told: list[tuple[int, int]] = []
    assert check(root, lambda done, total: told.append((done, total))) == []
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert list(CacheLayout(root).leases.iterdir()) == []


@pytest.mark.parametrize("seen", [1, 3])
def test_a_shard_that_is_evicted_meanwhile_is_no_finding(root: Path, seen: int) -> None:
    with opened(root) as cache:

        def evict(done: int, total: int) -> None:
            if done == seen:
                assert cache.evict([1]) == (1,)

        assert check(root, evict) == []


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda layout: flip(layout.shard(1), 700), "wrong CRC32C in 1 of 8 records"),
        (lambda layout: flip(layout.shard(1), 700), "expected digest"),
        (lambda layout: os.truncate(layout.shard(1), 99), "expected .* bytes for 8 samples"),
        (lambda layout: layout.shard(1).unlink(), "missing"),
        (lambda layout: layout.sidecar(1).unlink(), "sidecar of the shard is missing"),
        (lambda layout: flip(layout.sidecar(1), 99), "sidecar of the shard is damaged"),
        (
            lambda layout: layout.sidecar(1).write_bytes(layout.sidecar(2).read_bytes()),
            "number: the index says 1, its sidecar says 2",
        ),
    ],
)
def test_damage_is_found(
    root: Path, damage: Callable[[CacheLayout], object], expected: str
) -> None:
    damage(CacheLayout(root))
    findings = check(root)
    assert {finding.shard for finding in findings} == {1}
    assert {finding.severity for finding in findings} == {"error"}
    assert any(re.search(expected, finding.message) for finding in findings), findings


def test_litter_is_worth_telling_only_when_nobody_works(root: Path) -> None:
    layout = CacheLayout(root)
    (layout.incoming / f"{permit_of(9)}-00000009.tfrecord").write_bytes(b"")
    layout.sidecar(9).write_bytes(b"")
    assert {finding.severity for finding in check(root)} == {"info"}
    with opened(root):
        layout.sidecar(9).write_bytes(b"")
        assert check(root) == []


def test_a_damaged_index_is_an_error_that_says_what_to_do(root: Path) -> None:
    index = CacheLayout(root).index
    index.write_bytes(b"x" * index.stat().st_size)
    with pytest.raises(CacheError, match=f"growcache check {root} --repair"):
        read_index(root)
    with pytest.raises(CacheError, match=f"growcache check {root} --repair"):
        opened(root)
    assert all(finding.mendable for finding in check(root))
    assert any("not a database" in finding.message for finding in check(root))


def test_no_cache_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(CacheMissingError, match="no cache at"):
        check(tmp_path)
    with pytest.raises(CacheMissingError, match="no cache at"):
        read_status(tmp_path)


def test_a_status_comes_back() -> None:
    status = Status(state="waiting", waiting_for="room", worker_states=[WorkerStatus(1, 2)])
    assert Status.from_json(status.to_json()) == status
    assert Status.from_json(b'{"state": "full", "of_a_later_version": 1}').state == "full"


def test_the_status_of_a_running_service_is_what_it_told(root: Path) -> None:
    with opened(root), Lease.create(root, "train", [1, 2]):
        write_status(root, Status(state="full", pid=os.getpid(), samples_per_second=5.0))
        status = read_status(root)
        assert (status.state, status.samples_per_second) == ("full", 5.0)
        assert [(lease.job, lease.shards) for lease in status.leases] == [("train", 2)]
        write_status(root, Status(state="stopped", pid=-1))
        assert read_status(root).state == "running", "told by the one before"


def test_the_status_of_a_stopped_service_is_what_is_there(root: Path) -> None:
    write_status(root, Status(state="full", pid=1, samples_per_second=5.0, workers=3))
    status = read_status(root)
    assert (status.state, status.workers, status.samples_per_second) == ("stopped", 0, 0.0)
    assert (status.shards, status.samples, status.drawn, status.holes) == (4, 24, 24, 1)


def test_a_status_needs_no_numpy(root: Path) -> None:
    code = (
        "import sys; import growcache.cli.status; from growcache.cache.status import read_status; "
        f"print(read_status({str(root)!r}).shards, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split()[1:] == ["False"], done.stderr
