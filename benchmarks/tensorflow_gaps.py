"""The waits of a TensorFlow loop where one pass over a growing cache follows the other.

Both readers run `endless` while shards are added and evicted between steps. A pass switch is
seen by the samples: the first batch with one that comes for the (k+1)-th time begins pass k.
The native reader mixes two passes in its shuffle buffer, so "at a switch" is the whole
stretch of batches around that one in which its pipeline changes over. Then epochs of
`samples_per_epoch`, where each begins with `iter`: TensorFlow makes an iterator for each,
and what that takes of an empty pipeline is given beside it.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

import growcache.tensorflow as gtf
from benchmarks.measure import parser, report, verdict
from growcache.schema import Sample
from tests.filled import Filled

BATCH = 32
SHARDS, SHARD_SAMPLES = 8, 64  # so that a pass has 16 batches, and 20 as it grows
MOST_SHARDS = 10
STEP_SECONDS = 0.002
AROUND = 4  # batches before and after
GOAL_MS = 1.0


def sample(label: int) -> Sample:
    return {"x": np.full((32, 32, 3), label % 251, np.uint8), "y": np.array(label, "<i8")}


class Growing:
    """A cache that is another one at every tenth step, as the loop itself sees to it."""

    def __init__(self, root: Path) -> None:
        self.filled = Filled(root, sample, max_bytes=10**9)
        self.filled.add(*range(SHARDS), samples=SHARD_SAMPLES)
        self._first, self._next = 0, SHARDS

    def grow(self) -> None:
        """Add a shard; beyond a size the oldest one goes."""
        self.filled.add(self._next, samples=SHARD_SAMPLES)
        self._next += 1
        if self._next - self._first > MOST_SHARDS:
            self.filled.retire(self._first)
            self._first += 1
        self.filled.poll()
        self.filled.cache.maintain()


def waits(cache: Growing, reader: Any, switches: int) -> tuple[list[float], list[int]]:
    """Return the wait of every step, and the steps with which a pass begins."""
    dataset = gtf.dataset(
        cache.filled.root, batch_size=BATCH, min_samples=1, endless=True, reader=reader
    )
    iterator, uses, found, begins = iter(dataset), dict[int, int](), list[float](), list[int]()
    passes = 1
    while len(begins) < switches:
        began = time.perf_counter()
        batch = next(iterator)
        found.append(time.perf_counter() - began)
        for label in batch["y"].numpy().tolist():
            uses[label] = uses.get(label, 0) + 1
            if uses[label] > passes:
                passes += 1
                begins.append(len(found) - 1)
        if len(found) % 170 == 0:
            cache.grow()
        time.sleep(STEP_SECONDS)
    return found, begins


def epoch_gaps(cache: Growing, reader: Any, epochs: int) -> list[float]:
    """Return how long the first batch of each epoch but the first took, `iter` included."""
    dataset = gtf.dataset(
        cache.filled.root,
        batch_size=BATCH,
        min_samples=1,
        samples_per_epoch=8 * BATCH,
        reader=reader,
    )
    return _gaps(dataset, epochs)


def _gaps(dataset: Any, epochs: int) -> list[float]:
    gaps = []
    for number in range(epochs):
        began = time.perf_counter()
        for place, _ in enumerate(dataset):
            if place == 0 and number:
                gaps.append(time.perf_counter() - began)
            time.sleep(STEP_SECONDS)
    return gaps


def percentile(values: Any, share: float) -> float:
    """Return a percentile in milliseconds."""
    return float(f"{1e3 * float(np.percentile(values, share)):.3g}")


def row(reader: str, what: str, values: Any, others: Any) -> dict[str, Any]:
    """Return a row: waits that should be no longer than others."""
    above = percentile(values, 99) - percentile(others, 99)
    return {
        "reader": reader,
        "wait": what,
        "median, ms": percentile(values, 50),
        "p99, ms": percentile(values, 99),
        "worst, ms": percentile(values, 100),
        "p99 elsewhere, ms": percentile(others, 99),
        "goal": verdict(float(f"{above:.3g}"), GOAL_MS, at_most=True),
    }


def measure(folder: Path, reader: str, switches: int, epochs: int) -> list[dict[str, Any]]:
    """Return the rows of a reader."""
    cache = Growing(folder / reader)
    found, begins = waits(cache, reader, switches)
    at = np.zeros(len(found), np.bool_)
    for begin in begins:
        at[max(0, begin - AROUND) : begin + AROUND + 1] = True
    at[: 2 * AROUND] = False  # the start of the pipeline is no switch
    values = np.array(found)
    exact = values[begins]
    elsewhere = values[2 * AROUND :][~at[2 * AROUND :]]
    rows = [
        row(reader, f"first batch of {len(begins)} passes", exact, elsewhere),
        row(reader, f"within {AROUND} batches of one", values[at], elsewhere),
    ]
    gaps = epoch_gaps(cache, reader, epochs)
    rows.append(
        row(reader, f"first batch of {epochs - 1} epochs, with iter()", gaps, elsewhere)
    )
    cache.filled.close()
    return rows


def main() -> None:
    given = parser(__doc__).parse_args()
    switches, epochs = (30, 20) if given.quick else (1000, 300)
    rows = []
    with tempfile.TemporaryDirectory(dir=given.directory) as folder:
        for reader in ("native", "gather"):
            rows += measure(Path(folder), reader, switches, epochs)
    bare = _gaps(tf.data.Dataset.range(8), epochs)
    rows.append(
        {
            "reader": "TensorFlow",
            "wait": "iter() and first element of Dataset.range",
            "median, ms": percentile(bare, 50),
            "p99, ms": percentile(bare, 99),
            "worst, ms": percentile(bare, 100),
        }
    )
    report("Gaps of TensorFlow feeds", rows, given.json)


if __name__ == "__main__":
    main()
