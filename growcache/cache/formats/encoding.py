"""Bytes of shard files: values, TFRecord frames and protobuf features, and `.npy` headers.

Checksums and copies read every byte on its way to the disk. If each processed a whole shard,
each would fetch it from memory again. So files consist of pieces that are made one after
another, and all steps handle a piece while it is in the core's cache.

NumPy's own header differs between versions of NumPy, and reading one requires trusting it.
growcache's header depends only on dtype and shape, so a file is valid if it starts with the
expected bytes.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from growcache.cache.formats.mapped import Buffer, Bytes, Integers, map_file
from growcache.errors import CorruptShardError, FormatError
from growcache.schema import BYTES, STR, Field

# Larger values are written from their own memory. For smaller ones, a copy into a common block
# costs less than the Python operations per value.
DIRECT_BYTES = 64 * 1024
# At most, of a core's second cache, which is often no larger than twice that.
PIECE_BYTES = 256 * 1024


class EncodedFile(NamedTuple):
    suffix: str  # suffix after the shard's number
    nbytes: int
    pieces: Iterable[Buffer]  # its bytes in order; may be iterated again
    guarded: bool = False  # whether its records have their own checksums


def file_of_buffers(suffix: str, buffers: list[Buffer]) -> EncodedFile:
    return EncodedFile(suffix, sum(map(len, buffers)), buffers)


def split_buffer(buffer: Buffer) -> Iterator[Buffer]:
    if len(buffer) <= PIECE_BYTES:
        yield buffer
        return
    for start in range(0, len(buffer), PIECE_BYTES):
        yield buffer[start : start + PIECE_BYTES]


def value_bytes(
    field: Field, ragged_dims: tuple[int, ...], value: object
) -> tuple[Buffer, list[int]]:
    """Return a value's bytes and the sizes of its ragged dimensions. May raise FormatError.

    Large arrays are not copied. The caller passes the positions of those dimensions, because
    computing them costs as much as everything else.
    """
    if not isinstance(value, np.ndarray):
        return _blob_bytes(field, value)
    shape = value.shape
    if value.dtype.str != field.dtype or not (shape == field.shape or field.allows(shape)):
        raise FormatError(f"expected {field}, found {value.dtype}{list(shape)}", code="GC307")
    dims = [shape[i] for i in ragged_dims]
    if value.nbytes < DIRECT_BYTES:
        return value.tobytes(), dims
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8), dims


def _blob_bytes(field: Field, value: object) -> tuple[bytes, list[int]]:
    if type(value) is bytes and field.dtype == BYTES:
        return value, [len(value)]
    if type(value) is str and field.dtype == STR:
        data = value.encode()
        return data, [len(data)]
    found = "nothing" if value is None else type(value).__name__
    raise FormatError(f"expected {field}, found {found}", code="GC307")


def coalesce(buffers: Iterable[Buffer]) -> Iterator[Buffer]:
    """Yield the same bytes in fewer buffers, with small neighbours joined."""
    small: list[Buffer] = []
    held = 0
    for buffer in buffers:
        is_large = len(buffer) >= DIRECT_BYTES
        if held and (is_large or held + len(buffer) > PIECE_BYTES):
            yield _joined_pieces(small)
            small, held = [], 0
        if is_large:
            yield buffer
        elif len(buffer):
            small.append(buffer)
            held += len(buffer)
    if held:
        yield _joined_pieces(small)


def _joined_pieces(pieces: list[Buffer]) -> bytes:
    return b"".join(piece if isinstance(piece, bytes) else piece.data for piece in pieces)


RECORD_HEAD_BYTES = 12  # length as u64, and its masked crc32c
RECORD_TAIL_BYTES = 4  # masked crc32c of the payload
MAX_PAYLOAD_BYTES = 2**31 - 1  # protobuf parses no larger messages

BYTES_LIST, INT64_LIST = 1, 3  # tags of Feature's alternatives


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def length_delimited_head(tag: int, size: int) -> bytes:
    return bytes([tag << 3 | 2]) + varint(size)


@functools.lru_cache(maxsize=4096)
def feature_head(name: str, nbytes: int, kind: int = BYTES_LIST) -> bytes:
    """Return the bytes before ``nbytes`` of content.

    UnicodeEncodeError for a name that is not text.
    """
    inner = length_delimited_head(1, nbytes)  # BytesList.value, or Int64List.value, packed
    for tag in (kind, 2):  # Feature.bytes_list or .int64_list, FeatureEntry.value
        inner = length_delimited_head(tag, len(inner) + nbytes) + inner
    key = name.encode("utf-8")
    inner = length_delimited_head(1, len(key)) + key + inner  # FeatureEntry.key
    return length_delimited_head(1, len(inner) + nbytes) + inner  # Features.feature


def int64_feature(name: str, values: Sequence[int]) -> bytes:
    packed = b"".join(map(varint, values))
    return feature_head(name, len(packed), INT64_LIST) + packed


def record_head(payload_bytes: int) -> bytes:
    length = struct.pack("<Q", payload_bytes)
    return length + masked_crc_bytes(google_crc32c.value(length))


def masked_crc_bytes(crc: int) -> bytes:
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def masked_crcs(crcs: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    rotated = crcs >> np.uint64(15) | crcs << np.uint64(17)
    return ((rotated + np.uint64(0xA282EAD8)) & np.uint64(0xFFFFFFFF)).astype("<u4")


_NPY_MAGIC = b"\x93NUMPY\x01\x00"
_NPY_ALIGNMENT = 64  # bytes, so that values are aligned for vector units
INTEGER_DTYPE = "<i8"


def npy_header(dtype: str, shape: Sequence[int]) -> bytes:
    """Return the start of an ``.npy`` file.

    >>> npy_header("<i8", (3,)).index(b"(3,)"), len(npy_header("<i8", (3, 2))) % 64
    (60, 0)
    """
    sizes = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({sizes}), }}".encode()
    padding = -(len(_NPY_MAGIC) + 2 + len(text) + 1) % _NPY_ALIGNMENT
    length = len(text) + padding + 1
    return _NPY_MAGIC + length.to_bytes(2, "little") + text + b" " * padding + b"\n"


def integer_table(values: Integers) -> list[bytes]:
    return [npy_header(INTEGER_DTYPE, values.shape), values.astype(INTEGER_DTYPE).tobytes()]


def open_npy_array(path: Path, dtype: str, shape: Sequence[int]) -> tuple[Bytes, Bytes]:
    memory, expected = map_file(path), npy_header(dtype, shape)
    count = 1
    for size in shape:  # as Python integers, because a damaged file may have any sizes
        count *= size
    nbytes = len(expected) + count * np.dtype(dtype).itemsize
    if memory[: len(expected)].tobytes() != expected or len(memory) != nbytes:
        raise CorruptShardError(
            f"{path}: expected {nbytes} bytes with an array {dtype}{list(shape)}, found "
            f"{len(memory)} bytes that do not match; run growcache check"
        )
    return memory, memory[len(expected) :]


def open_integer_table(path: Path, shape: Sequence[int]) -> tuple[Bytes, Integers]:
    memory, data = open_npy_array(path, INTEGER_DTYPE, shape)
    return memory, data.view(INTEGER_DTYPE).reshape(shape)


def checked_lengths(dims: Integers, unit_bytes: int, most: int) -> Integers | None:
    """Return the bytes of values (int64 [n]), or None if the sizes are impossible.

    ``dims`` (int64 [n, k]) are untrusted. ``unit_bytes`` is the size of a value whose
    dimensions are all 1. ``most`` is the size of the file.
    """
    if (dims < 0).any():
        return None
    # An empty array may be huge along its other dimensions, and could not be indexed.
    nominal = np.maximum(dims, 1).astype(np.float64).prod(axis=1) * max(unit_bytes, 1)
    if (nominal >= 2.0**62).any():
        return None
    lengths = _products(dims, unit_bytes)
    return None if (lengths > most).any() else lengths


def _products(dims: Integers, unit_bytes: int) -> Integers:
    """Return the lengths, as a view if possible, because a reader keeps all shards open."""
    if not dims.shape[1]:
        return np.broadcast_to(np.int64(unit_bytes), (len(dims),))
    lengths: Integers
    if dims.shape[1] == 1 and unit_bytes == 1:
        lengths = dims[:, 0]
    else:
        lengths = dims.prod(axis=1) * unit_bytes
    return lengths
