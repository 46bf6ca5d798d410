"""What formats share whose objects are cut into blocks of records: tfrecord, tar."""

from __future__ import annotations

from collections.abc import Sequence
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
