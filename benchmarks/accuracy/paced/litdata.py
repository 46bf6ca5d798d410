"""LitData over its own chunks, with its limit on local files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import litdata
import numpy as np
import numpy.typing as npt
from litdata.streaming import downloader

from benchmarks.accuracy.paced.place import BATCH, BUCKET, Batch, Place, stacked

WORKERS = 2
CHUNK_BYTES = 480_000  # the limit holds sixteen


def _sample(
    windows: npt.NDArray[np.uint8], labels: npt.NDArray[np.int64], row: int
) -> dict[str, Any]:
    return {"x": windows[row].tobytes(), "y": int(labels[row])}


def write(windows: npt.NDArray[np.uint8], labels: npt.NDArray[np.int64], folder: Path) -> None:
    """Write chunks, by one process."""
    litdata.optimize(
        fn=partial(_sample, windows, labels),
        inputs=list(range(len(labels))),
        output_dir=str(folder),
        chunk_bytes=CHUNK_BYTES,
        num_workers=1,
        verbose=False,
    )


def _collated(rows: list[dict[str, Any]]) -> Batch:
    return stacked([row["x"] for row in rows], [row["y"] for row in rows])


def batches(place: Place) -> Iterator[Batch]:
    """Yield batches of every epoch."""
    os.environ |= place.environment
    # Its client refuses plain HTTP and has no option for it; workers are forked, so they have it.
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
    os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"
    dataset = litdata.StreamingDataset(
        f"s3://{BUCKET}/litdata",
        cache_dir=str(place.folder / "chunks"),
        shuffle=True,
        drop_last=True,
        seed=place.seed,
        max_cache_size=place.disk_bytes,
        storage_options=place.boto_options,
    )
    loader = litdata.StreamingDataLoader(
        dataset, batch_size=BATCH, num_workers=WORKERS, collate_fn=_collated, drop_last=True
    )
    while True:
        yield from loader
