"""EDF and BDF recordings hold what pyedflib and edfio read."""

from __future__ import annotations

import asyncio
import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.errors import FormatError
from growcache.formats import open_format
from tests.formats.held import Held, visited


def header_of(
    label: str, rate: int, bits: int, physical: tuple[float, float]
) -> dict[str, Any]:
    most = 1 << (bits - 1)
    return {
        "label": label, "dimension": "uV", "sample_frequency": rate, "prefilter": "",
        "physical_min": physical[0], "physical_max": physical[1], "transducer": "",
        "digital_min": -most, "digital_max": most - 1,
    }  # fmt: skip


def recording(
    rates: dict[str, int],
    seconds: int,
    *,
    bits: int = 16,
    plus: bool = True,
    seed: int = 0,
    physical: tuple[float, float] = (-250.0, 300.0),
) -> bytes:
    pyedflib = pytest.importorskip("pyedflib")
    kind = {
        (16, False): pyedflib.FILETYPE_EDF, (16, True): pyedflib.FILETYPE_EDFPLUS,
        (24, False): pyedflib.FILETYPE_BDF, (24, True): pyedflib.FILETYPE_BDFPLUS,
    }[bits, plus]  # fmt: skip
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "r.edf"
        writer = pyedflib.EdfWriter(str(path), len(rates), file_type=kind)
        headers = [header_of(name, rate, bits, physical) for name, rate in rates.items()]
        writer.setSignalHeaders(headers)
        most = 1 << (bits - 1)
        writer.writeSamples(
            [rng.integers(-most, most, rate * seconds, np.int32) for rate in rates.values()],
            digital=True,
        )
        writer.close()
        return path.read_bytes()


def read_by_pyedflib(data: bytes, digital: bool = False) -> dict[str, Any]:
    import pyedflib

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "r.edf"
        path.write_bytes(data)
        with pyedflib.EdfReader(str(path)) as reader:
            labels = reader.getSignalLabels()
            return {
                label: reader.readSignal(n, digital=digital) for n, label in enumerate(labels)
            }


def small() -> bytes:
    return recording({"C3": 10, "C4": 10, "EMG": 20}, 6)


CHANNELS = ["C4", "C3"]


@given(data=st.data())
def test_windows_are_what_pyedflib_reads(data: st.DataObject) -> None:
    rate = data.draw(st.integers(1, 30))
    rates = {f"EEG {n}": data.draw(st.sampled_from([rate, 7])) for n in range(4)} | {"A": rate}
    seconds, bits = data.draw(st.integers(1, 8)), data.draw(st.sampled_from([16, 24]))
    packed = recording(
        rates,
        seconds,
        bits=bits,
        plus=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 9)),
        physical=data.draw(st.sampled_from([(-250.0, 300.0), (1.0, -1.0), (0.0, 8191.5)])),
    )
    alike = [name for name, one in rates.items() if one == rate]
    chosen = data.draw(st.lists(st.sampled_from(alike), min_size=1, unique=True))
    dtype = data.draw(st.sampled_from(["float64", "float32", "stored"]))
    expected = read_by_pyedflib(packed, digital=dtype == "stored")
    window = data.draw(st.integers(1, rate * seconds))
    stride = data.draw(st.integers(1, 2 * window))
    options = {"channels": chosen, "window": window, "stride": stride, "dtype": dtype}
    form, held = open_format("edf", options), Held(packed)
    rows = visited(form, held)
    assert [start for _, start, _ in rows] == list(
        range(0, rate * seconds - window + 1, stride)
    )
    assert asyncio.run(form.measure(held)).samples == len(rows)
    stored = "i2" if bits == 16 else "i4"
    for sample, start, stop in rows:
        piece = np.array([expected[name][start:stop] for name in chosen])
        meant = piece.astype(stored if dtype == "stored" else dtype)
        assert sample["x"].dtype == meant.dtype
        np.testing.assert_array_equal(sample["x"], meant)


