"""A loader on a disk that others have filled waits for room; nothing is raised in the loop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from growcache.errors import CacheFullError
from growcache.loading.snapshot import Snapshot
from growcache.numpy import EpochLoader
from tests.chaos.disk import Disk, own_disk
from tests.filled import Filled


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with own_disk(tmp_path / "disk", 4_000_000) as disk:
        if not disk.size:
            pytest.skip("may not mount a file system")
        yield disk


def test_an_epoch_waits_until_a_lease_fits(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Filled(disk.root / "cache", max_bytes=3_000_000)
    cache.add(0, 1)
    with EpochLoader(cache.root, batch_size=4, min_samples=1) as loader:
        assert disk.fill()
        with pytest.raises(CacheFullError):
            Snapshot.take(cache.root)
        room = threading.Timer(0.7, disk.free)
        room.start()
        with caplog.at_level(logging.WARNING):
            assert sum(len(batch["x"]) for batch in loader) == 20
        room.join()
    told = [
        r.getMessage() for r in caplog.records if "free space on the disk" in r.getMessage()
    ]
    assert len(told) == 1
    cache.close()


def test_a_loader_that_waits_for_room_can_be_closed(disk: Disk) -> None:
    cache = Filled(disk.root / "cache", max_bytes=3_000_000)
    cache.add(0, 1)
    assert disk.fill()
    loader = EpochLoader(cache.root, batch_size=4, min_samples=1)
    closing = threading.Timer(0.3, loader.close)
    closing.start()
    with pytest.raises(RuntimeError, match="closed"):
        next(iter(loader))
    closing.join()
    cache.close()
