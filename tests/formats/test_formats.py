from __future__ import annotations

import asyncio
import io
import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from growcache.errors import FormatError
from growcache.formats import open_format
from growcache.schema import Array
from tests.formats.held import Held, visited


def npy(array: Array, **settings: Any) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, allow_pickle=False, **settings)
    return file.getvalue()


def header(text: str, version: int = 1, data: bytes = b"") -> bytes:
    size = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + size + text.encode() + data


def rows(count: int, *shape: int, dtype: str = "<f4") -> Array:
    return np.arange(count * int(np.prod(shape)), dtype=dtype).reshape(count, *shape)


@pytest.mark.parametrize("dtype", ["<f4", ">f8", "|u1", "?", ">i2", "<c8", "<f2", ">u8"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(), (3,), (4, 5), (0, 5), (2, 3, 4)])
def test_a_whole_array_is_one_sample(dtype: str, order: Any, shape: tuple[int, ...]) -> None:
    array = np.asarray(
        np.arange(int(np.prod(shape))).reshape(shape).astype(dtype), dtype, order=order
    )
    held = Held(npy(array))
    object_format = open_format("npy", {})
    ((sample, start, stop),) = visited(object_format, held)
    np.testing.assert_array_equal(sample["x"], array)
    assert sample["x"].dtype == np.dtype(dtype).newbyteorder("<")
    assert sample["x"].flags.c_contiguous
    assert (start, stop) == (0, shape[0] if shape else held.entry.size)
    assert held.asked == [(0, None)]
    assert not object_format.ranged
    measure = asyncio.run(object_format.measure(held))
    assert (measure.samples, measure.stride_bytes) == (1, array.nbytes)
    assert measure.overhead_bytes == held.entry.size - array.nbytes


def test_a_whole_array_is_not_copied() -> None:
    held = Held(npy(rows(1000, 64)))
    ((sample, _, _),) = visited(open_format("npy", {}), held)
    assert np.shares_memory(sample["x"], np.frombuffer(held.data, np.uint8))


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_header_version(version: tuple[int, int]) -> None:
    array = rows(7, 3)
    ((sample, _, _),) = visited(open_format("npy", {}), Held(npy(array, version=version)))
    np.testing.assert_array_equal(sample["x"], array)


def test_a_header_of_python_2() -> None:
    text = "{'descr': '<i2', 'fortran_order': False, 'shape': (3L, 1L)}\n"
    held = Held(header(text, data=bytes(6)))
    assert visited(open_format("npy", {}), held)[0][0]["x"].shape == (3, 1)


GOOD = "{'descr': '<i2', 'fortran_order': False, 'shape': (3,)}\n"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04 something else",
        b"\x93NUMPY\x09\x00\x10\x00" + bytes(16),
        header(GOOD, data=bytes(5)),
        header(GOOD)[:20],
        header(GOOD.replace("(3,)", "(10**12,)"), data=bytes(6)),
        header(GOOD.replace("(3,)", "(1000000000000,)"), data=bytes(6)),
        header(GOOD.replace("(3,)", "(-3,)"), data=bytes(6)),
        header(GOOD.replace("(3,)", "3"), data=bytes(6)),
        header(GOOD.replace("(3,)", "(True,)"), data=bytes(6)),
        header(GOOD.replace("False", "0"), data=bytes(6)),
        header(GOOD.replace("<i2", "|O"), data=bytes(6)),
        header(GOOD.replace("<i2", "<V5"), data=bytes(60)),
        header(GOOD.replace("<i2", "<M8[parsec]"), data=bytes(60)),
        header(GOOD.replace("<i2", "i2,i2"), data=bytes(60)),
        header(GOOD.replace("'<i2'", "[('a', '|O')]"), data=bytes(60)),
        header(GOOD.replace("'<i2'", "__import__('os').system('true')"), data=bytes(60)),
        header("{'descr': '<i2', 'shape': (3,)}", data=bytes(60)),
        header("(" * 5000, data=bytes(60)),
        header("{" + " " * 20_000, 2, bytes(60)),
    ],
)
@pytest.mark.parametrize("options", [{}, {"axis": 0}, {"window": 2}])
def test_what_is_no_array_of_numbers(data: bytes, options: dict[str, Any]) -> None:
    object_format = open_format("npy", options)
    with pytest.raises(FormatError, match=r"^k: "):
        visited(object_format, Held(data))
    with pytest.raises(FormatError, match=r"^k: "):
        asyncio.run(object_format.measure(Held(data)))


