"""LitData over its own chunks in the bucket, with its limit on local files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import litdata
import numpy as np
import torch
from litdata.streaming import downloader

from benchmarks.slow_link.loop import BATCH, SHAPE, Places
from benchmarks.slow_link.samples import (
    COUNT,
    SHARD_BYTES,
    client_environment,
    client_options,
    sample,
)

WORKERS = 2


def _sample(number: int) -> dict[str, bytes]:
    return {"x": sample(number)}


def write(folder: str) -> None:
    litdata.optimize(
        fn=_sample,
        inputs=list(range(COUNT)),
        output_dir=folder,
        chunk_bytes=SHARD_BYTES,
        num_workers=1,
        verbose=False,
    )


def _collated(samples: list[dict[str, Any]]) -> torch.Tensor:
    rows = [np.frombuffer(sample["x"], "<f4").reshape(SHAPE) for sample in samples]
    return torch.from_numpy(np.stack(rows))


def batches(places: Places) -> Iterator[int]:
    os.environ |= client_environment(places.endpoint)
    # Its client refuses plain HTTP and has no option for it; workers are forked, so they have it.
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
    os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"
    dataset = litdata.StreamingDataset(
        f"s3://{places.bucket}/litdata",
        cache_dir=str(places.folder / "chunks"),
        shuffle=True,
        max_cache_size=places.disk_bytes,
        storage_options=client_options(places.endpoint),
    )
    loader = litdata.StreamingDataLoader(
        dataset, batch_size=BATCH, num_workers=WORKERS, collate_fn=_collated
    )
    while True:
        for batch in loader:
            yield len(batch)
