"""The speed of growcache.tensorflow against a pipeline of tf.data written by hand.

Both readers, native and gather, and the peer read the same shards; that they deliver the
same samples is checked first. The peer is the best form known of what one would write:
interleave of TFRecordDataset, shuffle, batch, one parse_example per batch, prefetch; it has
the shuffle buffer of the native reader, and knows nothing of leases or of a cache that
changes. And the limit: "in memory" is one batch that is there already, handed out again and
again, so it is what TensorFlow's iterators, or Keras' steps, take by themselves: what it does not
reach nothing does. "memcpy" is the limit of whatever puts batches of large samples together in
Python's process: rows that are in memory already, chosen beforehand, are copied once, in one
operation, into memory that goes round, and a generator hands each batch over. (Small ones `gather` hands over several at
a time, and is faster.)

Each has a process of its own, because TensorFlow changes how memory is allocated in all of a
process once that uses Python's generators, which growcache does. They take turns, one alone
is at work at a time, and what is timed begins behind half as many batches that are not, by when
no memory is fresh any more, and is long enough that it tells nothing of the start. "With the
start" alone counts from `iter`, of a dataset that was iterated before.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import median, parser, report, verdict
from growcache.loading.framework import take_slices
from growcache.schema import Sample, Schema
from tests.filled import Filled

BATCH = 64
LEAD_IN = 8  # batches at least, more than TensorFlow has ready
TIMED_BYTES = {"steady": 1_200_000_000, "started": 400_000_000, "fit": 1_200_000_000}
MOST_STEPS = {"steady": 1000, "started": 1000, "fit": 800}  # Keras takes a millisecond for each
READERS = ("by hand", "native", "gather")
MEMCPY, LIMIT = "memcpy", "in memory"
ROTATED = (
    8  # batches that memcpy copies from, and buffers it fills: TensorFlow has fewer at once
)
SHUFFLE_BYTES, SHUFFLE_SAMPLES = 64_000_000, 16_384
SHORTEST, LONGEST = 20, 200  # rows of 1 KiB in a ragged sample


@dataclass(frozen=True)
class Kind:
    """Samples of one kind: x and a label y."""

    dtype: str
    shape: tuple[int | None, ...]

    @property
    def sample_bytes(self) -> int:
        """Of x, on average."""
        sizes = [(SHORTEST + LONGEST) // 2 if size is None else size for size in self.shape]
        return int(np.prod(sizes)) * np.dtype(self.dtype).itemsize


KINDS = {
    "256 KiB float32": Kind("float32", (256, 256)),
    "3 KiB uint8": Kind("uint8", (32, 32, 3)),
    "20-200 KiB ragged": Kind("float32", (None, 256)),
}


def fill(root: Path, kind: Kind, total_bytes: int, shards: int) -> int:
    """Make a cache of random samples, labelled 0, 1, …; returns how many."""
    rng = np.random.default_rng(0)

    def sample(label: int) -> Sample:
        rows = int(rng.integers(SHORTEST, LONGEST + 1))
        shape = [rows if size is None else size for size in kind.shape]
        values = rng.integers(0, 100, shape, np.uint8).astype(kind.dtype)
        return {"x": values, "y": np.array(label, "<i8")}

    schema = Schema.declared({"x": [kind.dtype, *kind.shape], "y": ["int64"]})
    each = total_bytes // shards // kind.sample_bytes
    with Filled(root, sample, schema=schema, max_bytes=10 * total_bytes) as cache:
        for number in range(shards):
            first = number * each
            cache.add_samples(number, [sample(first + i) for i in range(each)])
    return shards * each


# The pipeline by hand


def by_hand(root: Path, kind: Kind, *, endless: bool) -> Any:
    """Return the peer's pipeline; endless, it repeats the files, so it has no gap either."""
    import tensorflow as tf

    features = {key: tf.io.FixedLenFeature([], tf.string) for key in ("x", "y")}
    row = [size for size in kind.shape if size is not None]

    def parse(records: Any) -> Any:
        parsed = tf.io.parse_example(records, features)
        y = tf.reshape(tf.io.decode_raw(parsed["y"], tf.int64), [-1])
        if None not in kind.shape:
            x = tf.io.decode_raw(parsed["x"], kind.dtype)
            return {"x": tf.reshape(x, (-1, *row)), "y": y}
        values = tf.io.decode_raw(tf.strings.reduce_join(parsed["x"]), kind.dtype)
        nbytes = int(np.prod(row)) * np.dtype(kind.dtype).itemsize
        lengths = tf.strings.length(parsed["x"]) // nbytes
        x = tf.RaggedTensor.from_row_lengths(
            tf.reshape(values, (-1, *row)), lengths, validate=False
        )
        return {"x": x, "y": y}

    files = sorted(str(path) for path in (root / "shards").glob("*.tfrecord"))
    shards = tf.data.Dataset.from_tensor_slices(files).shuffle(len(files))
    return (
        (shards.repeat() if endless else shards)
        .interleave(
            tf.data.TFRecordDataset, cycle_length=4, num_parallel_calls=tf.data.AUTOTUNE
        )
        .shuffle(min(SHUFFLE_SAMPLES, SHUFFLE_BYTES // kind.sample_bytes))
        .batch(BATCH, drop_remainder=endless)
        .map(parse, num_parallel_calls=tf.data.AUTOTUNE)
        .prefetch(4)
    )


def in_memory(root: Path, kind: Kind) -> Any:
    """Return one batch again and again."""
    import tensorflow as tf

    [batch] = by_hand(root, kind, endless=True).take(1)
    return tf.data.Dataset.from_tensors(batch).repeat()


def memcpy(root: Path, kind: Kind) -> Any:
    """Return batches of rows from all over some others, copied once, that a generator hands over."""
    import tensorflow as tf

    ragged = None in kind.shape
    found = list(by_hand(root, kind, endless=True).take(ROTATED))
    rows = [row for batch in found for row in values_of(batch["x"])]
    row_shape = rows[0].shape[1:] if ragged else rows[0].shape
    order = np.random.default_rng(0).permutation(len(rows)).reshape(ROTATED, BATCH)
    source = np.concatenate([row.reshape(-1).view(np.uint8) for row in rows])
    lengths = np.array([row.nbytes for row in rows])
    starts = np.cumsum(lengths) - lengths
    splits = [np.cumsum([0, *(len(rows[i]) for i in some)]) for some in order.tolist()]
    labels = [batch["y"].numpy() for batch in found]
    buffers = [aligned(int(lengths[some].sum())) for some in order]

    def copies() -> Iterator[tuple[Any, ...]]:
        for i in itertools.cycle(range(ROTATED)):
            out = buffers[i]
            take_slices(source, starts[order[i]], lengths[order[i]], out)
            yield out.view(kind.dtype).reshape(-1, *row_shape), splits[i], labels[i]

    def batch_of(x: Any, splits: Any, y: Any) -> Any:
        if ragged:
            x = tf.RaggedTensor.from_row_splits(x, splits, validate=False)
        return {"x": x, "y": y}

    specs = (
        tf.TensorSpec([None if ragged else BATCH, *row_shape], kind.dtype),
        tf.TensorSpec([BATCH + 1], tf.int64),
        tf.TensorSpec([BATCH], tf.int64),
    )
    handed = tf.data.Dataset.from_generator(copies, output_signature=specs)
    return handed.prefetch(2).map(batch_of)


def aligned(nbytes: int) -> Any:
    """Return uint8 [nbytes] that TensorFlow need not copy."""
    memory = np.zeros(nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes]


# The work of each process


class Feed:
    """One reader in its process."""

    def __init__(self, reader: str) -> None:
        self._reader = reader
        self._endless: dict[str, Any] = {}
        self._models: dict[str, Any] = {}

    def dataset(self, root: Path, name: str, *, endless: bool) -> Any:
        """Return the batches of an epoch, or without end."""
        if self._reader == "by hand":
            return by_hand(root, KINDS[name], endless=endless)
        if self._reader == LIMIT:
            return in_memory(root, KINDS[name])
        if self._reader == MEMCPY:
            return memcpy(root, KINDS[name])
        import growcache.tensorflow as gtf

        reader: Any = self._reader
        return gtf.dataset(
            root,
            batch_size=BATCH,
            min_samples=1,
            drop_last=False,
            endless=endless,
            reader=reader,
        )

    def samples(self, root: Path, name: str) -> list[tuple[int, int]]:
        """Return each sample's label and checksum, by label."""
        found: list[tuple[int, int]] = []
        for batch in self.dataset(root, name, endless=False):
            sums = [zlib.crc32(value.data) for value in values_of(batch["x"])]
            found += zip(batch["y"].numpy().tolist(), sums, strict=True)
        return sorted(found)

    def steady(self, root: Path, name: str, steps: int) -> tuple[float, float]:
        """Return (wall, CPU) seconds of a number of batches of a running iterator."""
        dataset = self._endless.get(name)
        if dataset is None:
            dataset = self._endless[name] = self.dataset(root, name, endless=True)
        iterator = iter(dataset)
        for _ in range(max(LEAD_IN, steps // 2)):
            touch(next(iterator))
        with timed() as took:
            for _ in range(steps):
                touch(next(iterator))
        return took[0], took[1]

    def started(self, root: Path, name: str, steps: int) -> tuple[float, float]:
        """Return (wall, CPU) seconds of a number of batches, the iterator's start included."""
        dataset = self._endless[name]
        with timed() as took:
            iterator = iter(dataset)
            for _ in range(steps):
                touch(next(iterator))
        return took[0], took[1]

    def fit(self, root: Path, name: str, steps: int) -> tuple[float, float]:
        """Return (wall, CPU) seconds of a number of steps of a running `model.fit`.

        Behind the last one TensorFlow ends the iterator, whoever made it, and at times waits
        for a thread of its own that sleeps, up to a second.
        """
        import tensorflow as tf

        took: list[tuple[float, float]] = []

        class Times(tf.keras.callbacks.Callback):  # type: ignore[misc]
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                took.append((time.perf_counter(), time.process_time()))

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                took.append((time.perf_counter(), time.process_time()))

        model = self._models.get(name) or self._models.setdefault(name, _model())
        model.fit(
            self._endless[name],
            steps_per_epoch=steps,
            epochs=2,
            shuffle=False,
            verbose=0,
            callbacks=[Times()],
        )
        _, _, began, ended = took
        return ended[0] - began[0], ended[1] - began[1]


def _model() -> Any:
    """Return a model whose step costs next to nothing."""
    import tensorflow as tf

    class Glance(tf.keras.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x = data["x"]
            x = x.values if isinstance(x, tf.RaggedTensor) else x
            return {"seen": tf.cast(tf.reshape(x[:1], [-1])[0], tf.float32)}

    made = Glance()
    made.compile(jit_compile=False)
    return made


def values_of(batch: Any) -> list[Any]:
    """Return the single values of a tensor, ragged or not, as contiguous arrays."""
    if not hasattr(batch, "row_splits"):
        return list(batch.numpy())
    values, splits = batch.values.numpy(), batch.row_splits.numpy().tolist()
    return [values[start:stop] for start, stop in itertools.pairwise(splits)]


def touch(batch: Any) -> None:
    """Read a value of each tensor, so that nothing can be left out."""
    for value in batch.values():
        memoryview(value.values if hasattr(value, "values") else value).cast("B")[-1]


@contextlib.contextmanager
def timed() -> Iterator[list[float]]:
    """Give (wall, CPU of all threads) seconds, once it is over."""
    took: list[float] = []
    began, busy = time.perf_counter(), time.process_time()
    yield took
    took += [time.perf_counter() - began, time.process_time() - busy]


def serve(reader: str) -> None:
    """Answer what the measuring process asks, one line of JSON each."""
    feed = Feed(reader)
    calls: dict[str, Callable[..., Any]] = {
        "samples": feed.samples,
        "steady": feed.steady,
        "started": feed.started,
        "fit": feed.fit,
    }
    for line in sys.stdin:
        what, root, *rest = json.loads(line)
        found = calls[what](Path(root), *rest)
        print(json.dumps(found), flush=True)


# The process that measures


class Peer:
    """A reader's process."""

    def __init__(self, reader: str) -> None:
        command = [sys.executable, "-m", "benchmarks.tensorflow_feed", "--serve", reader]
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=environment,
        )

    def ask(self, what: str, root: Path, *arguments: Any) -> Any:
        """Return what the process answers."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        asked = json.dumps([what, os.fspath(root), *arguments])
        print(asked, file=self._child.stdin, flush=True)
        answer = self._child.stdout.readline()
        if not answer:
            self._said.seek(0)
            said = self._said.read().decode(errors="replace")
            sys.exit(f"{self._child.args!r} ended at {asked}:\n{said[-2000:]}")
        return json.loads(answer)

    def close(self) -> None:
        """End the process."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(60)
        self._said.close()


GOALS = {"native": 1.0, "gather": 3.0}
MEASURES = {"eager": "steady", "with the start": "started", "model.fit": "fit"}


def check(peers: dict[str, Peer], root: Path, name: str, samples: int) -> None:
    """Check that all readers deliver each sample once, and the same."""
    found = {reader: peers[reader].ask("samples", root, name) for reader in READERS}
    labels = [label for label, _ in found["by hand"]]
    assert labels == list(range(samples)), f"{name}: not every sample once"
    assert all(other == found["by hand"] for other in found.values()), f"{name}: they differ"


def measure(
    peers: dict[str, Peer], name: str, root: Path, rounds: int, quick: bool
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one kind of sample."""
    kind = KINDS[name]
    samples = fill(root, kind, 2**25 if quick else 2**28, 4 if quick else 16)
    check(peers, root, name, samples)
    batch_bytes = kind.sample_bytes * BATCH
    for what, asked in MEASURES.items():
        steps = 16 if quick else min(MOST_STEPS[asked], TIMED_BYTES[asked] // batch_bytes)
        took: dict[str, list[tuple[float, float]]] = {reader: [] for reader in peers}
        for _ in range(rounds):
            for reader, peer in peers.items():
                took[reader].append(tuple(peer.ask(asked, root, name, steps)))
        for reader, times in took.items():
            speeds = [b / a for (a, _), (b, _) in zip(times, took["by hand"], strict=True)]
            row = {
                "samples": name,
                "measure": what,
                "reader": reader,
                "MB/s": round(steps * batch_bytes / 1e6 / median([wall for wall, _ in times])),
                "CPU ms a batch": median([1e3 * cpu / steps for _, cpu in times]),
                "÷ by hand": median(speeds),
            }
            if reader in GOALS:
                row["goal"] = verdict(median(speeds), GOALS[reader], at_most=False)
            elif reader == LIMIT and median(speeds) < GOALS["gather"]:
                row["goal"] = "gather's is out of reach"
            yield row


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--only", choices=list(KINDS), help="samples of one kind")
    arguments.add_argument("--serve", choices=(*READERS, MEMCPY, LIMIT), help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.serve:
        serve(given.serve)
        return 0
    rounds = given.rounds or (2 if given.quick else 5)
    rows: list[dict[str, Any]] = []
    for name in [given.only] if given.only else KINDS:
        peers = {reader: Peer(reader) for reader in (*READERS, MEMCPY, LIMIT)}
        try:
            with tempfile.TemporaryDirectory(dir=given.directory, prefix="feed-") as folder:
                rows += measure(peers, name, Path(folder) / "cache", rounds, given.quick)
        finally:
            for peer in peers.values():
                peer.close()
    report(f"TensorFlow feeds, batches of {BATCH}", rows, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
