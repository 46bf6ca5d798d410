"""Decompress strips and tiles of TIFF files, each up to its largest possible size."""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeAlias

from growcache.errors import FormatError

Decompress: TypeAlias = Callable[[memoryview, int], bytes]
JPEG = (7,)  # tifffile also decodes these pixels
_JPEG_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_LARGEST_DICTIONARY = 1 << 27  # of lzma


def refuse_large_jpeg(data: memoryview, most: int) -> None:
    """Refuse an image with more pixels before they are decoded."""
    at = 2
    while at + 9 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker in _JPEG_FRAMES:
            height = int.from_bytes(data[at + 5 : at + 7], "big")
            width = int.from_bytes(data[at + 7 : at + 9], "big")
            if 0 < height * width <= most:
                return
            raise FormatError(
                f"a JPEG of {height} by {width} pixels, expected {most:,}", code="GC302"
            )
        at += 1 if marker == 0xFF else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    raise FormatError("a JPEG without a size", code="GC302")


def decompressor(code: int, key: str) -> Decompress | None:
    """Return the function for a compression, or None if tifffile needs none."""
    if code == 1:
        return None
    if code in _DECOMPRESSORS:
        return _DECOMPRESSORS[code]
    name = _BY_IMAGECODECS.get(code)
    if name is None:
        raise FormatError(
            f"{key}: its pixels have compression {code} ({_OTHERS.get(code, 'unknown')}), which is "
            "not read; deflate, LZMA and PackBits are, with imagecodecs also LZW, zstd and JPEG",
            code="GC304",
        )
    if find_spec("imagecodecs") is None:
        raise FormatError(
            f"{key}: its pixels have compression {code} ({name}), which needs imagecodecs; "
            "pip install imagecodecs",
            code="GC304",
        )
    return None if code in JPEG else _library_decompressor(name)


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
_BY_IMAGECODECS = {5: "LZW", 7: "JPEG", 34926: "zstd", 50000: "zstd"}
_OTHERS = {
    2: "CCITT", 3: "CCITT", 4: "CCITT", 6: "JPEG of old", 33003: "JPEG 2000", 33005: "JPEG 2000",
    34712: "JPEG 2000", 34887: "LERC", 34892: "lossy DNG", 50001: "WebP", 50002: "JPEG XL",
}  # fmt: skip
