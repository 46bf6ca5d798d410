"""growcache, whose service fills the cache while the loop runs."""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks.accuracy.paced.place import BATCH, BUCKET, WINDOW, Batch, Place
from benchmarks.measure import Child, write_config
from growcache.cache.status import read_status
from growcache.errors import CacheMissingError
from growcache.torch import EpochLoader

MIN_SAMPLES = 4 * BATCH


def batches(place: Place) -> Iterator[Batch]:
    """Yield batches of passes over what is cached."""
    root, config = place.folder / "cache", place.folder / "config.yaml"
    write_config(
        config,
        source={
            "url": f"s3://{BUCKET}/raw/*/*.bin",
            "format": "raw",
            "options": {"dtype": "u1", "shape": [WINDOW]},
            "labels": {"url": str(place.table), "key": "path", "columns": ["y"]},
            "storage_options": {
                "endpoint_url": place.endpoint,
                "key": "growcache",
                "secret": "growcache-secret",
            },
        },
        sampling={"seed": place.seed},
        cache={"path": str(root), "max_bytes": place.disk_bytes, **place.options},
    )
    service = Child.growcache("run", str(config), log=place.folder / "service.log")
    try:
        while not _made(root):
            service.check(60)
            time.sleep(0.05)
        with EpochLoader(
            root, batch_size=BATCH, min_samples=MIN_SAMPLES, seed=place.seed
        ) as loader:
            while True:
                for batch in loader:
                    yield Batch(batch["x"], batch["y"])
    finally:
        service.interrupt()


def _made(root: object) -> bool:
    try:
        read_status(root)  # type: ignore[arg-type]
    except CacheMissingError:
        return False
    return True
