"""Several stretches of an object in as few requests as are worth it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from growcache.errors import FormatError
from growcache.remote.formats.objects import Reader

WORTH_A_REQUEST = 1 << 15  # bytes; a gap smaller than this is read along


async def read_ranges(reader: Reader, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """Return the bytes of each [start, stop).

    Raises:
        FormatError: the object is shorter than it was.
    """
    runs: list[list[tuple[int, int]]] = []
    end = 0
    for one in sorted(set(ranges)):
        if runs and one[0] - end <= WORTH_A_REQUEST:
            runs[-1].append(one)
            end = max(end, one[1])
        else:
            runs.append([one])
            end = one[1]
    got: dict[tuple[int, int], bytes] = {}

    async def fetch(run: list[tuple[int, int]]) -> None:
        first, last = run[0][0], max(stop for _, stop in run)
        view = memoryview(await reader.read(first, last)).cast("B")
        if len(view) < last - first:
            raise FormatError(f"{reader.entry.key}: expected {last:,} bytes; it is cut off")
        got.update((one, bytes(view[one[0] - first : one[1] - first])) for one in run)

    await asyncio.gather(*map(fetch, runs))
    return [got[one] for one in ranges]
