"""insitubatch over a Zarr array with a chunk per four samples, with its cache on disk."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.slow_link.loop import BATCH, SHAPE, Places
from benchmarks.slow_link.samples import COUNT, KEY, SECRET, sample

CHUNK_SAMPLES = 4  # a chunk of 1 MB, of uncompressible values
CONCURRENCY = 16


def write(folder: str) -> None:
    import zarr

    group = zarr.open_group(folder, mode="w")
    array = group.create_array(
        "x",
        shape=(COUNT, *SHAPE),
        chunks=(CHUNK_SAMPLES, *SHAPE),
        dtype="<f4",
        compressors=None,
    )
    for first in range(0, COUNT, CHUNK_SAMPLES):
        rows = b"".join(map(sample, range(first, first + CHUNK_SAMPLES)))
        array[first : first + CHUNK_SAMPLES] = np.frombuffer(rows, "<f4").reshape(-1, *SHAPE)


def batches(places: Places) -> Iterator[int]:
    from insitubatch import InSituDataset, obstore_store, open_geometries, split_by_chunk

    store = obstore_store(
        f"s3://{places.bucket}/zarr",
        endpoint=places.endpoint,
        access_key_id=KEY,
        secret_access_key=SECRET,
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )
    geometries = open_geometries(store, ["x"])
    manifest = split_by_chunk(geometries["x"], fractions=(1.0, 0.0, 0.0), contiguous=False)
    dataset = InSituDataset(
        store,
        manifest,
        geometries,
        batch_size=BATCH,
        block_chunks=32,
        max_inflight=CONCURRENCY,
        cache_dir=str(places.folder / "pool"),
        cache_budget_bytes=places.disk_bytes,
    )
    epoch = 0
    while True:
        dataset.set_epoch(epoch)
        for batch in dataset.train:
            yield len(batch.arrays["x"])
        epoch += 1
