"""Decode chunks of Zarr and HDF5 arrays.

Only the codecs that are named here are used, because some codecs of `numcodecs` unpickle.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import google_crc32c
import numpy as np

from growcache.errors import FormatError
from growcache.schema import Array

ChunkDecoder: TypeAlias = Callable[[memoryview], Array]
_NEVER_WRITTEN = (1 << 64) - 1  # size of a chunk that was never written
MOST_GROWTH = 4096  # bytes by which compression may enlarge a chunk
_KNOWN_CODECS = "blosc, gzip, lz4, zlib, zstd, shuffle and no compression are read"


class Step(NamedTuple):
    # Takes the bytes, and the most bytes to yield.
    undo: Callable[[memoryview, int], memoryview]
    adds: int = 0  # bytes, at most


def zarr2_decoder(
    compressor: Any, filters: Any, order: Any, dtype: np.dtype[Any], chunks: Sequence[int]
) -> ChunkDecoder:
    if order not in ("C", "F"):
        raise FormatError(f"expected order C or F, found {order!r:.20}", code="GC304")
    steps = [_step(str(config["id"]), config) for config in filters or []]
    steps += [_step(str(compressor["id"]), compressor)] if compressor is not None else []
    axes = list(range(len(chunks)))
    return _array_decoder(steps, dtype, chunks, axes if order == "C" else axes[::-1])


def _array_decoder(
    steps: Sequence[Step], dtype: np.dtype[Any], chunks: Sequence[int], axes: Sequence[int]
) -> ChunkDecoder:
    stored = [chunks[at] for at in axes]
    back = np.argsort(axes)

    def decode(data: memoryview) -> Array:
        values = decode_steps(data, steps, math.prod(stored) * dtype.itemsize)
        return np.frombuffer(values, dtype).reshape(stored).transpose(back)

    return decode


def zarr3_decoder(
    codecs: Any, dtype: np.dtype[Any], chunks: Sequence[int], fill: Array
) -> tuple[ChunkDecoder, np.dtype[Any]]:
    """Return the decoder, and the dtype with its byte order."""
    axes: list[int] = list(range(len(chunks)))
    steps: list[Step] = []
    is_bytes = False
    if isinstance(codecs, list) and codecs and codecs[0]["name"] == "sharding_indexed":
        if len(codecs) > 1:
            raise FormatError("no other codec can be combined with sharding", code="GC304")
        return _shard_decoder(codecs[0]["configuration"], dtype, tuple(chunks), fill)
    for codec in codecs:
        name, settings = str(codec["name"]), codec.get("configuration") or {}
        if name == "transpose" and not is_bytes:
            axes = [axes[at] for at in _axes(settings["order"], len(axes))]
        elif name == "bytes" and not is_bytes:
            is_bytes = True
            big = settings.get("endian", "little") == "big"
            dtype = dtype.newbyteorder(">" if big else "<")
        elif is_bytes:
            steps.append(_step(name, settings))
        else:
            raise FormatError(f"codec {name[:40]!r} is not read; {_KNOWN_CODECS}", code="GC304")
    if not is_bytes:
        raise FormatError("expected the codec bytes, found none", code="GC304")
    return _array_decoder(steps, dtype, chunks, axes), dtype


def _axes(order: Any, count: int) -> list[int]:
    if not isinstance(order, list) or sorted(order) != list(range(count)):
        raise FormatError(
            f"expected an order of {count} axes, found {order!r:.40}", code="GC303"
        )
    return order


def decode_steps(data: memoryview, steps: Sequence[Step], nbytes: int) -> memoryview:
    """Undo the steps.

    None may yield more bytes than the earlier steps can have made of the chunk.
    """
    limits = [nbytes + sum(step.adds for step in steps[:n]) for n in range(len(steps))]
    for step, limit in zip(reversed(steps), reversed(limits), strict=True):
        data = step.undo(data, limit)
    if data.nbytes != nbytes:
        raise FormatError(f"a chunk has {data.nbytes} bytes, expected {nbytes}", code="GC302")
    return data


def _step(name: str, settings: Mapping[str, Any]) -> Step:
    if name == "shuffle":
        return shuffle_step(int(settings.get("elementsize", 4)))
    found = _STEPS.get(name)
    if found is None:
        why = " (it unpickles)" if "pickle" in name else ""
        raise FormatError(
            f"codec {name[:40]!r} is not read{why}; {_KNOWN_CODECS}", code="GC304"
        )
    return found


def _inflate(data: memoryview, limit: int) -> memoryview:
    inflater = zlib.decompressobj(47)  # of gzip and zlib
    try:
        found = inflater.decompress(data, limit + 1)
    except zlib.error as error:
        raise FormatError(f"a chunk cannot be decompressed: {error}", code="GC302") from None
    if not inflater.eof or len(found) > limit:
        raise FormatError(f"a chunk is cut off, or has more than {limit} bytes", code="GC302")
    return memoryview(found)


def _blosc(data: memoryview, limit: int) -> memoryview:
    from numcodecs import blosc

    # c-blosc trusts its header. It allocates as much memory as the header claims, and reads as
    # many bytes, even beyond the end of a truncated chunk.
    if (
        data.nbytes < 16
        or int.from_bytes(data[4:8], "little") > limit
        or int.from_bytes(data[12:16], "little") != data.nbytes
    ):
        raise FormatError("a chunk is not a blosc block of its size", code="GC302")
    return _decompressed_by(blosc.decompress, data)


def _zstd(data: memoryview, limit: int) -> memoryview:
    from numcodecs import zstd

    size = _zstd_content_size(data)
    if size is not None and size > limit:
        raise FormatError(f"a chunk claims {size:,} bytes, expected {limit:,}", code="GC302")
    # The memory has the length of the frame, because numcodecs leaves the end of longer memory
    # as it was. A frame without its size must fill the memory.
    found = np.empty(limit if size is None else size, np.uint8)
    _decompressed_by(lambda stored: zstd.decompress(stored, found), data)
    return memoryview(found.data)


def _zstd_content_size(data: memoryview) -> int | None:
    """Return the size that the header of a zstd frame claims, or None without such a claim.

    >>> _zstd_content_size(memoryview(bytes.fromhex("28b52ffd 20 05 290000 68656c6c6f")))
    5
    """
    head = bytes(data[:18])
    if len(head) < 6 or head[:4] != b"\x28\xb5\x2f\xfd":
        raise FormatError("a chunk is not a zstd frame", code="GC302")
    flag, single_segment = head[4] >> 6, head[4] >> 5 & 1
    length = (single_segment, 2, 4, 8)[flag]
    start = 6 - single_segment + (0, 1, 2, 4)[head[4] & 3]
    if not length:
        return None
    return int.from_bytes(head[start : start + length], "little") + (256 if flag == 1 else 0)


def _lz4(data: memoryview, limit: int) -> memoryview:
    from numcodecs import lz4

    if data.nbytes < 4 or int.from_bytes(data[:4], "little") > limit:
        raise FormatError("a chunk is not an lz4 block of its size", code="GC302")
    return _decompressed_by(lz4.decompress, data)


def _decompressed_by(decompress: Callable[[bytes], Any], data: memoryview) -> memoryview:
    try:
        return memoryview(decompress(bytes(data)))
    except (RuntimeError, ValueError, TypeError) as error:
        raise FormatError(f"a chunk cannot be decompressed: {error}", code="GC302") from None


def _check_crc32c(data: memoryview, _: int) -> memoryview:
    if data.nbytes < 4 or int.from_bytes(data[-4:], "little") != google_crc32c.value(
        bytes(data[:-4])
    ):
        raise FormatError("a chunk does not match its checksum", code="GC302")
    return data[:-4]


def _check_fletcher32(data: memoryview, _: int) -> memoryview:
    from numcodecs import Fletcher32

    if data.nbytes <= 4:  # numcodecs needs a value before the checksum
        raise FormatError("a chunk is too short for its checksum", code="GC302")
    try:
        Fletcher32().decode(data)
    except RuntimeError:
        raise FormatError("a chunk does not match its checksum", code="GC302") from None
    return data[:-4]


MAX_VALUE_BYTES = 1 << 20


def shuffle_step(size: int) -> Step:
    """Return the step of a shuffle that keeps bytes at the end in place if they fill no value."""
    if not 1 <= size <= MAX_VALUE_BYTES:
        raise FormatError(f"a chunk was not shuffled by {size}", code="GC302")

    def undo(data: memoryview, _: int) -> memoryview:
        from numcodecs import Shuffle

        whole = data.nbytes - data.nbytes % size
        found = np.frombuffer(bytearray(data), np.uint8)
        Shuffle(size).decode(data[:whole], found[:whole])
        return memoryview(found.data)

    return Step(undo)


ZLIB = Step(_inflate, MOST_GROWTH)
BLOSC = Step(_blosc, MOST_GROWTH)
ZSTD = Step(_zstd, MOST_GROWTH)
LZ4 = Step(_lz4, MOST_GROWTH)
FLETCHER32 = Step(_check_fletcher32, 4)
_STEPS = {
    "blosc": BLOSC,
    "crc32c": Step(_check_crc32c, 4),
    "gzip": ZLIB,
    "lz4": LZ4,
    "zlib": ZLIB,
    "zstd": ZSTD,
}


def _shard_decoder(
    settings: Mapping[str, Any], dtype: np.dtype[Any], shape: tuple[int, ...], fill: Array
) -> tuple[ChunkDecoder, np.dtype[Any]]:
    inner = settings["chunk_shape"]
    fits = isinstance(inner, list) and len(inner) == len(shape)
    if not fits or any(
        type(n) is not int or n < 1 or s % n for n, s in zip(inner, shape, strict=True)
    ):
        raise FormatError(
            f"a shard of {list(shape)} has no chunks of {str(inner)[:60]}", code="GC304"
        )
    decode, dtype = zarr3_decoder(settings["codecs"], dtype, inner, fill)
    names = [codec["name"] for codec in settings["index_codecs"]]
    if names not in (["bytes"], ["bytes", "crc32c"]):
        raise FormatError(f"an index of shards by {str(names)[:60]} is not read", code="GC304")
    counts = [size // n for size, n in zip(shape, inner, strict=True)]
    length = 16 * math.prod(counts)
    at_end = settings.get("index_location", "end") == "end"

    def index_of(data: memoryview) -> Array:
        stored = length + (4 if len(names) > 1 else 0)
        if data.nbytes < stored:
            raise FormatError(
                f"a shard of {data.nbytes} bytes has no room for its index", code="GC302"
            )
        index = data[-stored:] if at_end else data[:stored]
        index = _check_crc32c(index, length) if len(names) > 1 else index
        return np.frombuffer(index, "<u8").reshape(-1, 2)

    def decode_all(data: memoryview) -> Array:
        found = np.empty(shape, dtype.newbyteorder("<"))
        index = index_of(data).tolist()
        for place, (offset, size) in zip(np.ndindex(*counts), index, strict=True):
            where = tuple(slice(i * n, (i + 1) * n) for i, n in zip(place, inner, strict=True))
            if offset == size == _NEVER_WRITTEN:
                found[where] = fill
            elif offset + size > data.nbytes:
                raise FormatError("a chunk ends beyond its shard", code="GC302")
            else:
                found[where] = decode(data[offset : offset + size])
        return found

    return decode_all, dtype
