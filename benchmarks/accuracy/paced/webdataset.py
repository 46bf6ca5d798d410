"""WebDataset over tar files that curl streams, with a shuffle buffer of the cache's bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import webdataset

from benchmarks.accuracy.paced.place import BATCH, BUCKET, WINDOW, Batch, Place, stacked

WORKERS = 2
SHARDS = 76  # of about 1 MB


def write(windows: npt.NDArray[np.uint8], labels: npt.NDArray[np.int64], folder: Path) -> None:
    """Write a file per sample, whose name has the label, since another file would cost 1 KiB of tar.

    A time with fractions of a second would cost as much for each sample.
    """
    folder.mkdir()
    for shard, rows in enumerate(np.array_split(np.arange(len(labels)), SHARDS)):
        with webdataset.TarWriter(str(folder / f"{shard:03}.tar"), mtime=1) as tar:
            for row in rows:
                tar.write({"__key__": f"{row:06}-{labels[row]}", "x": windows[row].tobytes()})


def _collated(rows: list[tuple[str, bytes]]) -> Batch:
    keys, windows = zip(*rows, strict=True)
    return stacked(list(windows), [int(key.rpartition("-")[2]) for key in keys])


def batches(place: Place) -> Iterator[Batch]:
    """Yield batches of every epoch."""
    url = f"{place.endpoint}/{BUCKET}/tar"
    urls = [f"pipe:curl -s -L {url}/{shard:03}.tar" for shard in range(SHARDS)]
    stream = webdataset.WebDataset(urls, shardshuffle=SHARDS, seed=place.seed)
    samples = stream.shuffle(place.disk_bytes // WINDOW // WORKERS).to_tuple("__key__", "x")
    made = samples.batched(BATCH, collation_fn=_collated)
    loader = webdataset.WebLoader(
        made, batch_size=None, num_workers=WORKERS, persistent_workers=True
    )
    while True:
        yield from loader
