"""Objects that are worth one request, which then brings all of their samples."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from growcache.remote.formats.objects import Measure, ObjectFormat, Partnered, Reader, Visit
from growcache.remote.store import Entry

if TYPE_CHECKING:
    from typing_extensions import Buffer

SMALL = 1 << 16  # bytes; a request takes about as long as it takes to send these


class Fetched:
    """A `Reader` of an object that is in memory."""

    def __init__(self, remote: Reader, data: Buffer) -> None:
        self.entry, self.source, self.find = remote.entry, remote.source, remote.find
        self._data = memoryview(data).cast("B")

    async def read(self, start: int = 0, stop: int | None = None) -> Buffer:
        """See `Reader.read`."""
        return self._data[start:stop]


@runtime_checkable
class Headed(Protocol):
    """A format that reads a header before it knows where samples lie.

    To ask for the header alone and then for a sample takes two requests, and as long as it takes
    to fetch a small object.
    """

    @property
    def headed(self) -> bool:
        """Yes; of joined objects, whether any of them is read so."""


async def measured(form: ObjectFormat, reader: Reader) -> Measure:
    """Return the sizes of one object; of a small one all samples are worth one visit.

    Raises:
        FormatError: the object is not what the format says.
    """
    measure = await form.measure(reader)
    if not (isinstance(form, Headed) and form.headed and _size(reader) <= SMALL):
        return measure
    return replace(measure, together=max(measure.together, measure.samples))


def _size(reader: Reader) -> int:
    partners = reader.partners if isinstance(reader, Partnered) else ()
    return sum(one.entry.size for one in (reader, *partners))


def is_fetched_whole(entry: Entry, visit: Visit) -> bool:
    """Whether a visit wants all of a small object, or nearly: several samples are spread over it.

    Whoever wants one sample of it asks for the header and that.
    """
    return entry.size <= SMALL and visit.parts == 1 and visit.take != 1
