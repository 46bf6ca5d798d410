"""Transforms for tests, which other processes import by name."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np

from growcache.errors import CacheError
from growcache.loading import shared_memory
from growcache.schema import Origin, Sample


def augment(sample: Sample, rng: np.random.Generator, origin: Origin) -> Sample:
    """Noise, a changed input, who the sample is, and fields of every size."""
    x = sample["x"]
    assert isinstance(x, np.ndarray)
    x += 1
    return {
        "id": sample["id"],
        "x": x + np.asarray(rng.random(x.shape), "f4"),
        "large": np.full((130, 128), rng.random(), "f8"),
        "key": origin.key,
        "raw": bytes(int(rng.integers(5))),
    }


def ragged(sample: Sample, rng: np.random.Generator) -> Sample:
    """Values of an own length each, under the name of a ragged field."""
    return {**sample, "rows": rng.random((int(rng.integers(4)), 3)).astype("f4")}


def where(sample: Sample) -> Sample:
    """Say who was here."""
    return {"id": sample["id"], "pid": np.array(os.getpid())}


def failing(sample: Sample) -> Sample:
    """Raise for one sample."""
    if int(np.asarray(sample["id"])) == 3004:
        raise ZeroDivisionError("in the user's code")
    return {"id": sample["id"]}


def locked(sample: Sample) -> Any:
    """Return what no other process can have."""
    return {"id": sample["id"], "lock": threading.Lock()}


def growing(sample: Sample) -> Sample:
    """Return other shapes for later shards."""
    return {"id": sample["id"], "x": np.zeros(1 + int(np.asarray(sample["id"])) // 6000)}


def same(sample: Sample) -> Sample:
    """Return what comes."""
    return dict(sample)


class Lasting:
    """Says that it was called, and does not return for a while."""

    def __init__(self, fifo: str) -> None:
        self.fifo = fifo

    def __call__(self, sample: Sample) -> Sample:
        """Take longer than any test."""
        with open(self.fifo, "w"):  # noqa: PTH123 - who opens it to read waits for that
            time.sleep(300)
        return {"id": sample["id"]}


class Keeping:
    """Keeps samples, as one that mixes two of them does."""

    def __init__(self) -> None:
        self.kept: list[tuple[Any, Any]] = []

    def __call__(self, sample: Sample) -> Sample:
        """Look at those that were kept."""
        assert all((one == copy).all() for one, copy in self.kept)
        x = np.asarray(sample["x"])
        self.kept = [*self.kept[-20:], (x, x.copy())]
        return {"id": sample["id"]}


class Deadly:
    """Ends its process, as a crash in somebody's C code does, until a file is there."""

    def __init__(self, flag: str, *, at: int) -> None:
        self.flag = flag
        self.at = at

    def __call__(self, sample: Sample) -> Any:
        """Look at the sample."""
        if int(np.asarray(sample["id"])) == self.at and not os.path.exists(self.flag):  # noqa: PTH110
            if self.flag:
                with open(self.flag, "w"):  # noqa: PTH123
                    pass
            os.abort()
        return {"id": sample["id"]}


class Deafening:
    """Has the process that it is called in first map no more memory, as where there is none."""

    def __init__(self, flag: str) -> None:
        self.flag = flag

    def __call__(self, sample: Sample) -> Sample:
        """Return something large."""

        def refuse(descriptor: int, size: int) -> Any:
            raise CacheError(f"cannot map {size} bytes")

        with suppress(FileExistsError):
            os.mkdir(self.flag)  # noqa: PTH102
            vars(shared_memory)["map_shared"] = refuse
        return {"id": sample["id"], "large": np.zeros((130, 128))}
