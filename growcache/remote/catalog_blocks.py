"""A block of a catalog: up to 64 entries, and how they lie in its file.

Keys, ETags, times and stores are zlib-packed JSON, by column. MD5 sums, as which most ETags
come, stand before that as bytes, and sizes apart, for many are wanted at once.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from growcache.remote.store import Entry

BLOCK = 64  # entries
DIGEST_BYTES = 16
MD5_BYTES = 16
WIDTHS = (1, 2, 4, 8)  # bytes of a size
_MOST_UNPACKED = 1 << 24  # bytes of a block: 64 keys of the longest
_MD5_ETAG = re.compile(r'"[0-9a-f]{32}"')
# Of the values of each column.
_KINDS: tuple[frozenset[type], ...] = (
    frozenset({str}),
    frozenset({str, type(None)}),
    frozenset({float, int, type(None)}),
    frozenset({int}),
)

Columns = list[Any]  # keys, ETags, times, stores; each by the place in the block


class Packed(NamedTuple):
    """A block as it is written.

    Attributes:
        width: bytes per size.
        sizes: of the objects, little-endian.
        sums: the ETags, where all of them are MD5 sums; else nothing.
        columns: the rest.
    """

    width: int
    sizes: bytes
    sums: bytes
    columns: bytes


def pack(entries: Sequence[Entry]) -> Packed:
    """Return the entries of a block, of which there is at least one."""
    sizes = np.array([entry.size for entry in entries], np.uint64)
    largest = int(sizes.max())
    width = next(width for width in WIDTHS if largest < 1 << (8 * width))
    sums = _md5_sums(entries)
    columns = [
        [entry.key for entry in entries],
        [] if sums else [entry.etag for entry in entries],
        [entry.mtime for entry in entries],
        [entry.store for entry in entries],
    ]
    narrow = sizes.astype(f"<u{width}").tobytes()
    return Packed(width, narrow, sums, zlib.compress(orjson.dumps(columns), 6))


def unpack_sizes(data: memoryview, width: int) -> npt.NDArray[np.int64]:
    """Return the sizes of a block: int64 [entries]."""
    return np.frombuffer(data, f"<u{width}").astype(np.int64)


def unpack(sums: bytes, packed: bytes, count: int) -> Columns | None:
    """Return the columns of so many entries; None where that is not what it holds."""
    columns = _unpacked(packed)
    lengths = [count, 0 if sums else count, count, count]
    if columns is None or [len(column) for column in columns] != lengths:
        return None
    if sums:
        columns[1] = _Quoted(sums)
    return columns


def _unpacked(data: bytes) -> Columns | None:
    unpacker = zlib.decompressobj()
    try:
        packed = unpacker.decompress(data, _MOST_UNPACKED)
        columns = orjson.loads(packed) if unpacker.eof else None
    except (zlib.error, orjson.JSONDecodeError):
        return None
    if type(columns) is not list or len(columns) != len(_KINDS):
        return None
    for column, kinds in zip(columns, _KINDS, strict=True):
        if type(column) is not list or not kinds.issuperset(map(type, column)):
            return None
    return columns


def _md5_sums(entries: Sequence[Entry]) -> bytes:
    """Return the ETags as bytes where all are quoted MD5 sums, as S3's mostly are; else none.

    Their hexadecimal digits are what packs worst of all.
    """
    etags = [entry.etag or "" for entry in entries]
    if not all(map(_MD5_ETAG.fullmatch, etags)):
        return b""
    return bytes.fromhex("".join(etag[1:-1] for etag in etags))


class _Quoted:
    """MD5 sums as ETags; a block holds many of which mostly one is wanted."""

    def __init__(self, sums: bytes) -> None:
        self._sums = sums

    def __getitem__(self, i: int) -> str:
        return f'"{self._sums[i * MD5_BYTES : (i + 1) * MD5_BYTES].hex()}"'


def advance(digest: bytes, entry: Entry) -> bytes:
    """Return the running digest of a listing behind one more entry."""
    # The time counts only where it is all there is: copies of a bucket have other times.
    version = entry.etag if entry.etag is not None else entry.mtime
    line = orjson.dumps([entry.store, entry.key, entry.size, version])
    return blake2b(digest + line, digest_size=DIGEST_BYTES).digest()
