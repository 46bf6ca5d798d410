"""Decompress strips and tiles of TIFF files, each into as many bytes as it may have."""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeAlias

from growcache.errors import FormatError

Decompress: TypeAlias = Callable[[memoryview, int], bytes]
_LARGEST_DICTIONARY = 1 << 27  # that lzma may take


def decompressor(code: int, key: str) -> Decompress | None:
    """Return the function for a compression, None for none."""
    if code == 1:
        return None
    if code in _DECOMPRESSORS:
        return _DECOMPRESSORS[code]
    name = _BY_IMAGECODECS.get(code)
    if name is None:
        raise FormatError(
            f"{key}: its pixels have compression {code} ({_OTHERS.get(code, 'unknown')}), which is "
            "not read; deflate, LZMA and PackBits are, with imagecodecs also LZW and zstd"
        )
    if find_spec("imagecodecs") is None:
        raise FormatError(
            f"{key}: its pixels have compression {code} ({name}), which needs imagecodecs; "
            "pip install imagecodecs"
        )
    return _library_decompressor(name)


def _inflate(data: memoryview, most: int) -> bytes:
    return zlib.decompressobj().decompress(data, most)


def _lzma(data: memoryview, most: int) -> bytes:
    return lzma.LZMADecompressor(memlimit=_LARGEST_DICTIONARY).decompress(bytes(data), most)


def _packbits(data: memoryview, most: int) -> bytes:
    found, at = bytearray(), 0
    while at < len(data) and len(found) < most:
        count = data[at]
        if count < 128:
            found += data[at + 1 : at + 2 + count]
            at += 2 + count
        else:
            found += bytes(data[at + 1 : at + 2]) * (257 - count if count > 128 else 0)
            at += 2 if count > 128 else 1
    return bytes(found[:most])


def _library_decompressor(name: str) -> Decompress:
    def decompress(data: memoryview, most: int) -> bytes:
        import imagecodecs

        found = getattr(imagecodecs, f"{name.lower()}_decode")(bytes(data), out=bytearray(most))
        return bytes(found)

    return decompress


_DECOMPRESSORS: dict[int, Decompress] = {
    8: _inflate,
    32946: _inflate,
    50013: _inflate,
    32773: _packbits,
    34925: _lzma,
}
_BY_IMAGECODECS = {5: "LZW", 34926: "zstd", 50000: "zstd"}
_OTHERS = {
    2: "CCITT", 3: "CCITT", 4: "CCITT", 6: "JPEG of old", 7: "JPEG", 33003: "JPEG 2000",
    33005: "JPEG 2000", 34712: "JPEG 2000", 34887: "LERC", 34892: "JPEG", 50001: "WebP",
    50002: "JPEG XL",
}  # fmt: skip
