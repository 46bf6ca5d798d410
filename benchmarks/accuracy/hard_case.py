"""E3, the hard case: objects that hold one class each, and visits that bring neighbours of an object.

The digits of E4, sorted by class into objects of 50. Visits of k samples bring k digits of one class, so n samples are
worth n / (1 + (k − 1) ρ). Arms: growing caches by k and eviction, one whose visits are not dealt over a group
of shards, a shuffle buffer and a block shuffle of the same number of samples, and full data.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from benchmarks.accuracy.experiment import Arm, Experiment, Feed, Place, Task, Variant
from benchmarks.accuracy.growing import GrowingFeed, as_batch, growing_feed
from benchmarks.accuracy.reuse import PLAIN, TRAINING_PACE, echoed, mixed_digits
from benchmarks.accuracy.streams import Order, StreamFeed, block_shuffled, buffered
from benchmarks.accuracy.wheels import Labelled

PER_OBJECT = 50
PER_VISIT = (1, 5, 25, 50)
EVICTIONS = ("fifo", "random", "most_used")
MAX_BYTES = 3_000_000
CAPACITY = 400  # samples in such a cache, and in the buffers of the streams
FIRST_SAMPLES = 160
SHARD_SAMPLES = 8
USES = 4  # of each sample that the link brings
# Between these uses the eviction policy decides which shard goes.
BETWEEN = {"min_uses": 2, "max_reuse": 6, "on_max_reuse": "wait"}
NOT_DEALT = """
from growcache.sampling import sizing
sizing.shards_per_group = lambda visit, max_bytes: 1
"""


def sorted_digits(seed: int) -> Task:
    """Return the digits sorted by class; in random order within a class."""
    mixed = mixed_digits(seed)
    order = np.argsort(mixed.training.labels, kind="stable")
    inputs, labels = mixed.training
    training = Labelled(inputs[order], labels[order])
    return mixed._replace(training=training, max_bytes=MAX_BYTES)


def correlation_in_class(digits: Labelled) -> float:
    """Return ρ: the share of the pixels' variance that is between classes."""
    images, labels = digits.inputs.reshape(len(digits.labels), -1), digits.labels
    means = np.stack([images[labels == label].mean(0) for label in np.unique(labels)])
    return float(means.var(0).sum() / images.var(0).sum())


def cached(
    place: Place, per_visit: int, eviction: str, patch: str = ""
) -> AbstractContextManager[GrowingFeed]:
    """Train on a growing cache."""
    rate = TRAINING_PACE // USES * place.task.training.inputs[0].nbytes
    sampling = {
        "samples_per_object": per_visit,
        "shard_samples": SHARD_SAMPLES,
        "max_bytes_per_second": rate,
    }
    cache = {"eviction": eviction, **BETWEEN}
    return growing_feed(
        place, PER_OBJECT, FIRST_SAMPLES, sampling, cache, link=1 / USES, patch=patch
    )


@contextmanager
def streamed(place: Place, order: Order) -> Iterator[Feed]:
    """Train on a stream with a buffer."""
    samples = as_batch(place.task.training)
    yield StreamFeed(samples, PER_OBJECT, CAPACITY, place.batch_size, place.seed, order)


ARMS: dict[str, Arm] = {
    **{
        f"visits of {per_visit}, {eviction}": partial(
            cached, per_visit=per_visit, eviction=eviction
        )
        for per_visit in PER_VISIT
        for eviction in EVICTIONS
    },
    "visits of 50, fifo, not dealt": partial(
        cached, per_visit=50, eviction="fifo", patch=NOT_DEALT
    ),
    "shuffle buffer": partial(streamed, order=buffered),
    "block shuffle": partial(streamed, order=block_shuffled),
    "full": partial(echoed, times=1),
}
VARIANTS = {
    "digits by class": Variant(sorted_digits, replace(PLAIN, steps=300, evaluate_every=30))
}
EXPERIMENT = Experiment("hard_case", VARIANTS, ARMS, seeds=10, reference="full")
