"""The waits of a TensorFlow loop where one epoch follows the other, while the cache changes.

Both readers, native and gather, run `endless` while the loop adds shards and retires old
ones. A switch is seen by the samples: with the first one that comes once more than all
others did, another pass begins. The native reader mixes two passes in its shuffle buffer, so
the batches around that one are looked at, too. The cache changes with every pass, twenty-five
times a second, and what follows from that all batches wait for: a gap is what those at a switch
wait for beyond the others, at the same percentile. Then datasets that are iterated epoch by
epoch, of ``samples_per_epoch`` and of all that is cached: the wait from the last batch of one
to the first of the next. TensorFlow makes an iterator for each, and what that takes of a
dataset that does nothing is given with it.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
SHARDS, SHARD_SAMPLES = 8, 64  # so that a pass has 16 batches, and 20 once it has grown
MOST_SHARDS = 10
GROWS_EVERY = 5  # epochs
STEP_SECONDS = 0.001
LEAD_IN = 16  # batches that are not counted
AROUND = 4  # batches before and after a switch
GOAL_MS = 1.0


def sample(label: int) -> Sample:
    return {"x": np.full((32, 32, 3), label % 251, np.uint8), "y": np.array(label, "<i8")}


class Growing:
    """A cache that the loop itself changes; its writer looks at leases as a service does."""

    def __init__(self, root: Path) -> None:
        self.filled = Filled(root, sample, max_bytes=10**9)
        self.filled.add(*range(SHARDS), samples=SHARD_SAMPLES)
        self._first, self._next, self._epochs = 0, SHARDS, 0

    def after_epoch(self) -> None:
        """Every few epochs, add a shard; beyond a size the oldest one goes."""
        self._epochs += 1
        if self._epochs % GROWS_EVERY:
            return
        self.filled.add(self._next, samples=SHARD_SAMPLES)
        self._next += 1
        if self._next - self._first > MOST_SHARDS:
            self.filled.retire(self._first)
            self._first += 1
        self.filled.poll()
        self.filled.cache.maintain()


@contextmanager
def growing(root: Path) -> Iterator[Growing]:
    cache = Growing(root)
    try:
        yield cache
    finally:
        cache.filled.close()


class Passes:
    """Tells by the labels of batches when a pass begins."""

    def __init__(self) -> None:
        self._number = 1
        self._seen: dict[int, int] = {}  # by label, the pass in which it came last

    def begins(self, labels: Sequence[int]) -> bool:
        """Return whether one of these came in this pass already, so that this is the next."""
        before = self._number
        for label in labels:
            # A new label belongs to the pass in which it first comes.
            seen = self._seen[label] = self._seen.get(label, before - 1) + 1
            self._number = max(self._number, seen)
        return self._number > before


def endless_waits(cache: Growing, dataset: Any, switches: int) -> tuple[list[float], list[int]]:
    """Return the wait of every step, and the steps with which a pass begins."""
    iterator, passes = iter(dataset), Passes()
    found: list[float] = []
    begins: list[int] = []
    while len(begins) < switches:
        began = time.perf_counter()
        batch = next(iterator)
        found.append(time.perf_counter() - began)
        if passes.begins(batch["y"].numpy().tolist()):
            begins.append(len(found) - 1)
            cache.after_epoch()
        time.sleep(STEP_SECONDS)
    return found, begins


def epoch_gaps(cache: Growing | None, dataset: Any, switches: int) -> list[float]:
    """Return the waits from the last batch of an epoch to the first of the next."""
    gaps: list[float] = []
    asked = None  # when the loop was done with the last batch of an epoch
    for _ in range(switches + 1):
        began = asked
        for place, _batch in enumerate(dataset):
            if place == 0 and began is not None:
                gaps.append(time.perf_counter() - began)
            time.sleep(STEP_SECONDS)
            asked = time.perf_counter()
        if cache is not None:
            changing = time.perf_counter()
            cache.after_epoch()
            asked = (asked or 0) + time.perf_counter() - changing
    return gaps


def row(reader: str, what: str, waits: Any) -> dict[str, Any]:
    """Return the figures of some waits, in seconds."""
    p50, p99, worst = (float(f"{1e3 * np.percentile(waits, q):.3g}") for q in (50, 99, 100))
    return {
        "reader": reader,
        "wait for": what,
        "measured": len(waits),
        "median ms": p50,
        "p99 ms": p99,
        "worst ms": worst,
    }


def endless_rows(cache: Growing, reader: Any, switches: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of the pipeline without end."""
    dataset = gtf.dataset(
        cache.filled.root, batch_size=BATCH, min_samples=1, endless=True, reader=reader
    )
    found, begins = endless_waits(cache, dataset, switches)
    near = np.zeros(len(found), np.bool_)
    for begin in begins:
        near[max(0, begin - AROUND) : begin + AROUND + 1] = True
    counted = np.arange(len(found)) >= LEAD_IN
    waits, first = np.array(found), np.array([b for b in begins if b >= LEAD_IN])
    others = row(reader, "endless: other batches", waits[counted & ~near])
    yield others
    for what, some in (
        ("endless: first batch of a pass", waits[first]),
        (f"endless: within {AROUND} batches of it", waits[counted & near]),
    ):
        made = row(reader, what, some)
        for figure in ("median", "p99"):
            above = made["p99 ms"] - others[f"{figure} ms"]
            made[f"p99 above the {figure} of others"] = round(above, 3)
        made["goal"] = verdict(made["p99 above the p99 of others"], GOAL_MS, at_most=True)
        yield made


def measure(folder: Path, reader: Any, switches: int, rebuilt: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a reader."""
    with growing(folder / f"{reader}-endless") as cache:
        yield from endless_rows(cache, reader, switches)
    for what, length, times in (
        ("first batch of samples_per_epoch", 8 * BATCH, switches),
        ("first batch of an epoch", None, rebuilt),
    ):
        with growing(folder / f"{reader}-{length}") as cache:
            dataset = gtf.dataset(
                cache.filled.root,
                batch_size=BATCH,
                min_samples=1,
                samples_per_epoch=length,
                reader=reader,
            )
            yield row(reader, what, epoch_gaps(cache, dataset, times))
            del dataset
            gc.collect()  # datasets refer to themselves, and what they hold would go on


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--switches", type=int, help="epochs of each case (default 1,000)")
    given = arguments.parse_args()
    switches = given.switches or (20 if given.quick else 1000)
    rebuilt = max(10, switches // 10)  # those are long
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=given.directory, prefix="gaps-") as folder:
        for reader in ("native", "gather"):
            rows += measure(Path(folder), reader, switches, rebuilt)
    bare = epoch_gaps(None, tf.data.Dataset.range(8), switches)
    rows.append(row("TensorFlow", "first element of Dataset.range", bare))
    title = f"Gaps of TensorFlow feeds: steps of {1e3 * STEP_SECONDS:g} ms, batches of {BATCH}"
    report(title, rows, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
