"""LanceDB's StreamingDataset over a table in the bucket; it keeps nothing on disk and has no limit for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from lancedb.streaming import StreamingDataLoader, StreamingDataset

from benchmarks.accuracy.paced.place import BATCH, BUCKET, WINDOW, Batch, Place, stacked

TABLE = "sources"
CLUMP = (
    64  # neighbours that are shuffled together, as its documentation advises for object stores
)
QUEUE = 8


def write(windows: npt.NDArray[np.uint8], labels: npt.NDArray[np.int64], folder: Path) -> None:
    """Write a table; its bytes are not compressed."""
    plain = {"lance-encoding:compression": "none"}
    values = pa.FixedSizeListArray.from_arrays(pa.array(windows.ravel()), WINDOW)
    schema = pa.schema(
        [
            pa.field("x", pa.list_(pa.uint8(), WINDOW), metadata=plain),
            pa.field("y", pa.int64()),
        ]
    )
    table = pa.Table.from_arrays([values, pa.array(labels)], schema=schema)
    lancedb.connect(str(folder)).create_table(TABLE, table)


def _collated(rows: list[dict[str, Any]]) -> Batch:
    return stacked([bytes(row["x"]) for row in rows], [row["y"] for row in rows])


def batches(place: Place) -> Iterator[Batch]:
    """Yield batches of every epoch."""
    options = {name.lower(): value for name, value in place.environment.items()}
    store = lancedb.connect(f"s3://{BUCKET}/lance", storage_options=options)
    table, epoch = store.open_table(TABLE), 0
    while True:
        dataset = StreamingDataset(
            table,
            shuffle_seed=place.seed,
            epoch=epoch,
            shuffle_clump_size=CLUMP,
            read_batch_size=BATCH,
            io_queue_depth=QUEUE,
        )
        for batch in StreamingDataLoader(dataset, batch_size=BATCH, collate_fn=_collated):
            if len(batch.labels) == BATCH:
                yield batch
        epoch += 1