@pytest.mark.parametrize("shape", [(10,), (10, 3), (0, 3), (10, 0), (10, 2, 2)])
def test_each_row_is_a_sample(shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=">i4").reshape(shape)
    object_format = open_format("npy", {"axis": 0})
    found = visited(object_format, Held(npy(array)))
    assert [(start, stop) for _, start, stop in found] == [(n, n + 1) for n in range(shape[0])]
    for sample, start, _ in found:
        np.testing.assert_array_equal(sample["x"], array[start])
        assert sample["x"].dtype.str == "<i4"


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 9), st.integers(1, 7))
def test_the_parts_of_an_object_are_its_windows(
    count: int, window: int, stride: int, parts: int
) -> None:
    array = rows(count, 2)
    object_format = open_format("npy", {"window": window, "stride": stride})
    held = Held(npy(array))
    found = [row for part in range(parts) for row in visited(object_format, held, part, parts)]
    starts = list(range(0, count - window + 1, stride))
    assert [(start, stop) for _, start, stop in found] == [(s, s + window) for s in starts]
    for sample, start, stop in found:
        np.testing.assert_array_equal(sample["x"], array[start:stop])
    measure = asyncio.run(object_format.measure(held))
    assert measure.samples == len(starts)
    if starts:
        exact = (held.entry.size - measure.overhead_bytes) / measure.stride_bytes
        assert int(exact) == len(starts)


def test_a_part_is_one_request_beside_the_header() -> None:
    held = Held(npy(rows(10_000, 16)))
    object_format = open_format("npy", {"axis": 0})
    first = visited(object_format, held, 3, 10)
    assert len(first) == 1000
    assert len(held.asked) == 2
    visited(object_format, held, 4, 10)
    assert len(held.asked) == 3
    start, stop = held.asked[-1]
    assert (start, stop) == (128 + 4000 * 64, 128 + 5000 * 64)


def test_an_object_that_no_sampler_can_hold_is_refused_unread() -> None:
    held = Held(npy(rows(2, 2)), size=5_000_000_000)
    for name in ("npy", "bytes", "image"):
        with pytest.raises(
            FormatError, match="may have at most 1,000,000,000 bytes, found 5,000"
        ):
            visited(open_format(name, {} if name != "image" else {"label": "none"}), held)
    assert held.asked == []


def test_a_small_object_is_one_request() -> None:
    held = Held(npy(rows(10, 16)))
    visited(open_format("npy", {"axis": 0}), held)
    assert held.asked == [(0, None)]


def test_a_single_value_has_no_rows() -> None:
    with pytest.raises(FormatError, match="axis 0"):
        visited(open_format("npy", {"axis": 0}), Held(npy(np.array(1.0))))


def test_raw_rows_and_channels() -> None:
    array = rows(20, 6, dtype=">i2")
    held = Held(b"head" + array.tobytes() + b"\x00")
    options = {"dtype": ">i2", "shape": [6], "offset": 4, "channels": [4, 1], "window": 5}
    found = visited(open_format("raw", {**options, "phase": "zero"}), held)
    assert [start for _, start, _ in found] == [0, 5, 10, 15]
    for sample, start, stop in found:
        np.testing.assert_array_equal(sample["x"], array[start:stop, [4, 1]])
        assert sample["x"].dtype.str == "<i2"
        assert sample["x"].flags.c_contiguous


