"""Images, stacks and pyramids, as tifffile and Pillow write them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.matrix.case import Case, Place, Values


def numbers(dtype: str, shape: tuple[int, ...], first: int = 0) -> Any:
    return (np.arange(first, first + np.prod(shape)) % 250).reshape(shape).astype(dtype)


def write_image(folder: Path, shape: tuple[int, ...], dtype: str, **options: Any) -> None:
    import tifffile

    for i in range(2):
        tifffile.imwrite(folder / f"{i}.tif", numbers(dtype, shape, i), **options)


def write_pyramid(folder: Path, *, ome: bool) -> None:
    import tifffile

    for i in range(2):
        image = numbers("u1", (64, 96, 3), i)
        tiles: dict[str, Any] = {"tile": (16, 16), "compression": "zlib", "photometric": "rgb"}
        plain = {} if ome else {"metadata": None}
        with tifffile.TiffWriter(folder / f"{i}.tif", ome=ome) as writer:
            writer.write(image, **tiles, **({"subifds": 1} if ome else plain))
            writer.write(image[::2, ::2], subfiletype=1, **tiles, **plain)


def write_by_pillow(folder: Path, compression: str) -> None:
    from PIL import Image

    for i in range(2):
        image = Image.fromarray(numbers("u1", (30, 40, 3), i))
        image.save(folder / f"{i}.tif", "TIFF", compression=compression)


def read_tiff(
    place: Place, chosen: Mapping[str, Any], axis: int | None, window: tuple[int, ...] | None
) -> Values:
    import tifffile

    image = tifffile.imread(place.path, **chosen)
    if window is not None:
        first = np.unravel_index(place.start, image.shape)
        return {
            "x": image[tuple(slice(at, at + n) for at, n in zip(first, window, strict=True))]
        }
    return {"x": image if axis is None else image.take(place.start, axis=axis)}


def _tiff(
    holds: str, write: Any, samples: int, writer: str = "tifffile", **options: Any
) -> Case:
    called = {"series": "series", "level": "level", "page": "key"}
    chosen = {called[name]: value for name, value in options.items() if name in called}
    read = partial(
        read_tiff, chosen=chosen, axis=options.get("axis"), window=options.get("window")
    )
    options = {name: list(v) if isinstance(v, tuple) else v for name, v in options.items()}
    modules = {"Pillow": ("tifffile", "PIL"), "imagecodecs": ("tifffile", "imagecodecs")}
    needs = modules.get(writer, ("tifffile",))
    return Case(writer, holds, "tiff", write, read, samples, options, needs=needs)


def _image(shape: tuple[int, ...], dtype: str, **options: Any) -> Any:
    return partial(write_image, shape=shape, dtype=dtype, **options)


PLANES: dict[str, Any] = {"photometric": "rgb", "planarconfig": "separate"}
AXES = {"ome": True, "metadata": {"axes": "TCZYX"}}
CASES = [
    _tiff("an image in strips", _image((30, 40), "u2", rowsperstrip=8), 2),
    _tiff("an image in strips", _image((30, 40), "u2", rowsperstrip=8), 60, axis=0),
    _tiff("BigTIFF, big endian", _image((30, 40), "f4", bigtiff=True, byteorder=">"), 18,
          window=(10, 13)),
    _tiff("packed tiles with a predictor",
          _image((48, 64), "u2", tile=(16, 16), compression="zlib", predictor=True), 24,
          window=(16, 16)),
    _tiff("colours in planes", _image((3, 30, 40), "u1", compression="zlib", **PLANES), 6, axis=0),
    _tiff("OME, TCZYX", _image((3, 2, 4, 20, 30), "u2", compression="zlib", **AXES), 6, axis=0),
    _tiff("OME, TCZYX in one piece", _image((3, 2, 4, 20, 30), "u2", **AXES), 48,
          window=(1, 1, 1, 20, 30)),
    _tiff("ImageJ's TCYX", _image((3, 2, 20, 30), "u2", imagej=True, metadata={"axes": "TCYX"}), 4,
          axis=1),
    _tiff("OME with levels", partial(write_pyramid, ome=True), 2, level=1),
    _tiff("tiles with an overview, as a COG", partial(write_pyramid, ome=False), 2, series=0,
          level=1),
    _tiff("pages", _image((5, 20, 30), "u2", metadata=None), 2, page=3),
    _tiff("deflate of libtiff", partial(write_by_pillow, compression="tiff_adobe_deflate"), 60, "Pillow",
          axis=0),
    _tiff("tiles by LZW", _image((48, 64), "u2", tile=(16, 16), compression="lzw"), 24,
          "imagecodecs", window=(16, 16)),
    _tiff("tiles by JPEG",
          _image((48, 64, 3), "u1", tile=(16, 16), compression="jpeg", photometric="ycbcr"), 6,
          "imagecodecs", window=(16, 64, 3)),
    _tiff("PackBits of libtiff", partial(write_by_pillow, compression="packbits"), 2, "Pillow"),
]  # fmt: skip
