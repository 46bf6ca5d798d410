"""Bits that change on the disk, and what became of each."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from growcache.cache.files import RECORDS, SIDECAR, CacheLayout
from growcache.cache.index.reader import read_index
from growcache.errors import CacheError
from tests.chaos.readers import Line
from tests.chaos.schedule import FLIP_SIDECAR

_NUMBER = re.compile(r"/(\d{8})\.")


@dataclass(frozen=True, slots=True)
class Flip:
    """A bit of a live shard that was turned over.

    Attributes:
        kind: in which of its files.
        number: of the shard.
        digest: that its row gives.
        path: of the file.
        place: byte and bit.
        at: monotonic seconds.
    """

    kind: str
    number: int
    digest: str
    path: Path
    place: tuple[int, int]
    at: float

    def heal(self) -> None:
        """Turn the bit back, if the file is there still."""
        turn_over(self.path, self.place)


def turn_over(path: Path, place: tuple[int, int]) -> bool:
    """Turn over one bit of a file; False where the file is gone or shorter."""
    offset, bit = place
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        byte = os.pread(descriptor, 1, offset)
        if byte:
            os.pwrite(descriptor, bytes([byte[0] ^ (1 << bit)]), offset)
        return bool(byte)
    finally:
        os.close(descriptor)


def some_place(path: Path, dice: random.Random, tries: int = 1) -> tuple[int, int]:
    """Return a byte and a bit of a file; with more tries rather one that says something."""
    data = path.read_bytes() or b"\0"
    offset = dice.randrange(len(data))
    while not data[offset] and tries > 1:
        offset, tries = dice.randrange(len(data)), tries - 1
    return offset, dice.randrange(8)


def flip_shard(root: Path, kind: str, luck: float, sound: Collection[int]) -> Flip | None:
    """Turn over a bit of a live shard that is sound still; None where there is none."""
    dice, layout = random.Random(luck), CacheLayout(root)
    try:
        rows = [r for r in read_index(root).shards if r.samples and r.number in sound]
        row = dice.choice(rows)
        path = layout.shard(row.number, SIDECAR if kind == FLIP_SIDECAR else RECORDS)
        place = some_place(path, dice)
    except (CacheError, IndexError, FileNotFoundError):
        return None
    flip = Flip(kind, row.number, row.digest, path, place, time.monotonic())
    return flip if turn_over(path, place) else None


def numbers_told(lines: Iterable[Line]) -> dict[int, set[str]]:
    """Return the shards that readers passed over as damaged, with their roles."""
    told: dict[int, set[str]] = {}
    for line in lines:
        if line.event == "warning" and (found := _NUMBER.search(line.facts["message"])):
            told.setdefault(int(found[1]), set()).add(line.role)
    return told


def became(
    flip: Flip, told: dict[int, set[str]], found: Collection[int], live: Collection[int]
) -> str:
    """Return what became of a flip.

    Args:
        flip: the flip.
        told: what readers passed over since.
        found: shards in which ``check`` found something since.
        live: shards that are live still.
    """
    if flip.number in told:
        return "a loader"
    if flip.number in found:
        return "check"
    return "missed" if flip.number in live else "evicted first"
