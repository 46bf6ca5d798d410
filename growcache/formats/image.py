"""JPEG, PNG and WebP images, kept encoded or decoded by Pillow, and labelled by their folder."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from growcache.config_source import AUTO
from growcache.errors import ConfigError, FormatError
from growcache.formats.base import (
    ObjectFormat,
    ObjectReader,
    Visit,
    bool_option,
    choice_option,
    read_whole,
    refuse_unknown_options,
    require_library,
)
from growcache.formats.memory import (
    ByteSemaphore,
    correct_decoded,
    refuse_large_sample,
    reserve_decoded,
)
from growcache.schema import Array, Sample

if TYPE_CHECKING:
    from typing_extensions import Buffer


_OPTIONS = ("decode", "label", "classes")
_KINDS = ("JPEG", "PNG", "WEBP")
_MAGIC_BYTES = 12
MOST_PIXELS = 89_478_485  # Pillow's own limit: 256 MB decoded. A few kB can claim far more.
PIXEL_BYTES, DECODING_BYTES = 3, 7  # per pixel: when decoded, and at most while Pillow decodes
SMALL_PIXELS = 1 << 20  # of an image that is decoded without waiting
_STRIP = 1 << 22  # pixels that are converted together

# Pixels that all threads of a process decode together.
_DECODE_SEMAPHORE = ByteSemaphore(MOST_PIXELS)


class ImageFormat(ObjectFormat):
    def __init__(self, *, label: bool, classes: tuple[str, ...] | None, decode: bool) -> None:
        self._label = label
        self._numbers = {name: number for number, name in enumerate(classes or ())}
        self._decode = decode

    async def read(self, reader: ObjectReader, visit: Visit) -> list[tuple[Sample, int, int]]:
        key = reader.entry.key
        label = self._labelled(key)  # before fetching, which may be in vain
        data = await read_whole(reader)
        if image_kind(data) is None:
            raise FormatError(
                f"{key}: expected a JPEG, PNG or WebP image, found "
                f"{bytes(memoryview(data)[:8])!r}"
            )
        image: bytes | Array = bytes(memoryview(data))
        if self._decode:
            image = await _decode_in_turn(data, key)
        return [({"image": image, **label}, 0, reader.entry.size)]

    def _labelled(self, key: str) -> Sample:
        if not self._label:
            return {}
        folder = key.rpartition("/")[0].rpartition("/")[2]
        if not self._numbers:
            if not folder:
                raise FormatError(
                    f"{key}: expected a folder that names its label; set label: none in "
                    "source.options where there is none",
                    code="GC303",
                )
            return {"label": folder}
        if folder not in self._numbers:
            known = ", ".join(list(self._numbers)[:10])
            raise FormatError(
                f"{key}: folder {folder!r} is not one of source.options.classes ({known})",
                code="GC303",
            )
        return {"label": np.asarray(self._numbers[folder], np.int64)}


async def _decode_in_turn(data: Buffer, key: str) -> Array:
    found = await asyncio.to_thread(_decode_or_count_pixels, data, key)
    if not isinstance(found, int):
        return found
    refuse_large_sample(PIXEL_BYTES * found, key)
    await reserve_decoded(DECODING_BYTES * found)
    image = await asyncio.to_thread(decode_image, data, key)
    correct_decoded(image.nbytes, DECODING_BYTES * found)
    return image


def _decode_or_count_pixels(data: Buffer, key: str) -> Array | int:
    with _opened(data, key) as image:
        pixels: int = image.size[0] * image.size[1]
        return pixels if pixels > SMALL_PIXELS else _rgb(image)


def image_kind(data: Buffer) -> str | None:
    """Return ``"JPEG"``, ``"PNG"`` or ``"WEBP"`` from the first bytes, or None for other data.

    >>> image_kind(bytes.fromhex("ffd8ffe0"))
    'JPEG'
    """
    head = bytes(memoryview(data)[:_MAGIC_BYTES])
    if head.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    return "WEBP" if head[:4] == b"RIFF" and head[8:12] == b"WEBP" else None


def decode_image(data: Buffer, key: str) -> Array:
    """Return the first frame as uint8 [height, width, 3].

    The orientation in EXIF is not applied.
    """
    with _opened(data, key) as image, _DECODE_SEMAPHORE.hold(image.size[0] * image.size[1]):
        return _rgb(image)


@contextmanager
def _opened(data: Buffer, key: str) -> Iterator[Any]:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(memoryview(data)), formats=_KINDS) as image:
            _check_header(image.size, image.mode, key)
            yield image
    except FormatError:
        raise
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise FormatError(
            f"{key}: expected at most {MOST_PIXELS:,} pixels, found more", code="GC305"
        ) from None
    except Exception as error:  # a broken image can make Pillow's plugins raise anything
        raise FormatError(
            f"{key}: cannot be decoded: {type(error).__name__}: {error}", code="GC302"
        ) from error


def _rgb(image: Any) -> Array:
    """Convert a large image in strips, which avoids three copies."""
    width, height = image.size
    rows = max(1, _STRIP // max(1, width))
    if height <= rows:
        return np.array(image.convert("RGB"))
    image.load()
    found = np.empty((height, width, PIXEL_BYTES), np.uint8)
    for top in range(0, height, rows):
        strip = image.crop((0, top, width, min(height, top + rows)))
        found[top : top + rows] = np.asarray(strip.convert("RGB"))
    return found


def _check_header(size: tuple[int, int], mode: str, key: str) -> None:
    width, height = size
    if width * height > MOST_PIXELS:
        raise FormatError(
            f"{key}: expected at most {MOST_PIXELS:,} pixels, found {width} by {height}",
            code="GC305",
        )
    if mode.startswith(("I", "F")):
        raise FormatError(
            f"{key}: expected 8 bits per value, found mode {mode}; use format bytes with a "
            "decode function of your own",
            code="GC306",
        )


def open_image(options: Mapping[str, Any]) -> ImageFormat:
    refuse_unknown_options("image", options, _OPTIONS)
    decode = bool_option(options, "decode")
    if decode:
        require_pillow()
    label = options.get("label", "folder") or "none"  # also for YAML's null
    named = choice_option({"label": label}, "label", ("folder", "none"), "folder") == "folder"
    found = options.get("classes") == AUTO
    classes = None if found else _classes_option(options.get("classes"))
    if (classes or found) and not named:
        raise ConfigError("source.options.classes: needs label: folder", code="GC112")
    # The supervisor adds the labels of classes that it finds in the listing.
    return ImageFormat(label=named and not found, classes=classes, decode=decode)


def _classes_option(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, list | tuple) and value:
        names = tuple(map(str, value))
        plain = all(type(name) in (str, int) for name in value)  # YAML's yes and no are bools
        if plain and len(set(names)) == len(names):
            return names
    raise ConfigError(
        "source.options.classes: expected auto, or a list of different folder names, found "
        f"{value!r}",
        code="GC112",
    )


def require_pillow() -> None:
    require_library("source.options.decode:", "PIL", "image", "Pillow")
