"""MosaicML Streaming over a local folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.cases import BATCH, Case
from benchmarks.peers.contestants.torch_loader import collated, decoded, loader_of

# Importing it imports torchvision, whose wheels are built for CUDA. With a torch built for the
# CPU they lack two operators, which nothing here calls, and the import fails.
_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import streaming  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402

SHARD_BYTES = 64 << 20


def write(case: Case, folder: Path) -> None:
    out = folder / "mds"
    shutil.rmtree(out, ignore_errors=True)
    columns = {"x": "bytes", "y": "int64"}
    with streaming.MDSWriter(out=str(out), columns=columns, size_limit=SHARD_BYTES) as writer:
        for values, labels in case.each_shard():
            for x, y in zip(values, labels, strict=True):
                writer.write({"x": x.tobytes(), "y": y})


def _collated(case: Case, samples: list[dict[str, Any]]) -> Any:
    values = [decoded(sample["x"], case) for sample in samples]
    return collated(values, [sample["y"] for sample in samples], case)


@contextmanager
def opened(case: Case, folder: Path, workers: int) -> Iterator[Any]:
    clean_stale_shared_memory()
    dataset = streaming.StreamingDataset(
        local=str(folder / "mds"), shuffle=True, batch_size=BATCH
    )
    loader = loader_of(dataset, workers, partial(_collated, case))
    yield loader
    del loader, dataset
