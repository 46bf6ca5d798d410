"""Bits that are flipped on the disk, and how each flip was found."""

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
    """A flipped bit of a live shard.

    Attributes:
        kind: The kind of file.
        number: The shard's number.
        digest: The digest in the shard's row.
        path: The file.
        place: Byte and bit.
        at: Monotonic seconds.
        inode: Of the file; a purge puts another one in its place.
    """

    kind: str
    number: int
    digest: str
    path: Path
    place: tuple[int, int]
    at: float
    inode: int = 0

    @property
    def is_there(self) -> bool:
        """Whether the file still exists, and is the same one."""
        try:
            return self.path.stat().st_ino == self.inode
        except FileNotFoundError:
            return False

    def heal(self) -> None:
        """Flip the bit back if the file still exists."""
        if self.is_there:
            turn_over(self.path, self.place)


def turn_over(path: Path, place: tuple[int, int]) -> bool:
    """Flip one bit of a file; return False if the file is gone or shorter."""
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
    """Return a random byte and bit of a file; more tries favour a byte that is not zero."""
    data = path.read_bytes() or b"\0"
    offset = dice.randrange(len(data))
    while not data[offset] and tries > 1:
        offset, tries = dice.randrange(len(data)), tries - 1
    return offset, dice.randrange(8)


def flip_shard(root: Path, kind: str, luck: float, sound: Collection[int]) -> Flip | None:
    """Flip a bit of a sound live shard; return None if there is no such shard."""
    dice, layout = random.Random(luck), CacheLayout(root)
    try:
        rows = [r for r in read_index(root).shards if r.samples and r.number in sound]
        row = dice.choice(rows)
        path = layout.shard(row.number, SIDECAR if kind == FLIP_SIDECAR else RECORDS)
        place = some_place(path, dice)
    except (CacheError, IndexError, FileNotFoundError):
        return None
    try:
        inode = path.stat().st_ino
    except FileNotFoundError:
        return None
    flip = Flip(kind, row.number, row.digest, path, place, time.monotonic(), inode)
    return flip if turn_over(path, place) else None


def skipped_shards(lines: Iterable[Line]) -> dict[int, set[str]]:
    """Return the shards that readers skipped as damaged, with the readers' roles."""
    skipped: dict[int, set[str]] = {}
    for line in lines:
        if line.event == "warning" and (found := _NUMBER.search(line.facts["message"])):
            skipped.setdefault(int(found[1]), set()).add(line.role)
    return skipped


def became(
    flip: Flip, skipped: dict[int, set[str]], found: Collection[int], live: Collection[int]
) -> str:
    """Return how a flip was found.

    Args:
        flip: The flip.
        skipped: The shards that readers have skipped since, with their roles.
        found: Shards in which ``check`` has found errors since.
        live: Shards that are still live.
    """
    if flip.number in skipped:
        return "a loader"
    if flip.number in found:
        return "check"
    return "missed" if flip.number in live else "evicted first"
