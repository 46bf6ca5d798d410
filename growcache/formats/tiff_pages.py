"""Locate the pixels of a TIFF file. tifffile parses directories, which are fetched when it reads them.

tifffile trusts the counts in a file. Its reads, and the sizes in OME-XML, are therefore bounded
here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from growcache.errors import FormatError, GrowcacheError
from growcache.formats.base import SMALL_OBJECT_BYTES, ObjectReader
from growcache.formats.chunks import MOST_ROWS
from growcache.formats.items import UserCall
from growcache.formats.tiff_codecs import JPEG, Decompress, decompressor
from growcache.schema import DTYPE_KINDS, Array
from growcache.store.contract import Entry
from growcache.store.seekable_file import SeekableFile

if TYPE_CHECKING:
    from typing_extensions import Buffer

PageDecoder: TypeAlias = Callable[..., tuple[Array | None, Any, Any]]

_BLOCK_BYTES = 1 << 14  # of directories; more blocks if directories follow each other
_MOST_BLOCKS = 1 << 6  # in one request
_MOST_KEPT_BLOCKS = 1 << 10
_MOST_FETCHED_BLOCKS = 1 << 15  # 512 MB
_MOST_READ_BYTES = 1 << 22  # of one value in a directory
_MOST_READ_BYTES_OF_ALL = 1 << 25
_MOST_READS = 100_000  # of directories and their values
_MOST_REQUESTS = 1 << 12
_MOST_PLANES = 1 << 18  # that OME-XML may claim
# Kinds whose planes are not those of the directories, or are in other files.
_OTHER_KINDS = ("avs", "bif", "eer", "fluoview", "lsm", "mdgel", "ndpi", "nih", "philips", "qpi",
                "scn", "sis", "stk")  # fmt: skip
_IGNORED_KINDS = ("mmstack", "ndtiff", "scanimage")  # their pages are read as they are


class TiffDirectories(SeekableFile):
    """The file that tifffile parses in a thread.

    tifffile catches errors, so the first one is kept here.
    """

    def __init__(self, call: UserCall, reader: ObjectReader) -> None:
        super().__init__(reader.entry.size)
        self.error: GrowcacheError | None = None
        self._call, self._reader = call, reader
        self._blocks: dict[int, memoryview] = {}
        self._reads = self._asked = self._requests = self._fetched = 0
        self._ahead, self._end = 1, 0

    def readinto(self, buffer: Buffer) -> int:
        into = memoryview(buffer).cast("B")
        start, stop = self.position, min(self.position + len(into), self.size)
        if stop <= start:
            return 0
        self._count(stop - start)
        for number in range(start // _BLOCK_BYTES, -(-stop // _BLOCK_BYTES)):
            first = number * _BLOCK_BYTES
            low, high = max(start, first), min(stop, first + _BLOCK_BYTES)
            into[low - start : high - start] = self._block(number)[low - first : high - first]
        self.position = stop
        return stop - start

    def _count(self, nbytes: int) -> None:
        if self.error is not None:
            raise OSError(str(self.error))
        self._reads += 1
        self._asked += nbytes
        if (
            nbytes > _MOST_READ_BYTES
            or self._asked > _MOST_READ_BYTES_OF_ALL
            or self._reads > _MOST_READS
            or self._requests > _MOST_REQUESTS
            or self._fetched > _MOST_FETCHED_BLOCKS
        ):
            raise self._failed(
                FormatError(
                    f"{self._reader.entry.key}: its directories are larger than growcache "
                    f"reads ({self._asked:,} bytes in {self._reads:,} places so far); write "
                    "fewer pages or larger tiles to a file",
                    code="GC305",
                )
            )

    def _block(self, number: int) -> memoryview:
        found = self._blocks.get(number)
        if found is None:
            self._fetch(number)
            found = self._blocks[number]
        return found

    def _fetch(self, number: int) -> None:
        """Fetch a block, and more after it the longer consecutive blocks are read."""
        follows = number == self._end
        self._ahead = min(_MOST_BLOCKS, 2 * self._ahead) if follows and number else 1
        ahead = SMALL_OBJECT_BYTES // _BLOCK_BYTES if not number else self._ahead
        last = next((n for n in range(number, number + ahead) if n in self._blocks), None)
        self._end = number + ahead if last is None else last
        stop = min(self.size, self._end * _BLOCK_BYTES)
        self._requests += 1
        self._fetched += self._end - number
        try:
            data = memoryview(self._call.wait(self._reader.read(number * _BLOCK_BYTES, stop)))
        except GrowcacheError as error:
            raise self._failed(error) from None
        if data.nbytes < stop - number * _BLOCK_BYTES:
            raise self._failed(
                FormatError(f"{self._reader.entry.key}: it is cut off", code="GC302")
            )
        for n in range(number, self._end):
            first = (n - number) * _BLOCK_BYTES
            self._blocks[n] = data[first : first + _BLOCK_BYTES]
        while len(self._blocks) > _MOST_KEPT_BLOCKS:
            del self._blocks[next(iter(self._blocks))]

    def _failed(self, error: GrowcacheError) -> OSError:
        self.error = error
        return OSError(str(error))


@dataclass(frozen=True, slots=True)
class TiffLayout:
    """An array whose first ``page_axes`` axes number its pages."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]  # of a pixel, with the file's byte order unless tifffile decodes it
    page_axes: int
    # Of pages, or of strips and tiles, [pages, strips or tiles]; -1: no such page.
    offsets: Array
    segments: TiffSegments | None  # None: the pixels of a page are contiguous

    @property
    def nheld(self) -> int:
        return (1 if self.segments is None else 2) * self.offsets.nbytes + 4000


