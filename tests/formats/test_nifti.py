"""NIfTI volumes hold what nibabel reads."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.errors import FormatError
from growcache.formats import open_format
from tests.formats.held import Held, visited


def volume(
    values: Any, scale: tuple[float, float] | None = None, order: str = "<", version: int = 1
) -> bytes:
    nibabel = pytest.importorskip("nibabel")
    image_of = nibabel.Nifti1Image if version == 1 else nibabel.Nifti2Image
    header = image_of.header_class(endianness=order)
    header.set_data_dtype(values.dtype)
    image = image_of(values, np.eye(4), header)
    image.header.set_slope_inter(*(scale or (1, 0)))
    data = bytearray(image.to_bytes())
    # nibabel chooses a scale of its own for what it writes, so the header is written again.
    image.header.set_slope_inter(*(scale or (np.nan, np.nan)))
    image.header["vox_offset"] = len(data) - values.nbytes
    data[: len(image.header.binaryblock)] = image.header.binaryblock
    data[len(data) - values.nbytes :] = values.astype(values.dtype.newbyteorder(order)).tobytes(
        order="F"
    )
    return bytes(data)


def read_by_nibabel(data: bytes, dtype: str) -> Any:
    import nibabel

    image_of = nibabel.Nifti1Image if data[4:7] != b"n+2" else nibabel.Nifti2Image
    image = image_of.from_bytes(data)
    if dtype == "stored":
        return image.dataobj.get_unscaled()
    return np.asanyarray(image.dataobj, None if dtype == "auto" else dtype)


def small(scale: tuple[float, float] | None = (0.5, 3)) -> bytes:
    return volume(np.arange(60, dtype="i2").reshape(12, 5), scale, ">")


@given(data=st.data())
def test_samples_are_what_nibabel_reads(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    dtype = data.draw(st.sampled_from(["u1", "i2", "i4", "u2", "f4", "f8", "i8", "c8"]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    values = rng.integers(0, 200, shape).astype(dtype)
    scale = data.draw(st.sampled_from([None, (1, 0), (0.25, -7), (1e-3, 0), (1, 4)]))
    order, version = data.draw(st.sampled_from("<>")), data.draw(st.integers(1, 2))
    meant = data.draw(st.sampled_from(["auto", "stored", "float32", "float64"]))
    if dtype == "c8" and meant.startswith("float"):
        meant = "auto"
    packed = volume(values, scale, order, version)
    expected = read_by_nibabel(packed, meant)
    axis = data.draw(st.integers(0, len(shape) - 1))
    window = data.draw(st.integers(1, shape[axis]))
    cut: dict[str, Any] = {"axis": axis, "window": window, "dtype": meant}
    is_packed = data.draw(st.booleans())
    if is_packed:
        packed, cut = gzip.compress(packed), {**cut, "compression": "gzip"}
    rows = visited(open_format("nifti", cut), Held(packed))
    assert len(rows) == shape[axis] // window
    for sample, start, stop in rows:
        piece = expected.take(range(start, stop), axis=axis)
        assert sample["x"].dtype == piece.dtype.newbyteorder("<")
        np.testing.assert_array_equal(sample["x"], piece)
    whole: dict[str, Any] = {n: cut[n] for n in ("dtype", "compression") if n in cut}
    ((sample, *_),) = visited(open_format("nifti", whole), Held(packed))
    np.testing.assert_array_equal(sample["x"], expected)


def test_a_block_is_read_by_range() -> None:
    values = np.arange(64 * 64 * 64, dtype="i2").reshape(64, 64, 64)
    held = Held(volume(values))
    form = open_format("nifti", {"window": [None, None, 8]})
    assert asyncio.run(form.measure(held)).samples == 8
    held.asked.clear()
    ((sample, *_),) = visited(form, held, 3, 8)
    np.testing.assert_array_equal(sample["x"], values[:, :, 24:32])
    ((start, stop),) = held.asked
    assert stop is not None
    assert stop - start == 64 * 64 * 8 * 2


def test_the_names_of_objects_say_that_they_are_compressed() -> None:
    packed = gzip.compress(small())
    ((sample, *_),) = visited(open_format("nifti", {}, ["s3://b/*.nii.gz"]), Held(packed))
    assert sample["x"].shape == (12, 5)
    with pytest.raises(FormatError, match="set compression: gzip"):
        visited(open_format("nifti", {}, ["s3://b/*.nii"]), Held(packed))


@pytest.mark.parametrize(
    ("at", "wrong", "words"),
    [
        (42, b"\x7f\xff", "promises"),
        (42, b"\xff\xff", "claims an array"),
        (70, b"\x00\x80", r"plain numbers, found \[\('R'"),
        (70, b"\x7f\x00", "damaged"),
        (108, b"\x7f\xc0\x00\x00", "damaged"),
        (108, b"\x00\x00\x00\x00", "at byte 0"),
        (344, b"ni1\x00", "header and values"),
    ],
)
def test_headers_that_cannot_be_true(at: int, wrong: bytes, words: str) -> None:
    data = bytearray(small())
    data[at : at + len(wrong)] = wrong
    for options in ({}, {"axis": 0}):
        with pytest.raises(FormatError, match=words):
            visited(open_format("nifti", options), Held(bytes(data)))


def test_a_packed_volume_unpacks_to_what_its_header_promises() -> None:
    packed = gzip.compress(small() + bytes(1 << 22), 1)
    with pytest.raises(
        FormatError, match=r"may be unpacked to at most 1,0[0-9,]+ bytes in memory"
    ):
        visited(open_format("nifti", {"compression": "gzip"}), Held(packed))
