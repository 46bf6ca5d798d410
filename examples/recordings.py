"""A user's own code: what the objects of a dataset hold, in functions that configs name.

Each object is an .npz archive with the array ``signal`` [time, channels], and is in a
folder that is named like its class: ``train/healthy/017.npz``.

growcache finds ``"recordings:read"`` where Python finds the module: next to the script, in
the working directory, or in what is installed. The functions run in the sampler processes,
in several threads at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import growcache

Sample = dict[str, Any]  # names and arrays; bytes and str are fine, too


def read(object: Any, rng: np.random.Generator, length: int, count: int) -> Iterator[Sample]:
    """``source.format: "recordings:read"``: yield random windows of one recording.

    Args:
        object: has ``key``, ``size``, ``read(start, stop)`` and ``open()``, a file.
        rng: the same for this object in each run; another one when it is visited again.
        length: of a window. This and ``count`` come from ``source.options``.
        count: windows per visit.
    """
    with object.open() as file, np.load(file) as arrays:
        signal = arrays["signal"]
    for start in rng.integers(len(signal) - length, size=count, endpoint=True):
        yield {"x": signal[start : start + length]}


def prepare(sample: Sample, origin: growcache.Origin, classes: Sequence[str]) -> Sample:
    """``sampling.transform: "recordings:prepare"``: scale it, and add the label.

    It is called once for each sample, before that is cached; ``classes`` comes from
    ``sampling.transform_options``. It may take a generator ``rng`` as well.
    """
    x = sample["x"].astype(np.float32)
    folder = origin.key.split("/")[-2]
    return {"x": (x - x.mean(0)) / (x.std(0) + 1e-6), "y": np.int64(classes.index(folder))}


class Pairs:
    """``source.format: "recordings:Pairs"``: draws for itself, two windows of one recording.

    Where a sample is more than a part of one object. A class is made once per sampler, so
    what it reads first is kept.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.keys: list[str] = []

    def __call__(self, store: Any, rng: np.random.Generator) -> Sample:
        """Return a sample; ``store`` has ``read(key, start, stop)`` and ``open(key)``."""
        if not self.keys:
            self.keys = store.read("index.txt").decode().split()
        key = self.keys[rng.integers(len(self.keys))]
        with store.open(key) as file, np.load(file) as arrays:
            signal = arrays["signal"]
        starts = rng.integers(len(signal) - self.length, size=2, endpoint=True)
        first, second = (signal[start : start + self.length] for start in starts)
        return {"first": first, "second": second, "recording": key}
