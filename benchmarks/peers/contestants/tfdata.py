"""A hand-written tf.data pipeline over TFRecord files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.peers.cases import BATCH, Case

FEATURES = {
    "x": tf.io.FixedLenFeature([], tf.string),
    "y": tf.io.FixedLenFeature([], tf.int64),
}


def _example(x: bytes, y: int) -> bytes:
    features = {
        "x": tf.train.Feature(bytes_list=tf.train.BytesList(value=[x])),
        "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[y])),
    }
    example = tf.train.Example(features=tf.train.Features(feature=features))
    return bytes(example.SerializeToString())


def write(case: Case, folder: Path) -> None:
    for number, (values, labels) in enumerate(case.each_shard()):
        with tf.io.TFRecordWriter(str(folder / f"{number:04}.tfrecord")) as writer:
            for x, y in zip(values, labels.tolist(), strict=True):
                writer.write(_example(x.tobytes(), y))


def _parsed(case: Case, records: Any) -> tuple[Any, ...]:
    """Parse a whole batch by one operation, and decode it by another."""
    parsed = tf.io.parse_example(records, FEATURES)
    strings, dtype = parsed["x"], tf.as_dtype(np.dtype(case.dtype).name)
    if case.shape is not None:
        values = tf.io.decode_raw(strings, dtype)
        return tf.reshape(values, (-1, *case.shape)), parsed["y"]
    lengths = tf.strings.length(strings)
    offsets = tf.concat([[0], tf.cumsum(lengths)], 0)
    return tf.io.decode_raw(tf.strings.reduce_join(strings), dtype), offsets, parsed["y"]


class Epochs:
    """NumPy arrays over TensorFlow's memory."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataset.as_numpy_iterator())


@contextmanager
def opened(
    case: Case, folder: Path, calls: int | None, pool: int | None = None
) -> Iterator[Epochs]:
    calls = tf.data.AUTOTUNE if calls is None else calls
    files = sorted(map(str, folder.glob("*.tfrecord")))
    dataset = (
        tf.data.Dataset.from_tensor_slices(files)
        .shuffle(len(files))
        .interleave(
            tf.data.TFRecordDataset,
            cycle_length=4,
            num_parallel_calls=calls,
            deterministic=False,
        )
        .shuffle(case.shuffled)
        .batch(BATCH, drop_remainder=True)
        .map(
            lambda records: _parsed(case, records),
            num_parallel_calls=calls,
            deterministic=False,
        )
        .prefetch(tf.data.AUTOTUNE)
    )
    options = tf.data.Options()
    options.deterministic = False
    if pool is not None:
        options.threading.private_threadpool_size = pool
    yield Epochs(dataset.with_options(options))
