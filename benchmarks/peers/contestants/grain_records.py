"""grain over ArrayRecord files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grain
import numpy as np
from array_record.python.array_record_data_source import ArrayRecordDataSource
from array_record.python.array_record_module import ArrayRecordWriter

from benchmarks.noise import Array
from benchmarks.peers.cases import BATCH, Case

LABEL_BYTES = 8


def write(case: Case, folder: Path) -> None:
    for number, (values, labels) in enumerate(case.each_shard()):
        path = str(folder / f"{number:04}.array_record")
        writer = ArrayRecordWriter(path, "group_size:1,uncompressed")
        for x, y in zip(values, labels, strict=True):
            writer.write(y.tobytes() + x.tobytes())
        writer.close()


def _batch(case: Case, records: Sequence[bytes]) -> tuple[Array, ...]:
    values = [np.frombuffer(record, case.dtype, offset=LABEL_BYTES) for record in records]
    y = np.array([np.frombuffer(record, np.int64, 1)[0] for record in records])
    if case.shape is not None:
        return np.stack(values).reshape(-1, *case.shape), y
    return np.concatenate(values), np.cumsum([0, *map(len, values)]), y


class Epochs:
    """A pipeline per epoch, each with a seed of its own."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._seed = 0

    def __iter__(self) -> Iterator[Any]:
        self._seed += 1
        made: Iterable[Any] = self._make(self._seed)
        return iter(made)


@contextmanager
def opened(case: Case, folder: Path, workers: int, threads: int) -> Iterator[Epochs]:
    source = ArrayRecordDataSource(sorted(map(str, folder.glob("*.array_record"))))

    def epoch(seed: int) -> Any:
        records = grain.MapDataset.source(source).shuffle(seed=seed)
        batches = records.batch(BATCH, drop_remainder=True, batch_fn=partial(_batch, case))
        made = batches.to_iter_dataset(
            grain.ReadOptions(num_threads=threads, prefetch_buffer_size=8)
        )
        if workers:
            options = grain.MultiprocessingOptions(workers, per_worker_buffer_size=2)
            made = made.mp_prefetch(options)
        return made

    yield Epochs(epoch)
