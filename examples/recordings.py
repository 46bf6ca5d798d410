"""A user's own code: functions for configs that read the objects of a dataset.

Each object is an .npz archive with the array ``signal`` [time, channels]. Its folder names
its class: ``train/healthy/017.npz``.

growcache finds ``"recordings:read"`` if Python finds the module: next to the script, in the
working directory, or among the installed packages. The functions run in the sampler
processes, in several threads at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import growcache

Sample = dict[str, Any]  # names and arrays; bytes and str are allowed, too


def read(object: Any, rng: np.random.Generator, length: int, count: int) -> Iterator[Sample]:
    """``source.format: "recordings:read"``: yield random windows of one recording.

    Args:
        object: has ``key``, ``size``, ``read(start, stop)`` and ``open()``, a file.
        rng: the same for this visit in each run. Each visit to an object has its own.
        length: steps per window. ``length`` and ``count`` come from ``source.options``.
        count: windows per visit.
    """
    with object.open() as file, np.load(file) as arrays:
        signal = arrays["signal"]
    for start in rng.integers(len(signal) - length, size=count, endpoint=True):
        yield {"x": signal[start : start + length]}


def prepare(sample: Sample, origin: growcache.Origin, classes: Sequence[str]) -> Sample:
    """``sampling.transform: "recordings:prepare"``: scale a sample and add its label.

    growcache calls it once for each sample, before caching. ``classes`` comes from
    ``sampling.transform_options``. The function may also take a generator ``rng``.
    """
    x = sample["x"].astype(np.float32)
    folder = origin.key.split("/")[-2]
    return {"x": (x - x.mean(0)) / (x.std(0) + 1e-6), "y": np.int64(classes.index(folder))}


class Pairs:
    """``source.format: "recordings:Pairs"``: draws pairs of windows of one recording.

    Use a class like this if a sample is more than a part of one object. Each sampler makes one
    instance, so the list of keys is read once.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.keys: list[str] = []

    def __call__(self, store: Any, rng: np.random.Generator) -> Sample:
        """Return a sample. ``store`` has ``read(key, start, stop)`` and ``open(key)``."""
        if not self.keys:
            self.keys = store.read("index.txt").decode().split()
        key = self.keys[rng.integers(len(self.keys))]
        with store.open(key) as file, np.load(file) as arrays:
            signal = arrays["signal"]
        starts = rng.integers(len(signal) - self.length, size=2, endpoint=True)
        first, second = (signal[start : start + self.length] for start in starts)
        return {"first": first, "second": second, "recording": key}
