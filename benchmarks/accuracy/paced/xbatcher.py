"""xbatcher over the same Zarr arrays: a batch is 64 neighbours, and batches come in random order."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import xarray
import xbatcher
from obstore.store import S3Store
from xbatcher.loaders.torch import MapDataset
from zarr.storage import ObjectStore

from benchmarks.accuracy.paced.place import BATCH, BUCKET, KEY, SECRET, Batch, Place

WORKERS, AHEAD = 4, 2


def _opened(place: Place) -> xarray.Dataset:
    store = S3Store(
        BUCKET,
        prefix="zarr",
        endpoint=place.endpoint,
        access_key_id=KEY,
        secret_access_key=SECRET,
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True, "timeout": "10m"},
    )
    return xarray.open_zarr(ObjectStore(store, read_only=True), chunks=None)


def batches(place: Place) -> Iterator[Batch]:
    """Yield batches of every epoch."""
    data = _opened(place)
    generators = (
        xbatcher.BatchGenerator(data[name], {"sample": BATCH}, preload_batch=False)
        for name in ("x", "y")
    )
    loader = torch.utils.data.DataLoader(
        MapDataset(*generators),
        batch_size=None,
        shuffle=True,
        num_workers=WORKERS,
        prefetch_factor=AHEAD,
        persistent_workers=True,
        multiprocessing_context="forkserver",
        generator=torch.Generator().manual_seed(place.seed),
    )
    while True:
        for windows, labels in loader:
            yield Batch(windows, labels.long())
