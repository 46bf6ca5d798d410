"""TIFF images, stacks and levels hold what tifffile reads."""

from __future__ import annotations

import asyncio
import io
import re
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from growcache.errors import FormatError, TransientStoreError
from growcache.formats import open_format
from growcache.formats.base import Visit
from growcache.formats.items import UserCall
from growcache.formats.tiff_pages import TiffDirectories
from tests.formats.held import Held, visited


def written(values: Any, **options: Any) -> bytes:
    tifffile = pytest.importorskip("tifffile")
    file = io.BytesIO()
    tifffile.imwrite(file, values, **options)
    return file.getvalue()


def several(pages: Any, **options: Any) -> bytes:
    """A file of pages that are written one by one; options may differ by page."""
    tifffile = pytest.importorskip("tifffile")
    file = io.BytesIO()
    with tifffile.TiffWriter(file, ome=options.pop("ome", False)) as writer:
        for page, more in pages:
            writer.write(page, **options, **more)
    return file.getvalue()


def numbers(*shape: int, dtype: str = "u2") -> Any:
    values = np.arange(np.prod(shape)).reshape(shape)
    return (values * 7 % (251 if dtype == "u1" else 5003)).astype(dtype)


def by_pillow(values: Any, compression: str) -> bytes:
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.fromarray(values).save(file, "TIFF", compression=compression)
    return file.getvalue()


def small() -> bytes:
    return written(numbers(12, 5, dtype="i2"))


def tiled() -> bytes:
    return written(numbers(40, 50), tile=(16, 16), compression="zlib", predictor=True)


def ome() -> bytes:
    stack = numbers(3, 2, 4, 20, 30)
    return written(
        stack, ome=True, metadata={"axes": "TCZYX"}, compression="zlib", rowsperstrip=7
    )


def apart(compression: str | None = None) -> bytes:
    """A stack whose pages are apart from each other."""
    pages: list[Any] = [(page, {}) for page in numbers(5, 20, 30)]
    return several(pages, contiguous=False, metadata=None, compression=compression)


def pyramid(*, as_ome: bool = True) -> bytes:
    image = numbers(70, 90, 3, dtype="u1")
    more: dict[str, Any] = {"subifds": 2} if as_ome else {"metadata": None}
    rest: dict[str, Any] = {"subfiletype": 1} | ({} if as_ome else {"metadata": None})
    levels = [(image, more), (image[::2, ::2], rest), (image[::4, ::4], rest)]
    return several(levels, ome=as_ome, tile=(32, 32), compression="zlib", photometric="rgb")


