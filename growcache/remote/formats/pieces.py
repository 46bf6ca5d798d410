"""What formats share whose objects are cut into blocks of bytes: jsonl, tfrecord, tar."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from growcache.remote.formats.objects import Reader, Visit
from growcache.seeding import generator

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")


class Unpacked:
    """A `Reader` of bytes in memory."""

    def __init__(self, packed: Reader, data: Buffer) -> None:
        self._data = memoryview(data)
        self.entry = replace(packed.entry, size=self._data.nbytes)
        self.source, self.find = packed.source, packed.find

    async def read(self, start: int = 0, stop: int | None = None) -> Buffer:
        """See `Reader.read`."""
        return self._data[start:stop]


def picked(found: Sequence[T], visit: Visit, key: str) -> list[T]:
    """Return so many at random as the visit takes, in their order; else all."""
    if visit.take is None or visit.take >= len(found):
        return list(found)
    rng = generator("take", visit.seed, visit.round, key, visit.part, visit.parts)
    return [found[i] for i in sorted(rng.choice(len(found), visit.take, replace=False))]


def stretches(
    visit: Visit, key: str, start: int, stop: int, nbytes: int, *, most: int
) -> Iterator[tuple[int, int]]:
    """Yield stretches of a part at random, none of them twice: a few samples of many are there.

    Args:
        visit: to the part.
        key: of the object.
        start: first byte of the part, and
        stop: one past its last.
        nbytes: of a stretch.
        most: stretches.
    """
    rng = generator("stretch", visit.seed, visit.round, key, visit.part)
    count = max(1, -(-(stop - start) // nbytes))
    seen: set[int] = set()
    while len(seen) < min(count, most):
        number = int(rng.integers(count))
        if number not in seen:
            seen.add(number)
            at = start + number * nbytes
            yield at, min(stop, at + nbytes)


def block_of(stride: float, least: int, nbytes: int, most_bytes: int) -> int:
    """Return how many samples are worth one visit.

    Args:
        stride: bytes of a sample.
        least: so many at least, and
        nbytes: so many bytes, but at most
        most_bytes: of these.

    >>> [block_of(size, 24, 1 << 17, 1 << 24) for size in (300, 10_000, 5_000_000)]
    [436, 24, 3]
    """
    block = max(least, int(nbytes / max(1.0, stride)))
    return max(1, min(block, int(most_bytes / max(1.0, stride))))
