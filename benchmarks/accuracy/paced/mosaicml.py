"""MosaicML Streaming over its own shards, with its limit on local files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

# Streaming imports torchvision, whose wheels lack two operators with a CPU build of torch.
_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import streaming  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402

from benchmarks.accuracy.paced.place import BATCH, BUCKET, WINDOW, Batch, Place, stacked  # noqa: E402

WORKERS = 2
SHARD_BYTES = 240_000  # the limit holds 32; with half as many it fetched some again and again


def write(windows: npt.NDArray[np.uint8], labels: npt.NDArray[np.int64], folder: Path) -> None:
    """Write shards."""
    columns = {"x": "bytes", "y": "int64"}
    with streaming.MDSWriter(
        out=str(folder), columns=columns, size_limit=SHARD_BYTES
    ) as writer:
        for window, label in zip(windows, labels, strict=True):
            writer.write({"x": window.tobytes(), "y": label})


def _collated(rows: list[dict[str, Any]]) -> Batch:
    return stacked([row["x"] for row in rows], [int(row["y"]) for row in rows])


def batches(place: Place) -> Iterator[Batch]:
    """Yield batches of every epoch."""
    os.environ |= place.environment
    clean_stale_shared_memory()
    dataset = streaming.StreamingDataset(
        remote=f"s3://{BUCKET}/mds",
        local=str(place.folder / "mds"),
        shuffle=True,
        shuffle_seed=place.seed,
        batch_size=BATCH,
        cache_limit=place.disk_bytes,
        shuffle_block_size=4 * SHARD_BYTES // WINDOW,
        download_timeout=600,
    )
    # Forked workers would share the connection that fetched the index, and mix up its answers.
    for stream in dataset.streams:
        stream._downloader.clean_up()
    loader = torch.utils.data.DataLoader(
        dataset,
        BATCH,
        num_workers=WORKERS,
        collate_fn=_collated,
        drop_last=True,
        persistent_workers=True,
    )
    while True:
        yield from loader
