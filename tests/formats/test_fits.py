"""FITS images and tables hold what astropy reads."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.errors import FormatError
from growcache.formats import open_format
from tests.formats.held import Held, visited

pytestmark = pytest.mark.slow  # astropy is installed for slow tests only


def image(values: Any, **cards: Any) -> bytes:
    fits = pytest.importorskip("astropy.io.fits")
    first = fits.PrimaryHDU()
    second = fits.ImageHDU(values, name="SCI")
    for name, value in cards.items():
        second.header[name] = value
    file = io.BytesIO()
    fits.HDUList([first, second]).writeto(file)
    return file.getvalue()


def table(rows: int = 12) -> bytes:
    fits = pytest.importorskip("astropy.io.fits")
    rng = np.random.default_rng(rows)
    columns = [
        fits.Column("energy", "E", array=rng.random(rows).astype("f4")),
        fits.Column(
            "counts", "J", bzero=1 << 31, array=rng.integers(0, 1 << 32, rows, np.uint32)
        ),
        fits.Column("position", "3D", array=rng.random((rows, 3))),
        fits.Column("good", "L", array=rng.random(rows) > 0.5),
        fits.Column("name", "8A", array=[f"star {n}" for n in range(rows)]),
    ]
    file = io.BytesIO()
    events = fits.BinTableHDU.from_columns(columns, name="EVENTS")
    fits.HDUList([fits.PrimaryHDU(np.zeros((3, 3), "f4")), events]).writeto(file)
    return file.getvalue()


def small() -> bytes:
    return image(np.arange(60, dtype="i2").reshape(12, 5))


def scaled() -> bytes:
    data = small()
    named, card = data.index(b"EXTNAME"), b"BSCALE  =                  0.5".ljust(80)
    end = data.index(b"END ", named)
    return data[:end] + card + data[end : 2 * 2880 - 80] + data[2 * 2880 :]


def read_by_astropy(data: bytes, hdu: int = 1) -> Any:
    from astropy.io import fits

    with fits.open(io.BytesIO(data)) as opened:
        return opened[hdu].data


@given(data=st.data())
def test_images_are_what_astropy_reads(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    dtype = data.draw(st.sampled_from(["u1", "i2", "u2", "i4", "u4", "i8", "f4", "f8", "i1"]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    values = rng.integers(0, 100, shape).astype(dtype)
    cards = {"BLANK": 7} if data.draw(st.booleans()) and dtype in ("i2", "i4") else {}
    packed = image(values, **cards)
    expected = read_by_astropy(packed)
    axis = data.draw(st.integers(0, len(shape) - 1))
    window = data.draw(st.integers(1, shape[axis]))
    rows = visited(open_format("fits", {"axis": axis, "window": window}), Held(packed))
    assert len(rows) == shape[axis] // window
    for sample, start, stop in rows:
        piece = expected.take(range(start, stop), axis=axis)
        assert sample["x"].dtype == piece.dtype.newbyteorder("<")
        np.testing.assert_array_equal(sample["x"], piece)
    ((sample, *_),) = visited(open_format("fits", {"hdu": "sci"}), Held(packed))
    np.testing.assert_array_equal(sample["x"], expected)


def test_scaled_values() -> None:
    rows = visited(open_format("fits", {"axis": 0}), Held(scaled()))
    expected = read_by_astropy(scaled())
    assert expected.dtype == "f4"
    for sample, start, _ in rows:
        np.testing.assert_array_equal(sample["x"], expected[start])


def test_rows_are_what_astropy_reads() -> None:
    expected = read_by_astropy(table())
    for options in ({"table": 1}, {"table": "EVENTS", "columns": ["name", "counts"]}):
        rows = visited(open_format("fits", options), Held(table()))
        assert [start for _, start, _ in rows] == list(range(12))
        for sample, start, _ in rows:
            assert list(sample) == options.get("columns", expected.names)
            for name, value in sample.items():
                np.testing.assert_array_equal(value, expected[name][start])


def test_a_cutout_is_read_by_range() -> None:
    values = np.arange(400 * 1000, dtype="f4").reshape(400, 1000)
    held = Held(image(values))
    form = open_format("fits", {"window": [10, None]})
    assert asyncio.run(form.measure(held)).samples == 40
    held.asked.clear()
    ((sample, *_),) = visited(form, held, 7, 40)
    np.testing.assert_array_equal(sample["x"], values[70:80])
    ((start, stop),) = held.asked
    assert stop is not None
    assert stop - start == 40_000


def test_what_is_not_there() -> None:
    with pytest.raises(FormatError, match="expected an image 'x', found 0, SCI"):
        visited(open_format("fits", {"hdu": "x"}), Held(small()))
    with pytest.raises(FormatError, match="HDU SCI: expected a binary table, found IMAGE"):
        visited(open_format("fits", {"table": "SCI"}), Held(small()))
    with pytest.raises(FormatError, match="expected a column 'x', found energy"):
        visited(open_format("fits", {"table": 1, "columns": ["x"]}), Held(table()))


def test_a_damaged_card_is_an_error_and_no_warning() -> None:
    data = table()
    first = data.index(b"TTYPE1")
    refusals = 0
    for at in range(first, first + 80):
        damaged = bytearray(data)
        damaged[at] = 1
        try:
            visited(open_format("fits", {"table": 1}), Held(bytes(damaged)))
        except FormatError:
            refusals += 1
    assert refusals > 60  # of a comment's bytes astropy says nothing
