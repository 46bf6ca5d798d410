"""Formats bytes and image: what is kept, what is decoded, and what is refused."""

from __future__ import annotations

import asyncio
import io
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from growcache.errors import ConfigError, FormatError
from growcache.formats import open_format
from growcache.formats.image import image_kind
from tests.formats.held import Held, visited

KINDS = ("JPEG", "PNG", "WEBP")


def encoded(kind: str, size: tuple[int, int] = (7, 5), mode: str = "RGB") -> bytes:
    values = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), np.uint8)
    file = io.BytesIO()
    settings = {"lossless": True} if kind == "WEBP" else {}
    Image.fromarray(values).convert(mode).save(file, kind, **settings)
    return file.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A small PNG that claims to be large."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(1000))
    chunks = [(b"IHDR", head), (b"IDAT", body), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


def only(options: dict[str, Any], data: bytes, key: str = "train/cat/1.jpg") -> dict[str, Any]:
    ((sample, start, stop),) = visited(open_format("image", options), Held(data, key))
    assert (start, stop) == (0, len(data))
    return sample


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_is_kept_encoded_with_its_folder_as_label(kind: str) -> None:
    data = encoded(kind)
    assert image_kind(data) == kind
    assert only({}, data) == {"image": data, "label": "cat"}
    assert only({"label": "none"}, data) == {"image": data}
    assert only({"label": None}, data) == {"image": data}


def test_classes_number_the_folders() -> None:
    sample = only({"classes": ["dog", "cat"]}, encoded("PNG"))
    assert (sample["label"].dtype, sample["label"].shape) == (np.dtype("<i8"), ())
    assert int(sample["label"]) == 1
    numbers = only({"classes": [0, 7]}, encoded("PNG"), "7/x.png")
    assert int(numbers["label"]) == 1


def test_a_folder_that_is_no_class_is_refused_before_anything_is_read() -> None:
    held = Held(encoded("PNG"), "train/cow/1.png")
    with pytest.raises(
        FormatError, match=r"^train/cow/1.png: folder 'cow' is not one of .*dog"
    ):
        visited(open_format("image", {"classes": ["dog", "cat"]}), held)
    with pytest.raises(FormatError, match=r"^1.png: expected a folder .* label: none"):
        visited(open_format("image", {}), Held(encoded("PNG"), "1.png"))
    assert held.asked == []


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *[(kind, "RGB") for kind in KINDS],
        ("JPEG", "L"),
        ("JPEG", "CMYK"),
        ("PNG", "L"),
        ("PNG", "P"),
        ("PNG", "1"),
        ("PNG", "RGBA"),
        ("WEBP", "RGBA"),
    ],
)
def test_decoded_as_pillow_decodes(kind: str, mode: str) -> None:
    data = encoded(kind, mode=mode)
    sample = only({"decode": True}, data)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    np.testing.assert_array_equal(sample["image"], expected)
    assert (sample["image"].dtype, sample["image"].shape) == (np.uint8, (5, 7, 3))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "expected a JPEG, PNG or WebP image"),
        (b"GIF89a and more of it", "expected a JPEG, PNG or WebP image, found b'GIF89a a'"),
        (b"<html>404</html>", "expected a JPEG"),
        (b"RIFF\0\0\0\0WAVEfmt ", "expected a JPEG"),
    ],
)
@pytest.mark.parametrize("decode", [False, True])
def test_what_is_no_image(data: bytes, words: str, decode: bool) -> None:
    with pytest.raises(FormatError, match=rf"^a/b.jpg: {words}"):
        visited(open_format("image", {"decode": decode}), Held(data, "a/b.jpg"))


def _grey16() -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((3, 3), 60_000, np.uint16)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (encoded("JPEG", (64, 64))[:-200], "cannot be decoded: OSError"),
        (encoded("PNG", (64, 64))[:-3000], "cannot be decoded"),
        (encoded("WEBP")[:20], "cannot be decoded"),
        (b"\xff\xd8\xff\xe0" + bytes(50), "cannot be decoded"),
        (bomb(100_000, 100_000), "pixels"),
        (bomb(12_000, 10_000), "pixels"),
        (_grey16(), "expected 8 bits per value"),
    ],
)
def test_what_cannot_be_decoded_is_one_line(data: bytes, words: str) -> None:
    with pytest.raises(FormatError, match=rf"^a/b.jpg: .*{words}") as caught:
        visited(open_format("image", {"decode": True}), Held(data, "a/b.jpg"))
    assert "\n" not in str(caught.value)


def test_a_bomb_is_refused_by_its_header() -> None:
    # In a process of its own: decoded it would take 300 MB, which a peak would show for good.
    program = """
import asyncio, resource, warnings
from growcache.errors import FormatError
from growcache.formats.image import decode_image
from tests.formats.test_images import bomb
warnings.simplefilter("ignore")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    decode_image(bomb(12_000, 10_000), "k")
except FormatError as error:
    print(error, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    words, _, grown = ran.stdout.strip().rpartition(" ")
    assert words == "k: expected at most 89,478,485 pixels, found 12000 by 10000"
    assert int(grown) < 50_000  # kB


def test_without_pillow_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(
        ConfigError, match=r"(?m)needs Pillow; pip install 'growcache\[image\]'$"
    ):
        open_format("image", {"decode": True})
    open_format("image", {})


MODULE = """
import json
import numpy as np

def text(data):
    return {"n": np.int64(json.loads(data)["n"])}

def named(data, key):
    return {"data": data, "key": key}

def none(data):
    return None

def wrong(key):
    return {}
"""


@pytest.fixture
def decoders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "user_decoders.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "user_decoders", raising=False)
    return "user_decoders"


@pytest.mark.parametrize("data", [b"", b"\0\xff" * 1000])
def test_bytes_are_kept_as_they_are(data: bytes) -> None:
    object_format = open_format("bytes", {})
    held = Held(data)
    assert visited(object_format, held) == [({"data": data}, 0, len(data))]
    assert held.asked == [(0, None)]
    measure = asyncio.run(object_format.measure(held))
    assert (measure.samples, measure.stride_bytes) == (1, len(data))
    assert object_format.code_digest is None


def test_bytes_decoded_by_a_function_of_the_users(decoders: str) -> None:
    object_format = open_format("bytes", {"decode": f"{decoders}:text"})
    ((sample, start, stop),) = visited(object_format, Held(b'{"n": 5}'))
    assert (int(sample["n"]), start, stop) == (5, 0, 8)
    assert object_format.code_digest
    named = open_format("bytes", {"decode": f"{decoders}:named"})
    assert visited(named, Held(b"1", "a/b"))[0][0] == {"data": b"1", "key": "a/b"}
    assert visited(open_format("bytes", {"decode": f"{decoders}:none"}), Held(b"1")) == []


def test_a_decoder_that_fails_is_named_with_its_line(decoders: str) -> None:
    object_format = open_format("bytes", {"decode": f"{decoders}:text"})
    words = (
        r"(?m)user_decoders:text raised json.*JSONDecodeError.* at user_decoders.py:6 on a/b$"
    )
    with pytest.raises(FormatError, match=words):
        visited(object_format, Held(b"{", "a/b"))
    with pytest.raises(ConfigError, match="must take data"):
        open_format("bytes", {"decode": f"{decoders}:wrong"})
