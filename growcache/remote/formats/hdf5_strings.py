"""Strings of HDF5 datasets: of one length each, or in the file's heap."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from growcache.errors import FormatError
from growcache.remote.formats.chunks import fetch
from growcache.remote.formats.hdf5_layout import Layout
from growcache.remote.formats.objects import LARGEST_WHOLE, Reader
from growcache.schema import Array

HEAP_HEAD = 4096  # bytes; what a heap has at least
_HEAD = struct.Struct("<4sB3xQ")
_ITEM = struct.Struct("<HH4xQ")


async def read_strings(reader: Reader, layout: Layout, values: Array) -> list[str]:
    """Return the texts of a dataset's values.

    Raises:
        FormatError: one is not there, or no UTF-8.
    """
    flat = values.reshape(-1)
    if layout.strings == "heap":
        found = await _from_heaps(reader, layout, flat)
    else:
        blank = b" " if layout.strings == "spaces" else b"\0"
        found = [bytes(value).rstrip(blank) for value in flat]
        if layout.strings == "zeros":
            found = [value.partition(b"\0")[0] for value in found]
    try:
        return [value.decode() for value in found]
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{reader.entry.key}: dataset {layout.path} has a string that is no UTF-8: {error}"
        ) from None


async def _from_heaps(reader: Reader, layout: Layout, values: Array) -> list[bytes]:
    key = reader.entry.key
    wanted = values["length"] > 0
    addresses = np.unique(values["heap"][wanted])
    places = [layout.base + int(address) for address in addresses]
    heaps = dict(zip(addresses.tolist(), await _heaps(reader, places), strict=True))
    found = []
    for length, heap, index in values.tolist():
        text = heaps[heap].get(index) if length else b""
        if text is None or len(text) < length:
            raise FormatError(f"{key}: dataset {layout.path} has a string that is nowhere")
        found.append(bytes(text[:length]))
    return found


async def _heaps(reader: Reader, places: Sequence[int]) -> list[dict[int, memoryview]]:
    """Return the items of all heaps; most take one request together, larger ones two."""
    size, key = reader.entry.size, reader.entry.key
    if any(place + _HEAD.size > size for place in places):
        raise FormatError(f"{key}: a heap of strings lies beyond the end of the file")
    heads = await fetch(reader, [(at, min(size, at + HEAP_HEAD)) for at in places])
    sizes = [_heap_size(head, key) for head in heads]
    if any(at + n > size for at, n in zip(places, sizes, strict=True)) or (
        sum(sizes) > LARGEST_WHOLE
    ):
        raise FormatError(f"{key}: a heap of strings claims {max(sizes):,} bytes")
    large = [i for i, n in enumerate(sizes) if n > len(heads[i])]
    whole = await fetch(reader, [(places[i], places[i] + sizes[i]) for i in large])
    for i, data in zip(large, whole, strict=True):
        heads[i] = data
    return [_items(data[:n]) for data, n in zip(heads, sizes, strict=True)]


def _heap_size(head: memoryview, key: str) -> int:
    magic, version, size = _HEAD.unpack_from(head) if len(head) >= _HEAD.size else (b"", 0, 0)
    if magic != b"GCOL" or version != 1:
        raise FormatError(f"{key}: expected a heap of strings, found {bytes(head[:4])!r}")
    return int(size)


def _items(data: memoryview) -> dict[int, memoryview]:
    """Return what a heap holds, by index; what is broken in it ends it."""
    found: dict[int, memoryview] = {}
    at = _HEAD.size
    while at + _ITEM.size <= len(data):
        index, _, size = _ITEM.unpack_from(data, at)
        at += _ITEM.size
        if not index or at + size > len(data):
            break
        found[index] = data[at : at + size]
        at += -(-size // 8) * 8
    return found
