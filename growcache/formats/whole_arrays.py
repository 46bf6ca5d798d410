"""Objects of one array that are read whole: a sample each, or cut in memory."""

from __future__ import annotations

from growcache.errors import FormatError
from growcache.formats.base import (
    MOST_VISIT_BYTES,
    Measure,
    ObjectFormat,
    ObjectReader,
    SamplesWithOrigins,
    Visit,
)
from growcache.formats.contiguous import (
    ArrayLayout,
    cut_samples,
    native_order,
    wanted_ordinals,
)
from growcache.formats.grids import ArrayGrid
from growcache.schema import Array
from growcache.store.contract import Entry


class WholeArrayFormat(ObjectFormat):
    def __init__(self, grid: ArrayGrid | None) -> None:
        self._grid = grid

    async def load(self, reader: ObjectReader) -> tuple[ArrayLayout, Array]:
        """Return an array as it is stored, and its layout."""
        raise NotImplementedError

    def meant(self, values: Array, layout: ArrayLayout) -> Array:
        """Return the values that the stored values of a sample mean."""
        return values

    async def measure(self, reader: ObjectReader) -> Measure:
        size = float(reader.entry.size)
        if self._grid is None:
            return Measure(size, 0, 1)
        layout, _ = await self.load(reader)
        samples = self._grid.on(layout.shape, reader.entry.key)
        count = len(samples)
        return Measure(size / max(1, count), 0, count, empty=samples.too_short())

    async def read(self, reader: ObjectReader, visit: Visit) -> SamplesWithOrigins:
        (layout, array), key = await self.load(reader), reader.entry.key
        if self._grid is None:
            stop = layout.shape[0] if layout.shape else reader.entry.size
            return [({"x": native_order(self.meant(array, layout))}, 0, stop)]
        samples = self._grid.on(layout.shape, key, visit, key)
        wanted = wanted_ordinals({"x": layout}, {"x": samples}, visit, key)
        return [
            ({"x": native_order(self.meant(values, layout))}, start, stop)
            for values, start, stop in cut_samples(array, samples, wanted)
        ]


def refuse_large_array(nbytes: int, entry: Entry) -> None:
    if nbytes > MOST_VISIT_BYTES:
        raise FormatError(
            f"{entry.key}: an array that is read whole may have at most {MOST_VISIT_BYTES:,} "
            f"bytes, found {nbytes:,}",
            code="GC305",
        )
