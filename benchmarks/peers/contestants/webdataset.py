"""WebDataset over local tar files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import webdataset

from benchmarks.noise import Array
from benchmarks.peers.cases import BATCH, Case
from benchmarks.peers.contestants.torch_loader import collated, decoded


def write(case: Case, folder: Path) -> None:
    for number, (values, labels) in enumerate(case.each_shard()):
        with webdataset.TarWriter(str(folder / f"{number:04}.tar")) as tar:
            for x, y in zip(values, labels, strict=True):
                tar.write({"__key__": f"{y:08}", "x": x.tobytes(), "y": y.tobytes()})


def _decoded(case: Case, sample: dict[str, Any]) -> tuple[Array, Any]:
    return decoded(sample["x"], case), np.frombuffer(sample["y"], np.int64)[0]


def _collated(case: Case, samples: list[tuple[Array, Any]]) -> Any:
    values, labels = zip(*samples, strict=True)
    return collated(values, labels, case)


@contextmanager
def opened(case: Case, folder: Path, workers: int) -> Iterator[Any]:
    files = sorted(map(str, folder.glob("*.tar")))
    stream = webdataset.WebDataset(files, shardshuffle=len(files), empty_check=False)
    batches = (
        stream.shuffle(case.shuffled)
        .map(partial(_decoded, case))
        .batched(BATCH, collation_fn=partial(_collated, case))
    )
    yield webdataset.WebLoader(
        batches, batch_size=None, num_workers=workers, persistent_workers=workers > 0
    )