def test_edfio_reads_the_same() -> None:
    edfio = pytest.importorskip("edfio")
    packed = recording({"C3": 10, "C4": 10}, 6)
    signals = {one.label: one.data for one in edfio.read_edf(io.BytesIO(packed)).signals}
    options = {"window": 60, "dtype": "float64"}
    ((sample, *_),) = visited(open_format("edf", options), Held(packed))
    np.testing.assert_array_equal(sample["x"], [signals["C3"], signals["C4"]])


def test_a_window_is_read_by_range() -> None:
    rates = {f"{n}": 1000 for n in range(60)}
    held = Held(recording(rates, 30, plus=False))
    form = open_format("edf", {"channels": ["3"], "window": 1000})
    assert asyncio.run(form.measure(held)).samples == 30
    held.asked.clear()
    visited(form, held, 4, 30)
    ((start, stop),) = held.asked
    assert stop is not None
    assert stop - start == 2000
    held.asked.clear()
    visited(form, held, 0, 3)
    assert sum((stop or 0) - start for start, stop in held.asked) == 10 * 2000


def test_padding_is_zero_also_where_zero_is_no_stored_value() -> None:
    held = Held(recording({"C3": 10}, 1, physical=(5.0, 9.0)))
    rows = visited(open_format("edf", {"window": 8, "edge": "pad"}), held)
    assert [(start, stop) for _, start, stop in rows] == [(0, 8), (8, 10)]
    x = rows[1][0]["x"]
    assert np.all(x[:, :2] >= 5)
    assert not x[:, 2:].any()


def test_a_recorder_that_was_cut_off_says_no_number_of_records() -> None:
    data = bytearray(small())
    data[236:244] = b"-1      "
    options = {"window": 10, "channels": CHANNELS}
    assert len(visited(open_format("edf", options), Held(bytes(data)))) == 6


@pytest.mark.parametrize(
    ("at", "wrong", "words"),
    [
        (0, b"1", "expected an EDF or BDF file, found b'1"),
        (192, b"EDF+D", "discontinuous"),
        (236, b"7       ", "promises 7 records"),
        (236, b"x       ", "damaged"),
        (252, b"9999", "claims 9,999 signals"),
        (252, b"0   ", "claims 0 signals"),
    ],
)
def test_headers_that_cannot_be_true(at: int, wrong: bytes, words: str) -> None:
    data = bytearray(small())
    data[at : at + len(wrong)] = wrong
    with pytest.raises(FormatError, match=words):
        visited(open_format("edf", {"window": 10, "channels": CHANNELS}), Held(bytes(data)))


def test_signals_that_do_not_go_together() -> None:
    with pytest.raises(FormatError, match=r"one sampling rate, found .*C3: 10.*source.options"):
        visited(open_format("edf", {"window": 10}), Held(small()))
    with pytest.raises(FormatError, match="expected a signal 'Cz', found C3, C4, EMG"):
        visited(open_format("edf", {"window": 10, "channels": ["Cz"]}), Held(small()))


@pytest.mark.parametrize(
    ("channels", "options", "starts", "length"),
    [
        (["a"], {"window": "2s", "stride": "500ms"}, [0, 50, 100], 200),
        (["b"], {"window": "0.25s"}, range(0, 96, 8), 8),
        (["b"], {"window": "1 s", "stride": 40}, [0, 40], 32),
    ],
)
def test_windows_in_seconds(
    channels: list[str], options: dict[str, Any], starts: Any, length: int
) -> None:
    held = Held(recording({"a": 100, "b": 32}, 3))
    form = open_format("edf", {"channels": channels, **options})
    rows = visited(form, held)
    assert [(start, stop - start) for _, start, stop in rows] == [(n, length) for n in starts]
    assert asyncio.run(form.measure(held)).samples == len(starts)


def test_a_time_that_is_less_than_a_sample() -> None:
    with pytest.raises(FormatError, match="window 10ms is less than a sample, of 32 a second"):
        visited(open_format("edf", {"window": "10ms"}), Held(recording({"b": 32}, 3)))