def test_raw_single_values() -> None:
    found = visited(open_format("raw", {"dtype": "<u2"}), Held(bytes([1, 0, 2, 0])))
    assert [int(sample["x"]) for sample, _, _ in found] == [1, 2]
    assert found[0][0]["x"].shape == ()


@pytest.mark.parametrize("name", ["npy", "raw"])
def test_padding_keeps_the_end(name: str) -> None:
    options: dict[str, Any] = {"window": 4, "edge": "pad", "phase": "zero"}
    data = bytes(range(1, 11))
    if name == "raw":
        options["dtype"] = "u1"
    else:
        data = npy(np.frombuffer(data, "u1"))
    found = visited(open_format(name, options), Held(data))
    assert [(s["x"].tolist(), a, b) for s, a, b in found] == [
        ([1, 2, 3, 4], 0, 4),
        ([5, 6, 7, 8], 4, 8),
        ([9, 10, 0, 0], 8, 10),
    ]


@pytest.mark.slow
def test_every_start_is_equally_likely() -> None:
    object_format = open_format("raw", {"dtype": "u1", "window": 8, "stride": 5})
    held = Held(bytes(40))
    counts = Counter(
        start
        for round in range(1500)
        for _, start, _ in visited(object_format, held, round=round)
    )
    assert set(counts) == set(range(33))
    expected = 1500 / 5
    assert all(abs(count - expected) < 6 * expected**0.5 for count in counts.values())


def test_a_short_object_is_not_passed_over() -> None:
    object_format = open_format("raw", {"dtype": "u1", "window": 8})
    starts = {visited(object_format, Held(bytes(10)), round=n)[0][1] for n in range(200)}
    assert starts == {0, 1, 2}
    assert visited(object_format, Held(bytes(7))) == []


def test_the_phase_is_a_function_of_seed_round_and_key() -> None:
    object_format = open_format("raw", {"dtype": "u1", "window": 1000})
    starts = {
        (seed, round, key): [
            visited(object_format, Held(bytes(100_000), key), seed=seed, round=round)[0][1]
            for _ in "12"
        ]
        for seed, round, key in itertools.product((0, 1), (0, 1), "ab")
    }
    assert all(a == b for a, b in starts.values())
    assert len({a for a, _ in starts.values()}) == len(starts)


def test_parts_of_one_pass_have_one_phase() -> None:
    object_format = open_format("raw", {"dtype": "u1", "window": 7})
    held = Held(bytes(1000))
    whole = [row[1:] for row in visited(object_format, held, round=5)]
    pieces = [
        row[1:] for part in range(9) for row in visited(object_format, held, part, 9, round=5)
    ]
    assert whole == pieces


@settings(max_examples=30)
@given(st.integers(0, 40), st.integers(0, 50))
def test_taking_some_at_random(count: int, take: int) -> None:
    array = rows(count, 3)
    object_format = open_format("npy", {"axis": 0})
    found = visited(object_format, Held(npy(array)), take=take)
    starts = [start for _, start, _ in found]
    assert starts == sorted(set(starts))
    assert len(starts) == min(take, count)
    for sample, start, _ in found:
        np.testing.assert_array_equal(sample["x"], array[start])


def test_taking_few_of_many_reads_little() -> None:
    array = rows(4096, 4096)
    held = Held(npy(array))
    object_format = open_format("npy", {"axis": 0})
    found = visited(object_format, held, take=3)
    read = sum((stop or 0) - start for start, stop in held.asked)
    assert read < held.entry.size / 10
    assert [int(s["x"][0]) for s, _, _ in found] == [a * 4096 for _, a, _ in found]
    again = visited(object_format, held, take=3, round=1)
    assert [a for _, a, _ in again] != [a for _, a, _ in found]


def test_an_object_shorter_than_its_offset() -> None:
    with pytest.raises(FormatError, match="offset of 100"):
        visited(open_format("raw", {"dtype": "u1", "offset": 100}), Held(b"short"))
