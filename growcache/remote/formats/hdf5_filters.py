"""Chunks of HDF5 datasets as they were before they went through filters; plain NumPy and zlib.

These run in threads side by side, unlike the library, which decodes one chunk at a time and
only what is left to it: the filters that it has built in, beside those that are here.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from growcache.errors import FormatError
from growcache.remote.formats.chunks import Chunking
from growcache.remote.formats.hdf5_file import undisturbed
from growcache.remote.formats.hdf5_layout import Layout
from growcache.schema import Array

DEFLATE, SHUFFLE, FLETCHER32, SCALE_OFFSET = 1, 2, 3, 6
BY_LIBRARY = {4: "szip", 5: "n-bit", 6: "scale-offset", 32000: "lzf"}
OTHERS = {
    307: "bzip2", 32001: "blosc", 32004: "lz4", 32008: "bitshuffle", 32013: "zfp", 32015: "zstd",
    32026: "blosc2",
}  # fmt: skip

_NAMES = itertools.count()  # of files in memory


def check_filters(layout: Layout, key: str) -> None:
    """Refuse a dataset whose filters only a plugin knows; plugins are never looked for.

    Likewise one whose values the library would not give back here: without a fill value the
    scale-offset filter has one value more to tell.

    Raises:
        FormatError: names the filter.
    """
    for code, _, _ in layout.filters:
        if code not in (DEFLATE, SHUFFLE, FLETCHER32, *BY_LIBRARY):
            name = OTHERS.get(code, "unknown")
            raise FormatError(
                f"{key}: dataset {layout.path} uses filter {code} ({name}), which HDF5 has not "
                "built in; gzip, lzf, shuffle, fletcher32, scale-offset, n-bit and szip are read"
            )
        if code == SCALE_OFFSET and layout.no_fill:
            raise FormatError(
                f"{key}: dataset {layout.path} goes through the scale-offset filter and has no "
                "fill value, of which the values cannot be told; write it again with one"
            )


def decode_chunk(data: memoryview, mask: int, layout: Layout, chunking: Chunking) -> Array:
    """Return a chunk as an array.

    Args:
        data: as it is stored.
        mask: of the filters that this chunk did not go through.
        layout: of its dataset.
        chunking: of its dataset.

    Raises:
        FormatError: it is damaged.
    """
    expected = chunking.chunk_bytes
    if layout.few_bits is not None or any(code in BY_LIBRARY for code, _, _ in layout.filters):
        return _by_library(data, mask, layout, chunking)
    for number in reversed(range(len(layout.filters))):
        code, _, values = layout.filters[number]
        if not mask >> number & 1:
            data = _UNDONE[code](data, values, expected)
    if data.nbytes != expected:
        raise FormatError(f"a chunk has {data.nbytes} bytes where {expected} belong")
    return np.frombuffer(data, chunking.dtype).reshape(chunking.chunks)


def _inflated(data: memoryview, _: tuple[int, ...], expected: int) -> memoryview:
    most = expected + expected // 8 + 4096  # what another filter before may have added
    inflater = zlib.decompressobj()
    try:
        found = inflater.decompress(data, most)
    except zlib.error as error:
        raise FormatError(f"a chunk cannot be decompressed: {error}") from None
    if not inflater.eof:
        raise FormatError(f"a chunk is cut off, or has more than {most} bytes")
    return memoryview(found)


def _unshuffled(data: memoryview, values: tuple[int, ...], _: int) -> memoryview:
    size = values[0] if values else 0
    whole = data.nbytes // size * size if size else 0
    if size < 2 or whole <= size:
        return data
    bytes_ = np.frombuffer(data, np.uint8)
    found = np.empty_like(bytes_)
    found[:whole].reshape(-1, size)[:] = bytes_[:whole].reshape(size, -1).T
    found[whole:] = bytes_[whole:]
    return memoryview(found.data)


def _checked(data: memoryview, _: tuple[int, ...], __: int) -> memoryview:
    if data.nbytes < 4:
        raise FormatError("a chunk is too short for its checksum")
    values, kept = data[:-4], int.from_bytes(data[-4:], "little")
    sums = fletcher32(values)
    # HDF5 1.6.2 and before wrote the halves the other way round in memory.
    swapped = int.from_bytes(bytes(data[-4:])[1::-1] + bytes(data[-4:])[:1:-1], "little")
    if sums not in {(k >> 16) % 65535 << 16 | (k & 65535) % 65535 for k in (kept, swapped)}:
        raise FormatError("a chunk does not match its checksum")
    return values


def fletcher32(data: memoryview) -> int:
    """Return the checksum of HDF5, each half modulo 65535.

    >>> hex(fletcher32(memoryview(b"abcde")))
    '0x4ff029c7'
    """
    block = 1 << 16
    odd = b"\0" if data.nbytes % 2 else b""
    words = np.frombuffer(bytes(data) + odd if odd else data, ">u2").astype(np.uint64)
    lines = np.zeros((-(-len(words) // block) or 1, block), np.uint64)
    lines.reshape(-1)[lines.size - len(words) :] = words  # zeros in front count nothing
    low = lines.sum(1) % 65535
    high = (lines @ np.arange(block, 0, -1, dtype=np.uint64)) % 65535
    before = (np.cumsum(low) - low) % 65535
    second = int((high + before * np.uint64(block % 65535)).sum()) % 65535
    return second << 16 | int(low.sum()) % 65535


_UNDONE: dict[int, Callable[[memoryview, tuple[int, ...], int], memoryview]] = {
    DEFLATE: _inflated,
    SHUFFLE: _unshuffled,
    FLETCHER32: _checked,
}


def _by_library(data: memoryview, mask: int, layout: Layout, chunking: Chunking) -> Array:
    """Let the library decode the chunk: as the only one of a file in memory.

    Not as one of the file that it is from, which says itself how its filters are set: the
    library sets them anew here, by the shape and the type, and does not believe the file.
    """
    try:
        with undisturbed():
            return _decoded(bytes(data), mask, layout, chunking)
    except Exception as error:  # the library raises what damage makes it raise
        raise FormatError(
            f"a chunk cannot be decoded: {' '.join(str(error).split())}"
        ) from error


def _decoded(data: bytes, mask: int, layout: Layout, chunking: Chunking) -> Array:
    import h5py

    found = np.empty(chunking.chunks, chunking.dtype)
    type_ = h5py.h5t.py_create(chunking.dtype, logical=True)
    if layout.few_bits is not None:
        type_ = h5py.h5t.decode(layout.few_bits)
    # HDF5 takes files of one name for one file, which cannot be made twice at a time.
    name = f"growcache chunk {next(_NAMES)}"
    with h5py.File(name, "w", driver="core", backing_store=False) as file:
        space = h5py.h5s.create_simple(chunking.chunks)
        plist = _filtered(mask, layout, chunking)
        dataset = h5py.h5d.create(file.id, b"x", type_, space, plist)
        dataset.write_direct_chunk((0,) * len(chunking.chunks), data)
        dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, found)
    return found


def _filtered(mask: int, layout: Layout, chunking: Chunking) -> Any:
    """Return how a chunk is stored: through those filters that made it smaller.

    The library takes a mask of the others, too, but forgets it until the file is opened again.
    """
    import h5py

    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk(chunking.chunks)
    plist.set_fill_value(layout.fill)
    for number, (code, flags, values) in enumerate(layout.filters):
        if not mask >> number & 1:
            plist.set_filter(code, flags, values)
    return plist