RGB = numbers(40, 50, 3, dtype="u1")
PLANES = np.moveaxis(RGB, -1, 0)
STACK = numbers(5, 20, 30)
PACKED: dict[str, Any] = {"compression": "zlib"}
SEPARATE: dict[str, Any] = {"planarconfig": "separate", "photometric": "rgb"}
CASES: dict[str, Callable[[], bytes]] = {
    "rows": small,
    "strips, big endian": lambda: written(numbers(40, 50), byteorder=">", rowsperstrip=16),
    "BigTIFF, big endian": lambda: written(STACK, bigtiff=True, byteorder=">"),
    "tiles": lambda: written(numbers(40, 50), tile=(32, 16)),
    "packed tiles with a predictor": tiled,
    "packed, big endian": lambda: written(
        numbers(40, 50, dtype="f4"), byteorder=">", tile=(16, 16), **PACKED
    ),
    "samples together": lambda: written(
        RGB, photometric="rgb", tile=(16, 32), predictor=True, **PACKED
    ),
    "samples apart": lambda: written(PLANES, rowsperstrip=16, **SEPARATE, **PACKED),
    "samples apart, tiles": lambda: written(PLANES, tile=(16, 16), **SEPARATE),
    "stack": lambda: written(STACK),
    "stack, packed": lambda: written(STACK, photometric="minisblack", compression="lzma"),
    "stack, apart": apart,
    "stack, apart and packed": lambda: apart("zlib"),
    "OME": ome,
    "OME, in one piece": lambda: written(
        numbers(3, 2, 4, 20, 30), ome=True, metadata={"axes": "TCZYX"}
    ),
    "OME of colours": lambda: written(
        numbers(3, 20, 30, 3, dtype="u1"),
        ome=True,
        metadata={"axes": "TYXS"},
        photometric="rgb",
        **PACKED,
    ),
    "ImageJ": lambda: written(numbers(3, 2, 20, 30), imagej=True, metadata={"axes": "TCYX"}),
    "bilevel": lambda: written(numbers(40, 50) > 2000),
    "axes of one": lambda: written(np.ones((1, 1, 30, 1), "u1")),
    "volume": lambda: written(numbers(16, 20, 33), volumetric=True, tile=(8, 16, 16), **PACKED),
    "complex": lambda: written(numbers(20, 30) + 1j, **PACKED),
    "PackBits": lambda: by_pillow(RGB // 200, "packbits"),
    "deflate of libtiff": lambda: by_pillow(RGB, "tiff_adobe_deflate"),
}
LEVELS: dict[str, tuple[Callable[[], bytes], dict[str, Any]]] = {
    "OME, level 1": (pyramid, {"level": 1}),
    "OME, level 2": (pyramid, {"series": 0, "level": 2}),
    "COG, level 1": (lambda: pyramid(as_ome=False), {"level": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_arrays_are_what_tifffile_reads(name: str) -> None:
    data = CASES[name]()
    compare(data, {}, {"series": 0})
    compare(data, {"page": 0}, {"key": 0})


PIXELS = np.repeat(np.repeat(RGB[:10, :13], 4, axis=0), 4, axis=1)[:40, :50]
WITH_IMAGECODECS: dict[str, Callable[[], bytes]] = {
    "LZW": lambda: written(numbers(40, 50), compression="lzw", predictor=True, tile=(16, 16)),
    "LZW of libtiff": lambda: by_pillow(RGB, "tiff_lzw"),
    "zstd": lambda: written(numbers(40, 50), compression="zstd", rowsperstrip=16),
    "floating-point predictor": lambda: written(
        numbers(40, 50, dtype="f4"), predictor=3, **PACKED
    ),
    "12 bits": lambda: written(
        numbers(40, 50) % 4096, bitspersample=12, photometric="minisblack"
    ),
    "JPEG": lambda: written(PIXELS, compression="jpeg", tile=(32, 32), photometric="ycbcr"),
    "JPEG of a stack": lambda: written(
        np.stack([PIXELS] * 3), compression="jpeg", rowsperstrip=16, photometric="rgb"
    ),
    "JPEG of libtiff": lambda: by_pillow(PIXELS, "jpeg"),
}


@pytest.mark.slow  # imagecodecs is installed for slow tests only
@pytest.mark.parametrize("name", WITH_IMAGECODECS)
def test_compressions_of_imagecodecs(name: str) -> None:
    pytest.importorskip("imagecodecs")
    compare(WITH_IMAGECODECS[name](), {}, {"series": 0})


@pytest.mark.slow
def test_a_jpeg_that_is_larger_than_its_tile() -> None:
    pytest.importorskip("imagecodecs")
    data = bytearray(WITH_IMAGECODECS["JPEG"]())
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = b"\xff\xff\xff\xff"
    with pytest.raises(FormatError, match="a JPEG of 65535 by 65535 pixels, expected 1,024"):
        visited(open_format("tiff", {}), Held(bytes(data)))


def test_what_imagecodecs_is_needed_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("growcache.formats.tiff_codecs.find_spec", lambda name: None)
    with pytest.raises(FormatError, match=r"compression 5 \(LZW\), which needs imagecodecs"):
        visited(open_format("tiff", {}), Held(by_pillow(RGB, "tiff_lzw")))


@pytest.mark.parametrize("name", LEVELS)
def test_levels_are_what_tifffile_reads(name: str) -> None:
    made, options = LEVELS[name]
    compare(made(), options, {"series": 0, **options})


def compare(data: bytes, options: dict[str, Any], chosen: dict[str, Any]) -> None:
    tifffile = pytest.importorskip("tifffile")
    expected = tifffile.imread(io.BytesIO(data), **chosen)
    ((sample, *_),) = visited(open_format("tiff", options), Held(data))
    assert sample["x"].dtype == expected.dtype.newbyteorder("<")
    np.testing.assert_array_equal(sample["x"], expected)
    for axis, size in enumerate(expected.shape):
        rows = visited(open_format("tiff", {**options, "axis": axis}), Held(data))
        assert len(rows) == size
        for sample, start, _ in rows:
            np.testing.assert_array_equal(sample["x"], expected.take(start, axis=axis))
    window = [min(7, size) for size in expected.shape]
    rows = visited(open_format("tiff", {**options, "window": window}), Held(data))
    assert len(rows) == np.prod([size // min(7, size) for size in expected.shape])
    for sample, start, _ in rows:
        first = np.unravel_index(start, expected.shape)
        box = tuple(slice(at, at + n) for at, n in zip(first, window, strict=True))
        np.testing.assert_array_equal(sample["x"], expected[box])


def test_a_sample_of_tiles_fetches_its_tiles() -> None:
    values = np.random.default_rng(0).integers(0, 1 << 16, (640, 640)).astype("u2")
    held = Held(written(values, tile=(64, 64), compression="zlib"))
    form = open_format("tiff", {"window": [64, 64]})
    measure = asyncio.run(form.measure(held))
    assert (measure.samples, measure.together) == (100, 1)
    held.asked.clear()
    ((sample, start, _),) = visited(form, held, 7, 100)
    row, column = np.unravel_index(start, values.shape)
    np.testing.assert_array_equal(sample["x"], values[row : row + 64, column : column + 64])
    assert fetched(held) < 1.1 * 64 * 64 * 2


def test_a_window_of_pages_that_are_apart_fetches_it() -> None:
    stack = numbers(4, 300, 400)
    held = Held(several([(page, {}) for page in stack], contiguous=False, metadata=None))
    form = open_format("tiff", {"window": [2, 100, None]})
    asyncio.run(form.measure(held))
    held.asked.clear()
    ((sample, start, _),) = visited(form, held, 1, 6)
    at = np.unravel_index(start, stack.shape)
    np.testing.assert_array_equal(sample["x"], stack[at[0] : at[0] + 2, at[1] : at[1] + 100])
    assert fetched(held) == 2 * 100 * 400 * 2


def fetched(held: Held) -> int:
    return sum((len(held.data) if stop is None else stop) - at for at, stop in held.asked)


def test_a_file_in_many_directories_takes_few_requests() -> None:
    held = Held(
        several([(page, {}) for page in numbers(300, 8, 8)], contiguous=False, metadata=None)
    )
    rows = visited(open_format("tiff", {"axis": 0}), held, 0, 100)
    assert len(rows) == 3
    assert len(held.asked) < 12


def test_what_is_fetched_behind_directories_is_not_kept() -> None:
    held = Held(bytes(1 << 26))
    file = TiffDirectories(cast(UserCall, SimpleNamespace(wait=asyncio.run)), held)
    tracemalloc.start()
    for at in range(0, 1 << 26, 1 << 14):
        file.seek(at)
        assert file.read(1) == b"\0"
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(held.asked) < 80
    assert peak < 30_000_000  # of 67


def test_the_error_of_a_read_is_raised() -> None:
    held = Held(ome() + bytes(1 << 16), failures=[TransientStoreError("no answer")])
    with pytest.raises(TransientStoreError, match="no answer"):
        visited(open_format("tiff", {"axis": 0}), held)


CLAIMS = [
    (b'SizeT="3"', b'SizeT="%d"' % 10**10, r"claims .* planes"),
    (b'PlaneCount="24"', b'PlaneCount="1%s"' % (b"0" * 12), r"claims .* planes"),
    (
        b'DimensionOrder="XYZCT"',
        b'DimensionOrder="TZCYX"',
        r"expected OME-XML with the order XY",
    ),
]


@pytest.mark.parametrize(("stood", "says", "error"), CLAIMS)
def test_claims_of_ome_xml(stood: bytes, says: bytes, error: str) -> None:
    data = ome()
    (xml,) = re.findall(rb"<\?xml.*</OME>", data, re.DOTALL)
    assert stood in xml
    shorter = re.sub(rb' xsi:schemaLocation=".*?"', b"", xml).replace(stood, says)
    room = b" " * (len(xml) - len(shorter))
    with pytest.raises(FormatError, match=error):
        visited(
            open_format("tiff", {}), Held(data.replace(xml, shorter[:-6] + room + shorter[-6:]))
        )


def test_an_ome_file_of_several_is_read_alone() -> None:
    """Names of other files in it are never opened."""
    data = ome().replace(b'UUID="urn', b'UUID="arn', 1)
    ((sample, *_),) = visited(open_format("tiff", {}), Held(data))
    assert sample["x"].shape[-2:] == (20, 30)


def test_what_is_not_there() -> None:
    with pytest.raises(FormatError, match="expected level 3, found 3 of them, from 0 on"):
        visited(open_format("tiff", {"level": 3}), Held(pyramid()))
    with pytest.raises(FormatError, match="expected page 24, found 24 of them"):
        visited(open_format("tiff", {"page": 24}), Held(ome()))
    with pytest.raises(FormatError, match=r"directories promise .* bytes"):
        visited(open_format("tiff", {}), Held(tiled()[:-100]))
    with pytest.raises(FormatError, match="not a TIFF file"):
        visited(open_format("tiff", {}), Held(b"%PDF-1.7" + bytes(99)))


def test_an_unknown_compression() -> None:
    data = bytearray(tiled())
    at = data.index((259).to_bytes(2, "little") + b"\3\0\1\0\0\0")
    data[at + 8 : at + 10] = (33003).to_bytes(2, "little")
    with pytest.raises(FormatError, match=r"compression 33003 \(JPEG 2000\).*imagecodecs"):
        visited(open_format("tiff", {}), Held(bytes(data)))


def test_a_strip_that_unpacks_to_more_than_it_may() -> None:
    import zlib

    bomb = zlib.compress(bytes(1 << 25), 1)
    data = bytearray(written(numbers(8, 8), compression="zlib"))
    for tag, value in ((273, len(data)), (279, len(bomb))):
        at = data.index(tag.to_bytes(2, "little"))
        data[at + 2 : at + 4] = (4).to_bytes(2, "little")
        data[at + 8 : at + 12] = value.to_bytes(4, "little")
    visit = Visit(0, 1, 0, 0)
    form = open_format("tiff", {"axis": 0})
    rows = asyncio.run(form.read(Held(bytes(data) + bomb), visit))
    assert not any(sample["x"].any() for sample, *_ in rows)


@pytest.mark.parametrize("tile", [16, 1 << 12])
def test_an_array_that_is_mostly_claimed(tile: int) -> None:
    """It is refused before each of its samples is looked at."""
    data = bytearray(written(numbers(16, 16), tile=(16, 16), compression="zlib"))
    for tag, value in ((257, 1 << 23), (322, tile), (323, tile)):
        at = data.index(tag.to_bytes(2, "little"), 8)
        data[at + 2 : at + 4] = (4).to_bytes(2, "little")
        data[at + 8 : at + 12] = value.to_bytes(4, "little")
    tracemalloc.start()
    with pytest.raises(FormatError, match=r"one visit may (read|yield)"):
        visited(open_format("tiff", {"window": 3}), Held(bytes(data)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20_000_000