@dataclass(frozen=True, slots=True)
class TiffSegments:
    """The strips or tiles of pages."""

    chunks: tuple[int, ...]  # shape along the axes of the array
    shape: tuple[int, ...]  # as tifffile decodes it: depth, length, width, samples
    sizes: Array  # stored bytes
    fill: Array  # value of segments that were never written
    decompress: Decompress | None
    decode: PageDecoder
    is_jpeg: bool = False
    tables: bytes | None = None  # for JPEG


def describe_tiff(
    call: UserCall, reader: ObjectReader, series: int, level: int, page: int | None
) -> TiffLayout:
    """Return the layout of an array. This runs in a thread."""
    file, key = TiffDirectories(call, reader), reader.entry.key
    try:
        found = _described(file, reader.entry, series, level, page)
    except FormatError:
        if file.error is None:
            raise
    except Exception as error:  # a damaged file can make tifffile raise anything
        if file.error is None:
            said = " ".join(str(error).split())[:200] or type(error).__name__
            raise FormatError(f"{key}: cannot be read as TIFF: {said}") from error
    if file.error is not None:
        raise file.error
    return found


def _described(
    file: TiffDirectories, entry: Entry, series: int, level: int, page: int | None
) -> TiffLayout:
    import tifffile

    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # errors report it
    ignored = {f"is_{kind}": False for kind in _IGNORED_KINDS}
    opened = tifffile.TiffFile(file, name="", _multifile=False, **ignored)
    for kind in _OTHER_KINDS:
        if getattr(opened, f"is_{kind}"):
            raise FormatError(
                f"{entry.key}: expected plain TIFF, OME-TIFF or ImageJ's, found a file of kind "
                f"{kind}; convert it, as with bioformats2raw or tifffile",
                code="GC304",
            )
    if page is not None:
        one = opened.pages[_checked("page", page, len(opened.pages), entry)]
        return _layout(tifffile.TiffPageSeries([one]), entry)
    if opened.is_ome:
        _refuse_large_claims(opened.ome_metadata or "", entry)
    found = opened.series
    several = found[_checked("series", series, len(found), entry)].levels
    return _layout(several[_checked("level", level, len(several), entry)], entry)


def _checked(name: str, number: int, count: int, entry: Entry) -> int:
    if number >= count:
        raise FormatError(
            f"{entry.key}: expected {name} {number}, found {count} of them, from 0 on",
            code="GC303",
        )
    return number


def _refuse_large_claims(xml: str, entry: Entry) -> None:
    """Refuse sizes in OME-XML from which tifffile would make huge lists."""
    from xml.etree import ElementTree

    for element in ElementTree.fromstring(xml).iter():
        kind, attributes = element.tag.rpartition("}")[2], element.attrib
        counts = [1.0]
        if kind == "Pixels":
            counts = [float(attributes.get(f"Size{axis}", 1)) for axis in "ZCT"]
            if not attributes.get("DimensionOrder", "").startswith("XY"):
                raise FormatError(
                    f"{entry.key}: expected OME-XML with the order XY…", code="GC304"
                )
        elif kind == "TiffData":
            counts = [float(attributes.get(name, 0)) for name in ("NumPlanes", "PlaneCount")]
            counts = [max(1.0, *counts)]
        elif kind.startswith("Along") or "Start" in attributes:
            begin, end = float(attributes.get("Start", 0)), float(attributes.get("End", 0))
            counts = [abs(end - begin) / (abs(float(attributes.get("Step", 1))) or 1e-9)]
        if not math.prod(counts) <= _MOST_PLANES:
            raise FormatError(
                f"{entry.key}: its OME-XML claims {math.prod(counts):,.0f} planes, more than the "
                f"{_MOST_PLANES:,} that are read",
                code="GC305",
            )


