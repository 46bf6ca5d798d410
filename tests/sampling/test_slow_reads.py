"""A store that answers a few reads after minutes, and at once when it is asked again."""

from __future__ import annotations

from pathlib import Path

from benchmarks.bad_store import bad_store
from tests.sampling.services import service, wait_until, write_config


def test_slow_reads_are_requested_again_and_few_others(tmp_path: Path) -> None:
    with bad_store(objects=1500, object_bytes=4096, latency_seconds=0.05) as store:
        config = write_config(
            tmp_path / "cache.yaml",
            store.url,
            source={"storage_options": store.storage_options},
            sampling={
                "workers": 1,
                "concurrency": 16,
                "shard_samples": 32,
                "timeout_seconds": 2000,
            },
        )
        with service(config, "--until-full") as process:
            wait_until(lambda: store.counts().served > 100)
            store.set(slow=[(0.02, 300.0)])
            wait_until(lambda: process.poll() is not None)
            assert process.returncode == 0
        counts = store.counts()
    assert counts.slow >= 20
    assert counts.requests <= 1.05 * 1500 + 32  # the first look reads a few objects
