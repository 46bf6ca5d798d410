"""Values of samples for a page: numbers, traces, pictures, text. Pure.

Content of remote objects is returned as numbers, as the pixels of a PNG that is made here, or
as text with escaped control characters. The page shows text as text, never as markup.
"""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from growcache.formats.image import MOST_PIXELS, image_kind
from growcache.images import IMAGE_KINDS
from growcache.schema import Array, Field, Value
from growcache.usercode import printable

Pixels = npt.NDArray[np.uint8]  # [height, width] or [height, width, 3]

SHOWN_CHARACTERS = 600
SHOWN_BYTES = 48
SHOWN_NUMBERS = 12
TRACE_BINS = 120  # of which the lowest and highest value is shown
TRACE_LEVELS = 1000
MOST_TRACES = 8
MOST_CHANNELS = 128  # of an array of two dimensions that counts as channels × time
ELONGATED = 4  # times as long as high
PICTURE_PIXELS = 192
DECODED_PIXELS = 25_000_000  # within a second; JPEG is decoded at a fraction of its size
COLOURS = (1, 3, 4)
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


def field_view(field: Field, value: Value) -> dict[str, Any]:
    """Return a value for the page: its ``kind``, and the data for that kind."""
    head = {"name": printable(field.name), "dtype": _dtype_text(field)}
    if isinstance(value, str):
        return head | text_view(value)
    if isinstance(value, bytes):
        return head | (_encoded_image_view(value) if image_kind(value) else bytes_view(value))
    return head | {"shape": list(value.shape)} | _array_view(value, field.classes)


def late_view(field: Field) -> dict[str, Any]:
    head = {"name": printable(field.name), "dtype": _dtype_text(field)}
    return head | text_view("not shown: the samples are too large, or take too long to decode")


def _dtype_text(field: Field) -> str:
    return field.dtype if field.is_blob else field.item_dtype.name


def text_view(text: str) -> dict[str, Any]:
    r"""Return the start of a text, with its lines.

    >>> text_view("<b>\u202e")["text"]
    '<b>\\u202e'
    """
    lines = text[:SHOWN_CHARACTERS].splitlines()
    shown = "\n".join(map(printable, lines))
    return {"kind": "text", "text": shown, "more": max(0, len(text) - SHOWN_CHARACTERS)}


def bytes_view(value: bytes) -> dict[str, Any]:
    shown = value[:SHOWN_BYTES].hex(" ")
    return {
        "kind": "bytes",
        "text": shown,
        "length": len(value),
        "more": len(value) > SHOWN_BYTES,
    }


def _array_view(value: Array, classes: tuple[str, ...]) -> dict[str, Any]:
    with np.errstate(all="ignore"):  # extreme values overflow, and are shown as missing
        array = np.abs(value) if value.dtype.kind == "c" else value
        if array.size <= SHOWN_NUMBERS:
            return numbers_view(array, classes)
        array = array.squeeze()
        shown = as_picture(array)
        if shown is not None:
            pixels = shown if _is_coloured(shown) else _grey_pixels(shown)
            return {"kind": "picture", **_picture_facts(pixels), **_extremes(shown)}
        return trace_view(as_traces(array))


def numbers_view(array: Array, classes: tuple[str, ...]) -> dict[str, Any]:
    """Return a few numbers as text, with the names of classes if they have any."""
    numbers = [_number_text(number) for number in array.ravel().tolist()]
    text = ", ".join(numbers)
    if classes and array.size == 1 and 0 <= int(array.item()) < len(classes):
        text = f"{text} ({printable(classes[int(array.item())])})"
    return {"kind": "numbers", "text": text}


def _number_text(number: bool | int | float) -> str:
    return f"{number:.5g}" if isinstance(number, float) else str(number)


def _extremes(array: Array) -> dict[str, float | None]:
    finite = array[np.isfinite(array)] if array.dtype.kind == "f" else array
    if not finite.size:
        return {"low": None, "high": None}
    return {"low": float(finite.min()), "high": float(finite.max())}


# --- traces ---


def as_traces(array: Array) -> Array:
    """Return an array of any dimensions as channels × time. Time is the longest axis."""
    longest = int(np.argmax(array.shape))
    return np.moveaxis(array, longest, -1).reshape(-1, array.shape[longest])


def trace_view(traces: Array) -> dict[str, Any]:
    shown = np.array([_envelope(trace) for trace in traces[:MOST_TRACES]], np.float64)
    low, high = _extremes(shown).values()
    span = 0.0 if low is None or high is None else high - low
    scale = TRACE_LEVELS / span if span else 0.0
    points = [_levels(trace, low or 0.0, scale) for trace in shown]
    return {
        "kind": "trace",
        "low": low,
        "high": high,
        "points": points,
        "channels": len(traces),
        "length": traces.shape[1],
    }