def _layout(series: Any, entry: Entry) -> TiffLayout:
    keyframe, shape = series.keyframe, tuple(map(int, series.shape))
    dtype = _checked_dtype(keyframe, entry)
    if not shape or min(shape) < 1 or math.prod(shape) >= MOST_ROWS or series.transform:
        raise FormatError(f"{entry.key}: it claims an array of {list(shape)}", code="GC302")
    chunks = _aligned(shape, keyframe, entry)
    page_axes = len(shape) - len(chunks)
    if not keyframe.is_final:
        return _segmented_layout(series, shape, dtype, chunks, entry)
    if series.dataoffset is not None:
        offsets, page_axes = np.array([series.dataoffset]), 0
    else:
        _check_pages(len(series), math.prod(shape[:page_axes]), entry)
        found = [-1 if one is None else one.dataoffsets[0] for one in series]
        offsets = np.asarray(found, np.int64)
    _check_end(offsets, math.prod(shape[page_axes:]) * dtype.itemsize, entry)
    byteorder: Any = keyframe.parent.byteorder
    return TiffLayout(shape, dtype.newbyteorder(byteorder), page_axes, offsets, None)


def _segmented_layout(
    series: Any,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    chunks: tuple[int, ...],
    entry: Entry,
) -> TiffLayout:
    keyframe, page_axes = series.keyframe, len(shape) - len(chunks)
    _check_pages(len(series), math.prod(shape[:page_axes]), entry)
    offsets, sizes = _segments(series, math.prod(keyframe.chunked))
    _check_end(offsets, sizes, entry)
    samples = keyframe.samplesperpixel if keyframe.planarconfig == 1 else 1
    stored = (1, keyframe.rowsperstrip, keyframe.imagewidth, samples)
    if keyframe.is_tiled:
        stored = (keyframe.tiledepth, keyframe.tilelength, keyframe.tilewidth, samples)
    decompress = decompressor(int(keyframe.compression), entry.key)
    is_jpeg = keyframe.compression in JPEG
    if not is_jpeg:  # others are decompressed here, because tifffile's decoders have no bound
        keyframe.compression = 1
    fill = np.asarray(keyframe.nodata).astype(dtype)
    chunks = (1,) * page_axes + chunks
    segments = TiffSegments(
        chunks,
        stored,
        sizes,
        fill,
        decompress,
        keyframe.decode,
        is_jpeg,
        _tables(series, entry),
    )
    return TiffLayout(shape, dtype, page_axes, offsets, segments)


def _tables(series: Any, entry: Entry) -> bytes | None:
    """Return the tables that the JPEGs of all pages share."""
    found = {one.jpegtables for one in series if one is not None}
    if len(found) > 1:
        raise FormatError(
            f"{entry.key}: the JPEGs of its pages have tables of their own", code="GC304"
        )
    return next(iter(found), None)


def _checked_dtype(keyframe: Any, entry: Entry) -> np.dtype[Any]:
    if keyframe.dtype is None or keyframe.dtype.kind not in DTYPE_KINDS:
        raise FormatError(
            f"{entry.key}: expected pixels of plain numbers, found {keyframe.bitspersample} bits "
            f"in sample format {keyframe.sampleformat}",
            code="GC306",
        )
    dtype: np.dtype[Any] = np.dtype(keyframe.dtype)
    return dtype


def _check_pages(found: int, expected: int, entry: Entry) -> None:
    if found != expected:
        raise FormatError(
            f"{entry.key}: expected {expected:,} pages, found {found:,}", code="GC302"
        )


def _check_end(offsets: Array, sizes: Array | int, entry: Entry) -> None:
    end = int((offsets + sizes).max(initial=0))
    if end > entry.size or np.min(sizes, initial=0) < 0 or offsets.min(initial=0) < -1:
        raise FormatError(
            f"{entry.key}: its directories promise {end:,} bytes, the object has {entry.size:,}",
            code="GC302",
        )


def _segments(series: Any, count: int) -> tuple[Array, Array]:
    """Return offsets and sizes of strips or tiles, at most ``count`` per page."""
    pages = list(series)
    known = max((len(one.dataoffsets) for one in pages if one is not None), default=0)
    offsets = np.full((len(pages), min(count, known)), -1, np.int64)
    sizes = np.zeros_like(offsets)
    for number, one in enumerate(pages):
        if one is not None:
            for into, values in ((offsets, one.dataoffsets), (sizes, one.databytecounts)):
                into[number] = 0
                into[number, : len(values)] = values[: into.shape[1]]
    return offsets, sizes


def _aligned(shape: Sequence[int], keyframe: Any, entry: Entry) -> tuple[int, ...]:
    """Return the chunks of a page along the axes of the array.

    The array may have axes of length 1 that the page lacks.
    """
    inner, chunks = list(keyframe.shape), list(keyframe.chunks)
    chunks = [1] * (len(inner) - len(chunks)) + chunks
    found: list[int] = []
    for size in reversed(shape):
        if inner and size == inner[-1]:
            inner.pop()
            found.insert(0, chunks.pop())
        elif inner and size == 1:
            found.insert(0, 1)
        else:
            break
    if inner:
        raise FormatError(
            f"{entry.key}: its pages of {list(keyframe.shape)} are not part of an array of "
            f"{list(shape)}",
            code="GC304",
        )
    return tuple(found)
