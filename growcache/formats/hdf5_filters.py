"""Undo compression by HDF5 plugins: lz4, bitshuffle and bzip2.

Chunks are read without the library, so no plugin is ever loaded. Sizes in a chunk are trusted
only up to the size that the chunk may have.
"""

from __future__ import annotations

import bz2
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from growcache.errors import FormatError
from growcache.formats.chunk_codecs import LZ4, MAX_VALUE_BYTES, MOST_GROWTH, ZSTD, Step
from growcache.schema import Array

_HEAD_BYTES = 12  # total size and block size, big-endian
_SIZE_BYTES = 4  # before each block
_SHUFFLED = 8  # elements; bits of fewer are not shuffled
# Default and smallest block; the file says 0 for the default.
_BLOCK_BYTES, _LEAST_BLOCK = 8192, 128
_TRANSPOSITIONS = [
    (np.uint64(shift), np.uint64(mask))
    for shift, mask in ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0xF0F0F0F0))
]

UndoBlock: TypeAlias = Callable[[memoryview, int], memoryview]


def _bzip2(data: memoryview, limit: int) -> memoryview:
    inflater = bz2.BZ2Decompressor()
    try:
        found = inflater.decompress(data, limit + 1)
    except (OSError, ValueError) as error:
        raise FormatError(f"a chunk cannot be decompressed: {error}", code="GC302") from None
    if not inflater.eof or len(found) > limit:
        raise FormatError(f"a chunk is cut off, or has more than {limit} bytes", code="GC302")
    return memoryview(found)


def _lz4_blocks(data: memoryview, limit: int) -> memoryview:
    total, block = _head(data, limit)
    found = bytearray()
    at = _HEAD_BYTES
    while len(found) < total:
        size = min(block, total - len(found))
        stored, at = _next_block(data, at)
        found += stored if len(stored) == size else _undo_lz4(stored, size)
    return memoryview(found)


def _head(data: memoryview, limit: int) -> tuple[int, int]:
    total = int.from_bytes(data[:8], "big")
    block = int.from_bytes(data[8:_HEAD_BYTES], "big")
    if data.nbytes < _HEAD_BYTES or total > limit or (total and not block):
        raise FormatError(
            f"a chunk claims {total:,} bytes in blocks of {block:,}, of at most {limit:,}",
            code="GC305",
        )
    return total, block


def _next_block(data: memoryview, at: int) -> tuple[memoryview, int]:
    start = at + _SIZE_BYTES
    stop = start + int.from_bytes(data[at:start], "big")
    if start > data.nbytes or stop > data.nbytes:
        raise FormatError("a block ends beyond its chunk", code="GC302")
    return data[start:stop], stop


def _undo_lz4(stored: memoryview, size: int) -> memoryview:
    """Decompress an lz4 block. numcodecs expects its size before it, little-endian."""
    return _sized(LZ4.undo(memoryview(size.to_bytes(4, "little") + stored), size), size)


def _undo_zstd(stored: memoryview, size: int) -> memoryview:
    return _sized(ZSTD.undo(stored, size), size)


def _sized(found: memoryview, size: int) -> memoryview:
    if found.nbytes != size:
        raise FormatError(f"a block has {found.nbytes} bytes, expected {size}", code="GC302")
    return found


# Compression of bitshuffle's blocks, by number.
_BY_NUMBER: dict[int, UndoBlock] = {0: lambda data, _: data, 2: _undo_lz4, 3: _undo_zstd}


def bitshuffle_step(values: Sequence[int]) -> Step:
    """Return the step for the filter's values: version, version, element, block, compression."""
    item, block, number = (*values[2:5], 0, 0, 0)[:3]
    if not 1 <= item <= MAX_VALUE_BYTES or number not in _BY_NUMBER:
        raise FormatError(f"a chunk was not bit-shuffled by {tuple(values)}", code="GC302")
    elements = block or max(_LEAST_BLOCK, _BLOCK_BYTES // item // _SHUFFLED * _SHUFFLED)

    def undo(data: memoryview, limit: int) -> memoryview:
        if not number:
            sizes = _block_sizes(data.nbytes, item, elements)
            return _unshuffled(data, sizes, item)
        total, nbytes = _head(data, limit)
        if total // max(1, nbytes) > data.nbytes:
            raise FormatError(
                f"a chunk claims more blocks of {nbytes} bytes than it can have", code="GC302"
            )
        sizes = _block_sizes(total, item, nbytes // item)
        return _unshuffled(_decompressed(data, total, sizes, _BY_NUMBER[number]), sizes, item)

    return Step(undo, MOST_GROWTH)


def _block_sizes(total: int, item: int, elements: int) -> list[int]:
    """Return the sizes of blocks in bytes.

    The last is shorter, and the rest is not shuffled.
    """
    if elements < _SHUFFLED or elements % _SHUFFLED:
        raise FormatError(f"a chunk has blocks of {elements} elements")
    whole, rest = divmod(total // item, elements)
    last = rest // _SHUFFLED * _SHUFFLED
    return [elements * item] * whole + ([last * item] if last else [])


def _decompressed(
    data: memoryview, total: int, sizes: Sequence[int], undo: UndoBlock
) -> memoryview:
    found = memoryview(bytearray(total))
    at, into = _HEAD_BYTES, 0
    for size in sizes:
        stored, at = _next_block(data, at)
        found[into : into + size] = undo(stored, size)
        into += size
    rest = data[at:]
    if rest.nbytes != total - into:
        raise FormatError(
            f"a chunk has {into + rest.nbytes} bytes, expected {total}", code="GC302"
        )
    found[into:] = rest
    return found


def _unshuffled(data: memoryview, sizes: Sequence[int], item: int) -> memoryview:
    """Unshuffle all whole blocks at once, and then the last one. The rest stays as it is."""
    found = np.array(np.frombuffer(data, np.uint8))
    whole = sum(size == sizes[0] for size in sizes)
    at = 0
    for blocks in (whole, len(sizes) - whole):
        if blocks:
            stop = at + blocks * sizes[-1 if at else 0]
            found[at:stop] = unshuffled_bits(found[at:stop].reshape(blocks, -1), item)
            at = stop
    return memoryview(found.data)


def unshuffled_bits(blocks: Array, item: int) -> Array:
    """Return the bytes of elements from blocks with all first bits, then all second bits, and so on.

    Eight bytes of eight rows are a matrix of bits, which is transposed as a whole word (Warren,
    Hacker's Delight, 7-3).
    """
    # By byte of an element, and bit of that byte.
    rows = blocks.reshape(len(blocks), item, 8, -1)
    words = np.ascontiguousarray(rows.swapaxes(2, 3)).view("<u8")
    for shift, mask in _TRANSPOSITIONS:
        moved = (words ^ (words >> shift)) & mask
        words ^= moved ^ (moved << shift)
    by_byte = words.view(np.uint8).reshape(len(blocks), item, -1)
    return by_byte.swapaxes(1, 2).reshape(-1)


HDF5_LZ4 = Step(_lz4_blocks, MOST_GROWTH)
BZIP2 = Step(_bzip2, MOST_GROWTH)