def _envelope(trace: Array) -> Array:
    """Return a long trace as the lowest and highest values of its bins, so that no peak is lost."""
    if len(trace) <= 2 * TRACE_BINS:
        return trace
    edges = np.linspace(0, len(trace), TRACE_BINS + 1).astype(np.int64)[:-1]
    lows, highs = np.fmin.reduceat(trace, edges), np.fmax.reduceat(trace, edges)
    return np.column_stack((lows, highs)).ravel()


def _levels(trace: npt.NDArray[np.float64], low: float, scale: float) -> list[int | None]:
    levels = (trace - low) * scale
    return [round(level) if np.isfinite(level) else None for level in levels.tolist()]


# --- pictures ---


def as_picture(array: Array) -> Array | None:
    """Return a picture of an array that looks like an image, or None.

    Such an array has two or more long axes, or colours.
    """
    if array.ndim == 3:
        if array.shape[-1] in COLOURS and min(array.shape[:2]) > max(COLOURS):
            return _three_colours(_thinned(array))
        if array.shape[0] in COLOURS and min(array.shape[1:]) > max(COLOURS):
            return _three_colours(_thinned(np.moveaxis(array, 0, -1)))
        return as_picture(array[array.shape[0] // 2])  # middle slice of a volume
    if array.ndim != 2 or _is_channels(array.shape):
        return None
    return _thinned(array)


def _is_channels(shape: tuple[int, ...]) -> bool:
    short, long = sorted(shape)
    return short <= MOST_CHANNELS and long >= ELONGATED * short


def _three_colours(array: Array) -> Array:
    return array[:, :, 0] if array.shape[2] == 1 else array[:, :, :3]


def _thinned(array: Array) -> Array:
    down, across = (max(1, -(-size // PICTURE_PIXELS)) for size in array.shape[:2])
    return array[::down, ::across]


def _is_coloured(array: Array) -> bool:
    return array.ndim == 3 and array.dtype == np.uint8


def _grey_pixels(array: Array) -> Pixels:
    """Return values as shades, from the lowest to the highest."""
    values = np.asarray(array, np.float64)
    low, high = _extremes(values).values()
    if low is None or high is None or not 0 < high - low < np.inf:
        return np.zeros(values.shape, np.uint8)
    shades = np.nan_to_num((values - low) * (255 / (high - low)))
    return np.clip(shades, 0, 255).astype(np.uint8)


def _picture_facts(pixels: Pixels) -> dict[str, Any]:
    height, width = pixels.shape[:2]
    return {"source": data_uri(encode_png(pixels)), "width": width, "height": height}


def data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def encode_png(pixels: Pixels) -> bytes:
    """Return a PNG file of grey or red-green-blue pixels."""
    height, width = pixels.shape[:2]
    colour_type = 2 if pixels.ndim == 3 else 0
    rows = np.ascontiguousarray(pixels).reshape(height, -1)
    filtered = np.hstack((np.zeros((height, 1), np.uint8), rows)).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, colour_type, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(filtered, 4)), (b"IEND", b""))
    return PNG_MAGIC + b"".join(_png_chunk(name, data) for name, data in chunks)


def _png_chunk(name: bytes, data: bytes) -> bytes:
    return (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    )


class TooManyPixelsError(ValueError):
    """Decoding an image would take long, however short its file is."""


def _encoded_image_view(value: bytes) -> dict[str, Any]:
    """Return an encoded image decoded here, so that the browser decodes no foreign bytes."""
    kind = image_kind(value)
    facts = {"length": len(value), "format": kind}
    try:
        size, pixels = _decode_image(value)
    except ImportError:
        note = f"{kind}: install growcache[image] to see it"
        return bytes_view(value) | {"note": note}
    except TooManyPixelsError as error:
        return bytes_view(value) | {"note": f"{kind}, not shown: {error}"}
    except Exception as error:  # noqa: BLE001 - Pillow's plugins may raise anything
        return bytes_view(value) | {
            "note": f"{kind}, cannot be decoded: {type(error).__name__}"
        }
    return {"kind": "picture", "shape": list(size[::-1]), **facts, **_picture_facts(pixels)}


def _decode_image(value: bytes) -> tuple[tuple[int, int], Pixels]:
    from PIL import Image

    with Image.open(io.BytesIO(value), formats=IMAGE_KINDS) as image:
        size = image.size
        most = MOST_PIXELS if image.format == "JPEG" else DECODED_PIXELS
        if size[0] * size[1] > most:
            raise TooManyPixelsError(f"{size[0]} by {size[1]} pixels are too many")
        image.draft("RGB", (PICTURE_PIXELS, PICTURE_PIXELS))  # other formats ignore it
        image.thumbnail((PICTURE_PIXELS, PICTURE_PIXELS))
        return size, np.asarray(image.convert("RGB"))
