"""What the cases of benchmarks/formats.py have in common: a sample, an object of many, a case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

ROWS, CHANNELS = 64, 64  # float32, of a sample: 16 KiB
SAMPLE_BYTES = ROWS * CHANNELS * 4

Take: TypeAlias = Callable[[str, int], Any]  # the sample of an object's key and a number
Make: TypeAlias = Callable[[Path, np.random.Generator, int], int]


@dataclass(frozen=True, slots=True)
class Case:
    """A format.

    Attributes:
        name: of the row, and of the folder.
        format: as in ``source.format``.
        make: writes an object of so many samples, a file or a folder, and returns the bytes of
            the rows, pages, chunks, row groups, lines or records that hold them.
        by_hand: makes, of a file system, what takes one sample.
        samples: of an object.
        options: of the format.
        sampling: as in ``sampling``.
        objects: which of what was made are objects that are drawn from.
        opens: whether the loop keeps something open of each object, in each thread.
        downloads: whether it downloads all objects first.
        goal: such that growcache is so many times as fast as the loop, at 50 ms.
        needs: the library that makes the objects, and reads them by hand.
        count: of the objects that are made.
        sample_bytes: of one.
        amplification: bytes that may be fetched for each byte that holds a sample.
    """

    name: str
    format: str
    make: Make
    by_hand: Callable[[Any], Take]
    samples: int
    options: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    objects: str = "*"
    opens: bool = False
    downloads: bool = False
    goal: float | None = None
    needs: str = "numpy"
    count: int = 8
    sample_bytes: int = SAMPLE_BYTES
    amplification: float = 1.1

    @property
    def folder(self) -> str:
        """The prefix of its keys."""
        return self.name.replace(",", "").replace(" ", "-")

    def key(self, number: int) -> str:
        """Return the key of one of its objects; of a folder without what is in it."""
        return f"{self.folder}/{number:03d}.{self.format}"


def values(rng: np.random.Generator, samples: int) -> Any:
    """Return the rows of so many samples, which cannot be compressed much."""
    return rng.random((samples * ROWS, CHANNELS), dtype=np.float32)


def ranges(files: Any, key: str, start: int, nbytes: int) -> bytes:
    """Return a range of an object, as fsspec reads it."""
    found: bytes = files.cat_file(key, start=start, end=start + nbytes)
    return found
