"""MosaicML Streaming over its own shards in the bucket, with its limit on local files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

# Streaming imports torchvision, whose wheels lack two operators with a CPU build of torch.
_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import streaming  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402

from benchmarks.slow_link.loop import BATCH, SAMPLE_BYTES, SHAPE, Places  # noqa: E402
from benchmarks.slow_link.samples import COUNT, SHARD_BYTES, client_environment, sample  # noqa: E402

WORKERS = 2


def write(folder: str) -> None:
    columns = {"x": "bytes"}
    with streaming.MDSWriter(out=folder, columns=columns, size_limit=SHARD_BYTES) as writer:
        for number in range(COUNT):
            writer.write({"x": sample(number)})


def _collated(samples: list[dict[str, Any]]) -> torch.Tensor:
    rows = [np.frombuffer(sample["x"], "<f4").reshape(SHAPE) for sample in samples]
    return torch.from_numpy(np.stack(rows))


def batches(places: Places) -> Iterator[int]:
    os.environ |= client_environment(places.endpoint)
    clean_stale_shared_memory()
    dataset = streaming.StreamingDataset(
        remote=f"s3://{places.bucket}/mds",
        local=str(places.folder / "mds"),
        shuffle=True,
        batch_size=BATCH,
        cache_limit=places.disk_bytes,
        shuffle_block_size=4 * SHARD_BYTES // SAMPLE_BYTES,
    )
    loader = torch.utils.data.DataLoader(
        dataset, BATCH, num_workers=WORKERS, collate_fn=_collated, persistent_workers=True
    )
    while True:
        for batch in loader:
            yield len(batch)
