"""The `tfrecord` package, which reads TFRecord files without TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tfrecord import TFRecordWriter
from tfrecord.tools.tfrecord2idx import create_index
from tfrecord.torch.dataset import MultiTFRecordDataset

from benchmarks.noise import Array
from benchmarks.peers.cases import Case
from benchmarks.peers.contestants.torch_loader import collated, decoded, loader_of


def write(case: Case, folder: Path) -> None:
    for number, (values, labels) in enumerate(case.each_shard()):
        path = folder / f"{number:04}.tfrecord"
        writer = TFRecordWriter(str(path))
        for x, y in zip(values, labels.tolist(), strict=True):
            writer.write({"x": (x.tobytes(), "byte"), "y": (y, "int")})
        writer.close()
        create_index(str(path), str(path.with_suffix(".index")))


def _decoded(case: Case, sample: dict[str, Any]) -> tuple[Array, int]:
    return decoded(sample["x"], case), int(sample["y"][0])


def _collated(case: Case, samples: list[tuple[Array, int]]) -> Any:
    values, labels = zip(*samples, strict=True)
    return collated(values, labels, case)


@contextmanager
def opened(case: Case, folder: Path, workers: int) -> Iterator[Any]:
    names = sorted(path.stem for path in folder.glob("*.tfrecord"))
    dataset = MultiTFRecordDataset(
        f"{folder}/{{}}.tfrecord",
        f"{folder}/{{}}.index",
        {name: 1 / len(names) for name in names},
        {"x": "byte", "y": "int"},
        shuffle_queue_size=case.shuffled,
        infinite=False,
        transform=partial(_decoded, case),
    )
    yield loader_of(dataset, workers, partial(_collated, case))
