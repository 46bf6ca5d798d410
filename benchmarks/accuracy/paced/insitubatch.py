"""insitubatch over Zarr arrays in random order, with its cache on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import zarr
from insitubatch import InSituDataset, obstore_store, open_geometries, split_by_chunk

from benchmarks.accuracy.paced.place import BATCH, BUCKET, KEY, SECRET, WINDOW, Batch, Place

CHUNK_SAMPLES = 16  # 64 KiB; a block of 16 chunks is shuffled together
CONCURRENCY, BLOCK = 16, 16


def write(windows: npt.NDArray[np.uint8], labels: npt.NDArray[np.int64], folder: Path) -> None:
    """Write arrays without compression."""
    group = zarr.open_group(str(folder), mode="w")
    for name, values in (("x", windows), ("y", labels)):
        chunks = (CHUNK_SAMPLES, *values.shape[1:])
        array = group.create_array(
            name,
            shape=values.shape,
            chunks=chunks,
            dtype=values.dtype,
            compressors=None,
            dimension_names=["sample", "byte"][: values.ndim],
        )
        array[:] = values
    zarr.consolidate_metadata(str(folder))


def batches(place: Place) -> Iterator[Batch]:
    """Yield batches of every epoch."""
    store = obstore_store(
        f"s3://{BUCKET}/zarr",
        endpoint=place.endpoint,
        access_key_id=KEY,
        secret_access_key=SECRET,
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True, "timeout": "10m"},
    )
    geometries = open_geometries(store, ["x", "y"])
    manifest = split_by_chunk(geometries["x"], fractions=(1.0, 0.0, 0.0), contiguous=False)
    dataset = InSituDataset(
        store,
        manifest,
        geometries,
        batch_size=BATCH,
        block_chunks=BLOCK,
        max_inflight=CONCURRENCY,
        cache_dir=str(place.folder / "pool"),
        cache_budget_bytes=place.disk_bytes,
    )
    epoch = place.seed * 1_000
    while True:
        dataset.set_epoch(epoch)
        for batch in dataset.train:
            windows, labels = batch.arrays["x"], batch.arrays["y"]
            if len(labels) == BATCH:
                yield Batch(
                    torch.tensor(windows.reshape(BATCH, WINDOW)), torch.tensor(labels).long()
                )
        epoch += 1
