"""The bytes of TFRecord files: the framing of records, and protobuf's of their features."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

import google_crc32c
import numpy as np
import numpy.typing as npt

HEAD_BYTES = 12  # u64 length, masked crc32c of it
TAIL_BYTES = 4  # masked crc32c of the payload
MAX_PAYLOAD_BYTES = 2**31 - 1  # protobuf parses no larger message

BYTES_LIST, INT64_LIST = 1, 3  # tags of Feature's alternatives


def varint(value: int) -> bytes:
    """Return protobuf's variable-length integer."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def head(tag: int, size: int) -> bytes:
    """Return the key of a length-delimited protobuf field, up to its content."""
    return bytes([tag << 3 | 2]) + varint(size)


@functools.lru_cache(maxsize=4096)
def entry_head(name: str, nbytes: int, kind: int = BYTES_LIST) -> bytes:
    """Return the bytes of a feature before its ``nbytes`` of content.

    Raises:
        UnicodeEncodeError: the name is no text.
    """
    inner = head(1, nbytes)  # BytesList.value, or Int64List.value, packed
    for tag in (kind, 2):  # Feature.bytes_list or .int64_list, FeatureEntry.value
        inner = head(tag, len(inner) + nbytes) + inner
    key = name.encode("utf-8")
    inner = head(1, len(key)) + key + inner  # FeatureEntry.key
    return head(1, len(inner) + nbytes) + inner  # Features.feature


def int64_entry(name: str, values: Sequence[int]) -> bytes:
    """Return a whole feature of integers that are not negative."""
    packed = b"".join(map(varint, values))
    return entry_head(name, len(packed), INT64_LIST) + packed


def frame(payload_bytes: int) -> bytes:
    """Return what stands before a payload."""
    length = struct.pack("<Q", payload_bytes)
    return length + crc_bytes(google_crc32c.value(length))


def crc_bytes(crc: int) -> bytes:
    """Return a CRC32C as TFRecord files have it."""
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def masked(crcs: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    """Return CRC32Cs as TFRecord files have them."""
    rotated = crcs >> np.uint64(15) | crcs << np.uint64(17)
    return ((rotated + np.uint64(0xA282EAD8)) & np.uint64(0xFFFFFFFF)).astype("<u4")
