"""Images are decoded in the loader: as Pillow would, cropped and flipped by the seed."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL")

from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from growcache.errors import ConfigError, FormatError
from growcache.images import Decode, center_crop_box, random_crop_box
from growcache.numpy import EpochLoader
from growcache.schema import Origin, Sample, Schema
from tests.filled import Filled


def picture(width: int = 90, height: int = 60) -> Any:
    """Red grows to the right, green downwards; blue is even."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 255 // width, y * 255 // height, np.full_like(x, 40)], -1).astype("u1")


def encoded(pixels: Any, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def decode(data: bytes, decoder: Decode, seed: int = 0) -> Any:
    sample = {"image": data, "label": "cat"}
    found = decoder(sample, np.random.default_rng(seed), Origin("cat/1.jpg", None, 0, 1))
    assert found["label"] == "cat"
    return found["image"]


def test_as_stored_it_is_what_pillow_decodes() -> None:
    pixels = picture()
    np.testing.assert_array_equal(decode(encoded(pixels), Decode(None)), pixels)
    grey = decode(encoded(pixels), Decode(None, color=False))
    expected = np.asarray(Image.fromarray(pixels).convert("L"))
    np.testing.assert_array_equal(grey[..., 0], expected)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1", "CMYK"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    file = io.BytesIO()
    kind = "JPEG" if mode == "CMYK" else "PNG"
    Image.fromarray(picture()).convert(mode).save(file, kind)
    found = decode(file.getvalue(), Decode((20, 30)))
    assert (found.shape, found.dtype) == ((20, 30, 3), np.uint8)


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("JPEG", {"quality": 95})])
def test_the_middle_is_cut_out_and_resized(kind: str, options: Any) -> None:
    found = decode(encoded(picture(900, 600), kind, **options), Decode((64, 64))).astype(int)
    assert found.shape == (64, 64, 3)
    # The middle 600 columns of 900: red from a sixth to five sixths.
    np.testing.assert_allclose(found[:, 0, 0], 255 / 6, atol=6)
    np.testing.assert_allclose(found[:, -1, 0], 255 * 5 / 6, atol=6)
    np.testing.assert_allclose(found[-1, :, 1], 255, atol=6)
    stretched = decode(encoded(picture(900, 600), kind, **options), Decode((64, 64), crop=None))
    np.testing.assert_allclose(stretched[:, -1, 0].astype(int), 255, atol=6)


def test_random_crops_depend_on_the_generator_alone() -> None:
    data, decoder = encoded(picture(200, 150)), Decode((32, 32), crop="random", flip=True)
    first, again = decode(data, decoder, 1), decode(data, decoder, 1)
    np.testing.assert_array_equal(first, again)
    others = [decode(data, decoder, seed).astype(int) for seed in range(20)]
    assert all(
        np.abs(first - other).max() > 3 for seed, other in enumerate(others) if seed != 1
    )
    flipped = [other[16, 0, 0] > other[16, -1, 0] for other in others]
    assert 3 < sum(flipped) < 17


@given(
    st.integers(1, 3000),
    st.integers(1, 3000),
    st.floats(0.2, 5),
    st.floats(0.01, 1),
    st.integers(0, 2**32),
)
def test_boxes_lie_inside(
    width: int, height: int, aspect: float, least: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    for box in (
        center_crop_box((width, height), aspect),
        random_crop_box((width, height), aspect, (least, 1.0), rng),
    ):
        assert -1e-9 <= box.left < box.right <= width + 1e-9
        assert -1e-9 <= box.top < box.bottom <= height + 1e-9


@pytest.mark.parametrize("size", [(1, 1), (3, 700), (700, 3), (8, 8)])
def test_tiny_and_long_images(size: tuple[int, int]) -> None:
    for kind in ("PNG", "JPEG"):
        data = encoded(picture(*size), kind)
        for crop in ("center", "random", None):
            assert decode(data, Decode((16, 24), crop=crop)).shape == (16, 24, 3)


def test_what_is_no_image_is_named() -> None:
    data = encoded(picture(), "JPEG")
    with pytest.raises(FormatError, match=r"the image of cat/1\.jpg cannot be decoded"):
        decode(b"no image", Decode((8, 8)))
    with pytest.raises(FormatError, match=r"cat/1\.jpg cannot be decoded.*[Tt]runcated"):
        decode(data[: len(data) // 2], Decode((8, 8)))
    with pytest.raises(FormatError, match=r"bytes in field 'image', found \['data'\]"):
        Decode((8, 8))({"data": data}, np.random.default_rng(0))


def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    header = bytearray(encoded(picture()))
    header[16:24] = (60_000).to_bytes(4, "big") * 2  # the size in the IHDR chunk
    import zlib

    header[29:33] = zlib.crc32(bytes(header[12:29])).to_bytes(4, "big")
    with pytest.raises(FormatError, match=r"pixels|bomb"):
        decode(bytes(header), Decode((8, 8)))


@pytest.mark.parametrize(
    "arguments",
    [
        {"size": (0, 3)},
        {"size": (3, 3), "crop": "left"},
        {"size": (3, 3), "scale": (0.5, 0.1)},
        {"size": None, "crop": "random"},
    ],
)
def test_arguments_that_cannot_be_meant(arguments: Any) -> None:
    with pytest.raises(ConfigError):
        Decode(**arguments)


# In the loader


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Filled]:
    def sample(name: int) -> Sample:
        data = encoded(picture(60 + name % 7, 40), "JPEG")
        return {"id": np.array(name), "image": data, "label": f"class {name % 3}"}

    schema = Schema.declared({"id": ["int64"], "image": "bytes", "label": "str"})
    with Filled(tmp_path / "cache", sample, schema=schema) as filled:
        filled.add(0, 1)
        yield filled


def test_a_loader_delivers_decoded_batches_of_one_shape(cache: Filled) -> None:
    options: Any = {"batch_size": 5, "min_samples": 1}
    decoder = Decode((24, 32), crop="random", flip=True)
    with EpochLoader(cache.root, transform=decoder, seed=3, **options) as loader:
        first, second = (list(loader) for _ in range(2))
        with pickle.loads(pickle.dumps(loader)) as copy:
            again = list(copy)
    for batch, same in zip(first, again, strict=True):
        assert (batch["image"].shape, batch["image"].dtype) == ((5, 24, 32, 3), np.uint8)
        assert batch["label"] == [f"class {i % 3}" for i in batch["id"].tolist()]
        np.testing.assert_array_equal(batch["image"], same["image"])
    images = [
        {int(i): x for b in e for i, x in zip(b["id"], b["image"], strict=True)}
        for e in (first, second)
    ]
    assert all((images[0][i] != images[1][i]).any() for i in images[0])


def test_images_of_their_own_sizes_are_ragged(cache: Filled) -> None:
    options: Any = {"batch_size": 20, "min_samples": 1, "ragged": "list"}
    with EpochLoader(cache.root, transform=Decode(None), **options) as loader:
        (batch,) = loader
    for i, image in zip(batch["id"].tolist(), batch["image"], strict=True):
        assert image.shape == (40, 60 + i % 7, 3)
