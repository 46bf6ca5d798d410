"""Decode encoded images, as format ``image`` caches them, while they are loaded.

``transform=Decode(size=(224, 224), crop="random", flip=True)`` runs in the loader's threads,
because Pillow releases the GIL while it decodes and resizes. It needs
``pip install 'growcache[image]'``.
"""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from growcache.errors import ConfigError, FormatError
from growcache.schema import Array, Origin, Sample

if TYPE_CHECKING:
    from PIL import Image


__all__ = ["Decode"]

IMAGE_KINDS = ("JPEG", "PNG", "WEBP")
MAX_PIXELS = 89_478_485  # Pillow's own limit: 256 MB decoded. A few kB can claim far more.
CROPS = (None, "center", "random")
# A random crop is at most this much wider, or higher, than the wanted images.
MAX_ASPECT_CHANGE = 4 / 3
RANDOM_BOX_ATTEMPTS = 10  # to find a random crop inside the image


class CropBox(NamedTuple):
    """A part of an image, in pixels."""

    left: float
    top: float
    right: float
    bottom: float


class Decode:
    """A ``transform`` for loaders that decodes one field of every sample.

    The field becomes uint8 ``[height, width, 3]``, or ``[height, width, 1]`` if ``color`` is
    False. Other fields are unchanged. The orientation in EXIF is not applied. JPEGs are decoded
    at a half, a quarter or an eighth of their size if that is enough.

    Args:
        size: (height, width) of all images, in pixels. None keeps the size of each image, so
            the field is ragged.
        crop: How an image of other proportions is fitted. ``"center"`` cuts out the middle.
            ``"random"``, for training, cuts out a part at a random place: its share of the area
            is within ``scale``, and its proportions differ by up to 4/3. None stretches the
            image.
        scale: Least and largest share of the area that a random crop takes.
        flip: Mirror half of the images, at random.
        color: False makes grey images.
        field: Name of the field that holds the encoded images.

    Raises:
        ConfigError: An argument is not valid, or Pillow is not installed.

    Example::

        loader = EpochLoader("/data/cache", batch_size=64, transform=Decode(size=(224, 224)))
    """

    def __init__(
        self,
        size: tuple[int, int] | None,
        *,
        crop: Literal["center", "random"] | None = "center",
        scale: tuple[float, float] = (0.08, 1.0),
        flip: bool = False,
        color: bool = True,
        field: str = "image",
    ) -> None:
        if size is not None and (len(tuple(size)) != 2 or min(size) < 1):
            raise ConfigError(
                f"size must be (height, width) in pixels or None, found {size!r}", code="GC601"
            )
        if crop not in CROPS:
            raise ConfigError(
                f"crop must be 'center', 'random' or None, found {crop!r}", code="GC601"
            )
        if not 0 < scale[0] <= scale[1] <= 1:
            raise ConfigError(
                f"scale must be two shares of the area, found {scale!r}", code="GC601"
            )
        if size is None and crop == "random":
            raise ConfigError("a random crop needs a size", code="GC601")
        try:
            import PIL.Image  # noqa: F401
        except ImportError:
            raise ConfigError(
                "Decode needs Pillow; pip install 'growcache[image]'", code="GC801"
            ) from None
        self._size = size
        self._crop = crop
        self._scale = scale
        self._flip = flip
        self._mode = "RGB" if color else "L"
        self._field = field

    def __call__(
        self, sample: Sample, rng: np.random.Generator, origin: Origin | None = None
    ) -> Sample:
        """Return the sample with its image decoded.

        Raises:
            FormatError: The sample has no bytes in this field, or the image is not valid.
        """
        data = sample.get(self._field)
        if not isinstance(data, bytes):
            found = f"{type(data).__name__}" if self._field in sample else f"{list(sample)}"
            raise FormatError(
                f"Decode expected bytes in field {self._field!r}, found {found}; name the field "
                "with Decode(..., field=...)",
                code="GC601",
            )
        return {**sample, self._field: self._decoded(data, rng, origin)}

    def _decoded(self, data: bytes, rng: np.random.Generator, origin: Origin | None) -> Array:
        from PIL import Image

        where = f" of {origin.key}" if origin is not None else ""
        try:
            with Image.open(io.BytesIO(data), formats=IMAGE_KINDS) as image:
                _refuse_too_many_pixels(image.size)
                pixels = self._pixels(image, rng)
        except FormatError as error:
            raise FormatError(f"the image{where}: {error}", code=error.code) from None
        except Image.DecompressionBombWarning:
            raise FormatError(
                f"the image{where}: more than {MAX_PIXELS:,} pixels", code="GC305"
            ) from None
        except Exception as error:  # Pillow's plugins raise anything for broken images
            raise FormatError(
                f"the image{where} cannot be decoded: {type(error).__name__}: {error}; a "
                "sampling.transform that opens images keeps such ones out of the cache",
                code="GC601",
            ) from error
        array = np.array(pixels)  # copied, because Pillow's own memory is read-only
        return array.reshape(*array.shape[:2], -1)

    def _pixels(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        from PIL.Image import Resampling, Transpose

        if self._size is None:
            made = _convert_mode(image, self._mode)
        else:
            box = self._box(image.size, rng)
            box = _draft_jpeg(image, self._mode, box, self._size)
            made = _convert_mode(image, self._mode).resize(
                self._size[::-1], Resampling.BILINEAR, box=box, reducing_gap=2.0
            )
        if self._flip and rng.random() < 0.5:
            made = made.transpose(Transpose.FLIP_LEFT_RIGHT)
        return made

    def _box(self, found: tuple[int, int], rng: np.random.Generator) -> CropBox:
        assert self._size is not None
        if self._crop is None:
            return CropBox(0, 0, *found)
        aspect = self._size[1] / self._size[0]
        if self._crop == "random":
            return random_crop_box(found, aspect, self._scale, rng)
        return center_crop_box(found, aspect)


def center_crop_box(size: tuple[int, int], aspect: float) -> CropBox:
    """Return the largest central part that is ``aspect`` times as wide as high.

    >>> center_crop_box((500, 375), 1.0)
    CropBox(left=62.5, top=0.0, right=437.5, bottom=375.0)
    """
    width, height = size
    wide, high = min(width, height * aspect), min(height, width / aspect)
    left, top = (width - wide) / 2, (height - high) / 2
    return CropBox(left, top, left + wide, top + high)


def random_crop_box(
    size: tuple[int, int], aspect: float, scale: tuple[float, float], rng: np.random.Generator
) -> CropBox:
    """Return a random part of about this aspect.

    ``scale`` bounds its share of the area of ``size`` (width, height).
    """
    width, height = size
    for _ in range(RANDOM_BOX_ATTEMPTS):
        area = width * height * rng.uniform(*scale)
        ratio = aspect * MAX_ASPECT_CHANGE ** rng.uniform(-1, 1)
        wide, high = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if wide <= width and high <= height:
            left, top = rng.uniform(0, width - wide), rng.uniform(0, height - high)
            return CropBox(left, top, left + wide, top + high)
    return center_crop_box(size, aspect)


def _convert_mode(image: Image.Image, mode: str) -> Image.Image:
    image.load()  # decodes
    return image if image.mode == mode else image.convert(mode)


def _refuse_too_many_pixels(size: tuple[int, int]) -> None:
    width, height = size
    if width * height > MAX_PIXELS:
        raise FormatError(
            f"expected at most {MAX_PIXELS:,} pixels, found {width} by {height}", code="GC305"
        )


def _draft_jpeg(image: Image.Image, mode: str, box: CropBox, size: tuple[int, int]) -> CropBox:
    """Let a JPEG be decoded no larger than needed; return the box in the smaller image."""
    before = image.size
    height, width = size
    need_width = math.ceil(width * before[0] / (box.right - box.left))
    need_height = math.ceil(height * before[1] / (box.bottom - box.top))
    image.draft(mode, (need_width, need_height))  # other formats ignore it
    across, down = image.size[0] / before[0], image.size[1] / before[1]
    return CropBox(
        box.left * across,
        box.top * down,
        min(box.right * across, image.size[0]),
        min(box.bottom * down, image.size[1]),
    )
