"""Shared by the cases of benchmarks/formats.py: a sample, an object of many samples, a case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

ROWS, CHANNELS = 64, 64  # of a sample of float32: 16 KiB
SAMPLE_BYTES = ROWS * CHANNELS * 4

Take: TypeAlias = Callable[[str, int], Any]  # (object's key, sample's number) -> sample
Make: TypeAlias = Callable[[Path, np.random.Generator, int], int]


@dataclass(frozen=True, slots=True)
class Case:
    """A format, and the objects that hold it.

    Attributes:
        name: Name of the row and of the folder.
        format: Value of ``source.format``.
        make: Writes an object of the given number of samples, a file or a folder, and returns the
            bytes of the rows, pages, chunks, row groups, lines or records that hold them.
        by_hand: Takes a file system and returns the function that reads one sample.
        samples: Number of samples in an object.
        options: Options of the format.
        sampling: Settings of ``sampling``.
        objects: Pattern of the keys that are drawn from.
        opens: Whether each thread of the hand-written loop keeps every object open.
        downloads: Whether the hand-written loop downloads all objects first.
        goal: How many times as fast as the loop growcache must be, at 50 ms.
        needs: The library that makes the objects and reads them by hand.
        count: Number of objects.
        sample_bytes: Size of a sample.
        amplification: Bytes that may be fetched per byte that holds a sample.
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
        """The prefix of the case's keys."""
        return self.name.replace(",", "").replace(" ", "-")

    def key(self, number: int) -> str:
        """Return the key of an object, or the key's prefix if the object is a folder."""
        return f"{self.folder}/{number:03d}.{self.format}"


def values(rng: np.random.Generator, samples: int) -> Any:
    """Return the rows of `samples` samples, which hardly compress."""
    return rng.random((samples * ROWS, CHANNELS), dtype=np.float32)


def ranges(files: Any, key: str, start: int, nbytes: int) -> bytes:
    """Return a range of an object, as fsspec reads it."""
    found: bytes = files.cat_file(key, start=start, end=start + nbytes)
    return found
