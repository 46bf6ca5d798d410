"""Hugging Face datasets, streamed from parquet files, with a shuffle buffer of the cache's bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from pyarrow import parquet

from benchmarks.accuracy.paced.place import BATCH, BUCKET, WINDOW, Batch, Place, stacked

WORKERS = 2
FILES, AT_ONCE = 32, 1  # half a worker's share of the buffer


def write(windows: npt.NDArray[np.uint8], labels: npt.NDArray[np.int64], folder: Path) -> None:
    """Write parquet files without compression, as all formats are here."""
    folder.mkdir()
    for number, rows in enumerate(np.array_split(np.arange(len(labels)), FILES)):
        table = pa.table({"x": [windows[row].tobytes() for row in rows], "y": labels[rows]})
        parquet.write_table(
            table,
            folder / f"{number:03}.parquet",
            compression="none",
            use_dictionary=False,
        )


def _collated(rows: list[dict[str, Any]]) -> Batch:
    return stacked([row["x"] for row in rows], [row["y"] for row in rows])


def batches(place: Place) -> Iterator[Batch]:
    """Yield batches of every epoch."""
    urls = [f"{place.endpoint}/{BUCKET}/parquet/{number:03}.parquet" for number in range(FILES)]
    stream = datasets.load_dataset(
        "parquet", data_files=urls, split="train", streaming=True, cache_dir=str(place.folder)
    )
    stream = stream.shuffle(
        seed=place.seed,
        buffer_size=place.disk_bytes // WINDOW // WORKERS,
        max_buffer_input_shards=AT_ONCE,
    )
    loader = torch.utils.data.DataLoader(
        stream,
        BATCH,
        num_workers=WORKERS,
        collate_fn=_collated,
        drop_last=True,
        persistent_workers=True,
    )
    epoch = 0
    while True:
        stream.set_epoch(epoch)
        yield from loader
        epoch += 1
