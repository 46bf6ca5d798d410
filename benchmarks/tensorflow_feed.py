"""What growcache.tensorflow delivers, against a pipeline of tf.data written by hand.

Both readers, native and gather, and the peer read the same shards into the same batches
(checked, labels too). The peer is the best form known of what one would write: interleave
of TFRecordDataset, shuffle, batch, one parse_example per batch, prefetch; it has the
shuffle buffer of the native reader, and knows nothing of leases or a cache that changes.

Each has a process of its own, for TensorFlow changes how memory is allocated in all of a
process once that uses Python's generators, which growcache does. They take turns, and one
alone is at work at a time.
"""

from __future__ import annotations

import argparse
import contextlib
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
from growcache.schema import Sample, Schema
from tests.filled import Filled

BATCH = 64
WARM_BATCHES = 6
READERS = ("by hand", "native", "gather")
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


def fill(root: Path, kind: Kind, total_bytes: int, shards: int) -> None:
    """Make a cache of random samples."""
    rng = np.random.default_rng(0)

    def sample(label: int) -> Sample:
        rows = int(rng.integers(SHORTEST, LONGEST + 1))
        shape = [rows if size is None else size for size in kind.shape]
        values = rng.integers(0, 100, shape, np.uint8).astype(kind.dtype)
        return {"x": values, "y": np.array(label, "<i8")}

    schema = Schema.declared({"x": [kind.dtype, *kind.shape], "y": ["int64"]})
    with Filled(root, sample, schema=schema, max_bytes=10 * total_bytes) as cache:
        each = total_bytes // shards // kind.sample_bytes
        for number in range(shards):
            first = number * each
            cache.add_samples(number, [sample(first + i) for i in range(each)])


# What one writes by hand


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


# What each process does


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

    def samples(self, root: Path, name: str) -> dict[int, int]:
        """Return a checksum of each sample by its label."""
        found: dict[int, int] = {}
        for batch in self.dataset(root, name, endless=False):
            for label, x in zip(batch["y"].numpy().tolist(), batch["x"], strict=True):
                assert label not in found, f"label {label} came twice"
                found[label] = zlib.crc32(np.ascontiguousarray(x.numpy()).data)
        return found

    def steady(self, root: Path, name: str, steps: int) -> tuple[float, float]:
        """Return (wall, CPU) seconds of so many batches of an iterator that is under way."""
        dataset = self._endless.get(name)
        if dataset is None:
            dataset = self._endless[name] = self.dataset(root, name, endless=True)
        iterator = iter(dataset)
        for _ in range(WARM_BATCHES):
            touch(next(iterator))
        with timed() as took:
            for _ in range(steps):
                touch(next(iterator))
        return took[0], took[1]

    def started(self, root: Path, name: str, steps: int) -> tuple[float, float]:
        """Return (wall, CPU) seconds of so many batches, the iterator's start included."""
        dataset = self._endless[name]
        with timed() as took:
            iterator = iter(dataset)
            for _ in range(steps):
                touch(next(iterator))
        return took[0], took[1]

    def fit(self, root: Path, name: str, steps: int) -> tuple[float, float]:
        """Return (wall, CPU) seconds of so many steps of `model.fit` that is under way."""
        import tensorflow as tf

        took: list[float] = []

        class Times(tf.keras.callbacks.Callback):  # type: ignore[misc]
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                took.append(time.perf_counter())
                took.append(time.process_time())

        model = self._models.get(name) or self._models.setdefault(name, _model())
        model.fit(
            self._endless[name],
            steps_per_epoch=steps,
            epochs=2,
            shuffle=False,
            verbose=0,
            callbacks=[Times()],
        )
        return time.perf_counter() - took[2], time.process_time() - took[3]


def _model() -> Any:
    """Return a model whose step costs next to nothing."""
    import tensorflow as tf

    class Glance(tf.keras.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x = data["x"]
            x = x.values if isinstance(x, tf.RaggedTensor) else x
            return {"seen": tf.cast(tf.reshape(x[:1], [-1])[0], tf.float32)}

    made = Glance()
    made.compile()
    return made


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
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def ask(self, what: str, *arguments: Any) -> Any:
        """Return what the process answers."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        print(json.dumps([what, *map(_plain, arguments)]), file=self._child.stdin, flush=True)
        answer = self._child.stdout.readline()
        if not answer:
            sys.exit(f"{self._child.args!r} ended at {what} {arguments}")
        return json.loads(answer)

    def close(self) -> None:
        """End the process."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(60)


def _plain(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, Path) else value


GOALS = {
    ("native", "eager"): 1.0,
    ("native", "with the start"): 1.0,
    ("gather", "eager"): 3.0,
    ("gather", "model.fit"): 3.0,
}


def measure(
    peers: dict[str, Peer], name: str, root: Path, rounds: int, quick: bool
) -> list[dict[str, Any]]:
    """Return the rows of one kind of sample."""
    kind = KINDS[name]
    fill(root, kind, 2**25 if quick else 2**28, 4 if quick else 16)
    found = [peer.ask("samples", root, name) for peer in peers.values()]
    assert found[0], "no samples"
    assert all(other == found[0] for other in found), f"{name}: the readers differ"
    megabytes = kind.sample_bytes * BATCH / 1e6
    steps = 16 if quick else max(24, int(100 // megabytes))
    rows = []
    for what, asked in (
        ("eager", "steady"),
        ("with the start", "started"),
        ("model.fit", "fit"),
    ):
        took: dict[str, list[tuple[float, float]]] = {reader: [] for reader in peers}
        for _ in range(rounds):
            for reader, peer in peers.items():
                took[reader].append(tuple(peer.ask(asked, root, name, steps)))
        for reader, times in took.items():
            speeds = [b / a for (a, _), (b, _) in zip(times, took["by hand"], strict=True)]
            goal = GOALS.get((reader, what))
            judged = goal is not None and (reader == "native" or name.startswith("256"))
            rows.append(
                {
                    "samples": name,
                    "measure": what,
                    "reader": reader,
                    "MB/s": f"{steps * megabytes / median([a for a, _ in times]):,.0f}",
                    "CPU ms a batch": f"{1e3 * median([b for _, b in times]) / steps:.2f}",
                    "÷ by hand": median(speeds),
                    "goal": verdict(median(speeds), goal, at_most=False)
                    if judged and goal is not None
                    else "",
                }
            )
    return rows


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", choices=list(KINDS), help="samples of one kind")
    arguments.add_argument("--serve", choices=READERS, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.serve:
        serve(given.serve)
        return
    rows: list[dict[str, Any]] = []
    for name in [given.only] if given.only else KINDS:
        peers = {reader: Peer(reader) for reader in READERS}
        try:
            with tempfile.TemporaryDirectory(dir=given.directory) as folder:
                rounds = given.rounds or (2 if given.quick else 5)
                rows += measure(peers, name, Path(folder) / "cache", rounds, given.quick)
        finally:
            for peer in peers.values():
                peer.close()
    report("TensorFlow feeds", rows, given.json)


if __name__ == "__main__":
    main()
