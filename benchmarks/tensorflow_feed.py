"""What growcache.tensorflow adds to TensorFlow's own readers, and its gap between epochs.

The peer is what one would write by hand over the same files, in the same process, with
the same shuffle buffer: interleave of TFRecordDataset, shuffle, batch, one parse_example.
It knows nothing of leases, digest_of or a cache that changes.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

import growcache.tensorflow as gtf
from benchmarks.measure import median, parser, report, verdict
from growcache.schema import Sample
from tests.filled import Filled

BATCH = 64
SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "256 KiB float32": ("<f4", (256, 256)),
    "3 KiB uint8": ("|u1", (32, 32, 3)),
}


def fill(root: Path, name: str, total_bytes: int, shards: int) -> int:
    """Make a cache of random samples; returns how many it holds."""
    dtype, shape = SHAPES[name]
    random = np.random.default_rng(0)

    def sample(label: int) -> Sample:
        values = random.integers(0, 100, shape, np.uint8).astype(dtype)
        return {"x": values, "y": np.array(label, "<i8")}

    with Filled(root, sample, max_bytes=10 * total_bytes) as cache:
        each = total_bytes // shards // cache.schema.nbytes
        for number in range(shards):
            cache.add_samples(number, [sample(i) for i in range(each)])
    return each * shards


def stock(root: Path, name: str, *, endless: bool = False) -> Any:
    """The pipeline that one would write by hand, with the settings of growcache's.

    Endless, it repeats the files, so that it has no gap either.
    """
    dtype, shape = SHAPES[name]
    features = {key: tf.io.FixedLenFeature([], tf.string) for key in ("x", "y")}
    sample_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    buffer = min(gtf.SHUFFLE_SAMPLES, gtf.SHUFFLE_BYTES // sample_bytes)

    def parse(records: Any) -> Any:
        parsed = tf.io.parse_example(records, features)
        x = tf.reshape(tf.io.decode_raw(parsed["x"], np.dtype(dtype).name), (-1, *shape))
        return {"x": x, "y": tf.reshape(tf.io.decode_raw(parsed["y"], tf.int64), [-1])}

    files = sorted(str(path) for path in (root / "shards").glob("*.tfrecord"))
    shards = tf.data.Dataset.from_tensor_slices(files).shuffle(len(files))
    if endless:
        shards = shards.repeat()
    return (
        shards.interleave(
            tf.data.TFRecordDataset, cycle_length=4, num_parallel_calls=tf.data.AUTOTUNE
        )
        .shuffle(buffer)
        .batch(BATCH, drop_remainder=True)
        .map(parse, num_parallel_calls=tf.data.AUTOTUNE)
        .prefetch(4)
    )


def touch(batch: Any) -> None:
    """Read a value, so that nothing can be left out."""
    float(batch["x"][(0,) * len(batch["x"].shape)].numpy())


def steady(dataset: Any, steps: int) -> Callable[[], tuple[float, float]]:
    """Return a function that gives (wall, CPU) seconds of so many batches.

    On a busy machine the CPU, which is of all threads, says more than the wall.
    """
    iterator = iter(dataset)
    for _ in range(8):
        touch(next(iterator))

    def seconds() -> tuple[float, float]:
        began, busy = time.perf_counter(), time.process_time()
        for _ in range(steps):
            touch(next(iterator))
        return time.perf_counter() - began, time.process_time() - busy

    return seconds


def gaps_between(epochs: Iterator[Iterator[Any]]) -> list[float]:
    """Return how long each epoch but the first took to give its first batch."""
    gaps = []
    for number, epoch in enumerate(epochs):
        began = time.perf_counter()
        for place, batch in enumerate(epoch):
            if place == 0 and number:
                gaps.append(time.perf_counter() - began)
            touch(batch)
            began = time.perf_counter()
    return gaps


def waits(dataset: Any, steps: int, work_seconds: float) -> list[float]:
    """Return how long each step waited for its batch beside a step that takes a while."""
    iterator, found = iter(dataset), []
    for _ in range(8):
        touch(next(iterator))
    for _ in range(steps):
        time.sleep(work_seconds)
        began = time.perf_counter()
        touch(next(iterator))
        found.append(time.perf_counter() - began)
    return found


def count_microseconds(root: Path) -> float:
    """Return what Python does per batch: the count of where its samples came from."""
    from growcache.loading.options import LoaderOptions
    from growcache.loading.streams import Checked, ShardStream

    options = LoaderOptions(path=root, batch_size=BATCH, min_samples=1)
    stream = ShardStream(options, lambda: 0, Checked(), endless=False)
    stream.begin(1)
    tokens = [token for _, token, _ in stream.shards()][:4]
    came_from = np.random.default_rng(0).choice(tokens, BATCH)
    took = []
    for _ in range(1000):
        began = time.perf_counter()
        stream.delivered(came_from)
        took.append(time.perf_counter() - began)
    stream.close()
    return statistics.median(took) * 1e6


def measure(name: str, root: Path, rounds: int, quick: bool) -> list[dict[str, Any]]:
    """Return the rows of one kind of sample."""
    samples = fill(root, name, 2**26 if quick else 2**29, 4 if quick else 16)
    dtype, shape = SHAPES[name]
    mb = int(np.prod(shape)) * np.dtype(dtype).itemsize * BATCH / 1e6
    steps = max(100, samples // BATCH)
    ours = steady(gtf.dataset(root, batch_size=BATCH, min_samples=1, endless=True), steps)
    theirs = steady(stock(root, name, endless=True), steps)
    pairs = [(ours(), theirs()) for _ in range(rounds)]
    ratio = median([b / a for (a, _), (b, _) in pairs])
    rows = [
        {
            "samples": name,
            "measure": "endless ÷ stock, speed",
            "growcache": f"{steps * mb / median([a for (a, _), _ in pairs]):,.0f} MB/s",
            "stock": f"{steps * mb / median([b for _, (b, _) in pairs]):,.0f} MB/s",
            "value": ratio,
            "goal": verdict(ratio, 0.9, at_most=False),
        },
        {
            "samples": name,
            "measure": "CPU per batch, ms; stock ÷ endless",
            "growcache": f"{1e3 * median([a for (_, a), _ in pairs]) / steps:.2f}",
            "stock": f"{1e3 * median([b for _, (_, b) in pairs]) / steps:.2f}",
            "value": median([b / a for (_, a), (_, b) in pairs]),
        },
    ]
    epoch = gtf.dataset(root, batch_size=BATCH, min_samples=1)
    hand = stock(root, name)
    ordinary = gaps_between(iter(epoch) for _ in range(rounds + 1))
    by_hand = gaps_between(iter(hand) for _ in range(rounds + 1))
    rows.append(
        {
            "samples": name,
            "measure": "gap of ordinary iteration, ms",
            "growcache": f"{1e3 * median(ordinary):.0f}",
            "stock": f"{1e3 * median(by_hand):.0f}",
        }
    )
    work = 3 * mb / 2500  # a step that takes thrice as long as the reading of its batch
    endless = gtf.dataset(root, batch_size=BATCH, min_samples=1, endless=True)
    stepwise = waits(endless, 3 * samples // BATCH, work)
    rows.append(
        {
            "samples": name,
            "measure": "worst wait over 3 passes of endless, ms",
            "growcache": f"{1e3 * max(stepwise):.1f} (median {1e3 * median(stepwise):.2f})",
        }
    )
    python = count_microseconds(root)
    rows.append(
        {
            "samples": name,
            "measure": "Python per batch, µs",
            "value": python,
            "goal": verdict(python, 100, at_most=True),
        }
    )
    return rows


def main() -> None:
    given = parser(__doc__).parse_args()
    rounds = given.rounds or (2 if given.quick else 5)
    rows: list[dict[str, Any]] = []
    for name in SHAPES:
        with tempfile.TemporaryDirectory(dir=given.directory) as folder:
            rows += measure(name, Path(folder) / "cache", rounds, given.quick)
    report("TensorFlow feed", rows, given.json)


if __name__ == "__main__":
    main()
