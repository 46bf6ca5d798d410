"""A plain `TFRecordDataset` over shards that `growcache.tensorflow.files` holds."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")

import tensorflow as tf

import growcache.tensorflow as gtf
from growcache.errors import ConfigError
from tests.accidents.commands import (
    growcache,
    rows_of,
    running,
    status,
    wait_for_status,
    wait_until,
    write_config,
    write_objects,
)

pytestmark = pytest.mark.tensorflow


@pytest.mark.slow
def test_files_stay_until_they_are_let_go(tmp_path: Path) -> None:
    url = write_objects(tmp_path / "in", count=300, rows=64, columns=1024)
    config = write_config(
        tmp_path / "c.yaml",
        rows_of(url),
        # Without a limit, a service that draws without end takes a whole core.
        sampling={"shard_samples": 64, "max_bytes_per_second": "10MB"},
        cache={"max_bytes": "6MB", "min_uses": 0},
    )
    cache = config.with_suffix("")
    with running(config):
        wait_for_status(cache, lambda found: found["evicted_samples"] > 100)
        with gtf.files(cache, min_samples=100) as held:
            assert len(held) == len(held.paths) == len(set(held))
            records = iter(tf.data.TFRecordDataset(held.paths))
            next(records)
            # Without the lease, all of these shards would be evicted by now. With it, the service
            # waits or replaces other shards.
            drawn = status(cache)["drawn"] + 2 * held.samples
            wait_for_status(cache, lambda found: found["drawn"] > drawn or found["waiting_for"])
            assert 1 + sum(1 for _ in records) == held.samples
            assert all(Path(path).exists() for path in held.paths)
            evicted = status(cache)["evicted_samples"]
        assert held.closed
        wait_for_status(cache, lambda found: found["reuse"] > 0)  # all samples were used
        wait_for_status(cache, lambda found: found["evicted_samples"] > evicted + 100)
        wait_until(lambda: not all(Path(path).exists() for path in held.paths))
        assert next(iter(gtf.files(cache, seed=1))).endswith(".tfrecord")
        gc.collect()  # drops the last reference, and so the lease
        wait_for_status(cache, lambda found: not found["leases"])


@pytest.mark.slow
def test_the_order_is_drawn_and_other_formats_are_refused(tmp_path: Path) -> None:
    url = write_objects(tmp_path / "in", count=8)
    source = rows_of(url)
    config = write_config(tmp_path / "c.yaml", source)
    other = write_config(tmp_path / "npy.yaml", source, cache={"format": "npy"})
    for one in (config, other):
        assert growcache("run", one, "--until-full").returncode == 0
    ordered = gtf.files(config.with_suffix(""), shuffle=False)
    assert ordered.paths == sorted(ordered.paths)
    assert gtf.files(config.with_suffix("")).paths != ordered.paths
    ordered.close()
    with pytest.raises(ConfigError, match=r"format npy.*reader=\"gather\""):
        gtf.files(other.with_suffix(""))
