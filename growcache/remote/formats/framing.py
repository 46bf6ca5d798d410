"""How TFRecord files frame their records, and where in any bytes the head of one could be."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import google_crc32c
import numpy as np
import numpy.typing as npt

from growcache.schema import Array

HEAD, TAIL = 12, 4  # u64 length, masked crc32c of it; masked crc32c of the content
_SCAN = 1 << 16  # bytes that are looked at together


def length_at(data: memoryview, at: int) -> int | None:
    """Return the length that the head of a record tells; None: it is no head."""
    head = data[at : at + HEAD]
    if head.nbytes < HEAD or masked(head[:8]) != struct.unpack_from("<I", head, 8)[0]:
        return None
    length: int = struct.unpack_from("<Q", head)[0]
    return length


def masked(data: memoryview) -> int:
    """Return the CRC32C of data as TFRecord files have it."""
    crc = google_crc32c.value(bytes(data))
    return int(((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def heads_in(data: memoryview, start: int, stop: int, most: int) -> Iterator[int]:
    """Yield where in [start, stop) of the data heads of records are, in order.

    Args:
        data: bytes.
        start: first position.
        stop: one past the last.
        most: bytes that a record can have.
    """
    stop = min(stop, data.nbytes - HEAD + 1)
    for at in range(start, stop, _SCAN):
        end = min(at + _SCAN, stop)
        part = np.frombuffer(data[at : end + HEAD - 1], np.uint8)
        # No record has 2^40 bytes, so three bytes of its length are zero.
        n = end - at
        places = np.flatnonzero((part[5 : n + 5] | part[6 : n + 6] | part[7 : n + 7]) == 0)
        if len(places):
            for place in _checked(part, places, most).tolist():
                yield at + place


def _checked(part: Array, places: Array, most: int) -> Array:
    """Return the places where the checksum of a length stands behind it."""
    words = part[places[:, None] + np.arange(HEAD)]
    lengths = words[:, :8].copy().view("<u8")[:, 0]
    crcs = np.full(len(places), 0xFFFFFFFF, np.uint32)
    for column in range(8):
        crcs = _TABLE[(crcs ^ words[:, column]) & 0xFF] ^ crcs >> np.uint32(8)
    crcs = ~crcs
    found = (crcs >> np.uint32(15) | crcs << np.uint32(17)) + np.uint32(0xA282EAD8)
    told = words[:, 8:].copy().view("<u4")[:, 0]
    fitting: Array = places[(found == told) & (lengths <= most)]
    return fitting


def _table() -> npt.NDArray[np.uint32]:
    """Return what CRC32C makes of each byte."""
    crcs = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        crcs = np.where(
            crcs & 1, crcs >> np.uint32(1) ^ np.uint32(0x82F63B78), crcs >> np.uint32(1)
        )
    return crcs


_TABLE = _table()
