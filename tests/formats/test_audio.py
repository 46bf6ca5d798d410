"""Audio holds what soundfile reads."""

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


def audio(
    frames: int = 50,
    channels: int = 2,
    form: str = "WAV",
    subtype: str = "PCM_16",
    seed: int = 0,
    rate: int = 16000,
) -> bytes:
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    values = np.random.default_rng(seed).uniform(-1, 1, (frames, channels))
    soundfile.write(file, values, rate, subtype, format=form)
    return file.getvalue()


def read_by_soundfile(data: bytes, dtype: str = "float32") -> Any:
    import soundfile

    return soundfile.read(io.BytesIO(data), dtype=dtype)[0]


@given(data=st.data())
def test_windows_are_what_soundfile_reads(data: st.DataObject) -> None:
    form, subtype = data.draw(
        st.sampled_from(
            [("FLAC", "PCM_16"), ("FLAC", "PCM_24"), ("RF64", "PCM_16"), ("AIFF", "PCM_16")]
            + [
                (form, subtype)
                for form in ("WAV", "WAVEX")
                for subtype in (
                    "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ALAW", "ULAW"
                )
            ]
        )
    )  # fmt: skip
    frames, channels = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 3))
    is_float = subtype in ("FLOAT", "DOUBLE")
    dtypes = ["float32", "float64"] if is_float else ["float32", "float64", "int16", "int32"]
    dtype = data.draw(st.sampled_from(dtypes))
    packed = audio(frames, channels, form, subtype, data.draw(st.integers(0, 9)))
    expected = read_by_soundfile(packed, dtype)
    window = data.draw(st.integers(1, frames + 3))
    edge = data.draw(st.sampled_from(["drop", "pad"]))
    is_wav = form not in ("FLAC", "AIFF")
    read = data.draw(st.sampled_from(["range", "whole"])) if is_wav else "whole"
    options = {"window": window, "edge": edge, "dtype": dtype, "read": read}
    opened, held = open_format("audio", options), Held(packed)
    rows = visited(opened, held)
    assert len(rows) == (frames // window if edge == "drop" else -(-frames // window))
    assert asyncio.run(opened.measure(held)).samples == len(rows)
    for sample, start, stop in rows:
        assert sample["x"].dtype == dtype
        assert len(sample["x"]) == window
        np.testing.assert_array_equal(sample["x"][: stop - start], expected[start:stop])
        assert not sample["x"][stop - start :].any()


def test_a_window_is_read_by_range() -> None:
    packed = audio(200_000)
    held = Held(packed)
    form = open_format("audio", {"window": 1000})
    assert asyncio.run(form.measure(held)).samples == 200
    held.asked.clear()
    ((sample, *_),) = visited(form, held, 7, 200)
    np.testing.assert_array_equal(sample["x"], read_by_soundfile(packed)[7000:8000])
    ((start, stop),) = held.asked
    assert stop is not None
    assert stop - start == 4000


def test_chunks_before_the_samples_are_passed_over() -> None:
    packed = audio()
    bext = b"bext" + (9001).to_bytes(4, "little") + bytes(9002)
    longer = packed[:12] + bext + bext + packed[12:]
    form = open_format("audio", {"window": 5})
    found, expected = visited(form, Held(longer)), visited(form, Held(packed, "other"))
    for (one, *_), (other, *_) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one["x"], other["x"])


def test_what_cannot_be_meant() -> None:
    flac = Held(audio(form="FLAC"))
    with pytest.raises(FormatError, match=r"expected a WAV file.* set read: whole"):
        visited(open_format("audio", {"window": 5}), flac)
    assert visited(open_format("audio", {"window": 5}, ["s3://b/**/*.flac"]), flac)
    for options in ({}, {"window": 5}):
        with pytest.raises(FormatError, match=r"expected 8,000 frames a second.*found 16,000"):
            visited(open_format("audio", {"rate": 8000, **options}), Held(audio()))
    floats = Held(audio(subtype="FLOAT"))
    with pytest.raises(FormatError, match="its samples are floats"):
        visited(open_format("audio", {"window": 5, "dtype": "int16"}), floats)
    with pytest.raises(FormatError, match=r"found WAV encoding 17.*set read: whole"):
        visited(open_format("audio", {"window": 5}), Held(audio(subtype="IMA_ADPCM")))
