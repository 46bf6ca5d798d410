"""The lines of an object, by byte range: a block owns those that start in it."""

from __future__ import annotations

from dataclasses import dataclass

from growcache.errors import FormatError
from growcache.remote.formats.ahead import Ahead
from growcache.remote.formats.objects import LARGEST_WHOLE, Reader, Visit, read_whole
from growcache.remote.formats.pieces import picked, stretches

LONGEST_LINE = 1 << 25  # bytes; as Python's objects a line can take thirty times as many
SMALL = 1 << 18  # bytes; an object up to this size is measured as a whole
STRETCH = 1 << 20  # bytes that are read where a few lines of many are taken
MOST_STRETCHES = 256  # then there are no more lines, but what is longer than lines are
_SPOTS, _SPOT = 4, 1 << 16  # places at which a large object is measured, and bytes of each
# Bytes at a time until a long line ends; then so many times more.
_LEAST_MORE, _MORE, _MOST_MORE, _GROWTH = 1 << 12, 1 << 16, 1 << 23, 4
_MOST_AHEAD = 1 << 20
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """A line that is not blank, without its end.

    Attributes:
        start: its first byte in the object.
        data: its bytes.
    """

    start: int
    data: bytes

    @property
    def stop(self) -> int:
        """One past its last byte."""
        return self.start + len(self.data)


def split(data: bytes, at: int) -> list[Line]:
    r"""Return the lines of bytes that begin with a line, at position ``at`` of the object.

    >>> [(line.start, line.data) for line in split(b"a\r\n\nbc", 100)]
    [(100, b'a'), (104, b'bc')]
    """
    lines = []
    if at == 0 and data.startswith(_BOM):
        data, at = data[len(_BOM) :], len(_BOM)
    for line in data.split(b"\n"):
        if line and not line.isspace():
            lines.append(Line(at, line[:-1] if line.endswith(b"\r") else line))
        at += len(line) + 1
    return lines


class Lines:
    """Reads lines of objects; remembers how long they are, to read as little as it can."""

    def __init__(self) -> None:
        self._ahead = Ahead(4096, 64, _MOST_AHEAD)

    async def read(self, reader: Reader, visit: Visit) -> list[Line]:
        """Return the lines of the visit's part; some of them where the visit takes some.

        Raises:
            FormatError: a line, or the part, is longer than a sampler can hold.
        """
        size = reader.entry.size
        start = visit.part * size // visit.parts
        stop = (visit.part + 1) * size // visit.parts
        if visit.take is None:
            return await self.between(reader, start, stop)
        found = await self._stretches(reader, visit, start, stop)
        return picked(found, visit, reader.entry.key)

    async def between(self, reader: Reader, start: int, stop: int) -> list[Line]:
        """Return the lines that start in [start, stop)."""
        if start >= stop:
            return []
        _refuse_too_much(reader, stop - start)
        first = max(0, start - 1)  # whether a line starts at ``start``, the byte before says
        data = await _bytes(reader, first, stop + self._ahead.nbytes)
        begin = data.find(b"\n", 0, stop - 1 - first) + 1 if start else 0
        if start and not begin:
            return []
        data = await self._to_the_end(reader, data, first, stop - 1 - first)
        lines = split(data[begin:], first + begin)
        self._ahead.learn([len(line.data) for line in lines])
        return lines

    async def _to_the_end(self, reader: Reader, data: bytes, first: int, within: int) -> bytes:
        """Return the bytes up to the end of the line that ``data[within]`` is of."""
        pieces, length = [data], len(data)
        more = self._ahead.step(_LEAST_MORE, _MORE)
        end = data.find(b"\n", within)
        line = first + data.rfind(b"\n", 0, within) + 1
        while end < 0 and first + length < reader.entry.size:
            if first + length - line > LONGEST_LINE:
                raise FormatError(
                    f"{reader.entry.key}: a line may have {LONGEST_LINE:,} bytes, the one at "
                    f"byte {line:,} has more; does it hold lines?"
                )
            piece = await _bytes(reader, first + length, first + length + more)
            found = piece.find(b"\n")
            end = length + found if found >= 0 else -1
            pieces.append(piece)
            length, more = length + len(piece), min(_MOST_MORE, _GROWTH * more)
        whole = b"".join(pieces) if len(pieces) > 1 else data
        return whole if end < 0 else whole[:end]

    async def _stretches(
        self, reader: Reader, visit: Visit, start: int, stop: int
    ) -> list[Line]:
        """Return the lines of stretches at random, until there are enough to take some."""
        lines: list[Line] = []
        places = stretches(visit, reader.entry.key, start, stop, STRETCH, most=MOST_STRETCHES)
        for at, end in places:
            lines += await self.between(reader, at, end)
            if len(lines) >= (visit.take or 0):
                break
        return sorted(lines, key=lambda line: line.start)

    async def measure(self, reader: Reader) -> tuple[int, float]:
        """Return how many lines there are, and bytes from one to the next; about, if large."""
        size = reader.entry.size
        if size <= SMALL:
            lines = split(bytes(memoryview(await read_whole(reader))), 0)
            return len(lines), size / max(1, len(lines))
        spots = [i * (size - _SPOT) // (_SPOTS - 1) for i in range(_SPOTS)]
        looked = [await self.between(reader, at, at + _SPOT) for at in spots]
        found = [line for lines in looked for line in lines]
        if not found:  # the spots lie within lines
            found = await self.between(reader, 0, 1)
        # Where they lie close, so many start in so many bytes; where they do not, each is long.
        stride = max(_SPOTS * _SPOT / max(1, len(found)), _mean(found))
        return max(1, int(size / stride)), stride


def _mean(lines: list[Line]) -> float:
    return sum(len(line.data) + 1 for line in lines) / max(1, len(lines))


async def _bytes(reader: Reader, start: int, stop: int) -> bytes:
    return bytes(memoryview(await reader.read(start, min(stop, reader.entry.size))))


def _refuse_too_much(reader: Reader, nbytes: int) -> None:
    if nbytes > LARGEST_WHOLE // 2:  # what is made of them is in memory, too
        raise FormatError(
            f"{reader.entry.key}: one visit may read {LARGEST_WHOLE // 2:,} bytes of lines, "
            f"found {nbytes:,}; lower sampling.samples_per_object"
        )
