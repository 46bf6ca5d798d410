"""Archives as NumPy writes them, whole and by range; and others, that claim what is not so."""

from __future__ import annotations

import asyncio
import io
import struct
import tracemalloc
import zipfile
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from growcache.errors import FormatError
from growcache.formats import open_format
from growcache.formats.npz import ZipMember, unpack_member
from tests.formats.held import Held, visited


def archive(*, packed: bool = False, **arrays: Any) -> bytes:
    file = io.BytesIO()
    (np.savez_compressed if packed else np.savez)(file, **arrays)
    return file.getvalue()


def npy(array: Any, **settings: Any) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(array), **settings)
    return file.getvalue()


def zipped(members: dict[str, bytes], method: int = zipfile.ZIP_STORED, **more: Any) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as made:
        for name, data in members.items():
            made.writestr(name, data)
        made.comment = more.get("comment", b"")
    return file.getvalue()


def rows(count: int, *shape: int, dtype: str = "<f4") -> Any:
    return np.arange(count * int(np.prod(shape)), dtype=dtype).reshape(count, *shape)


def fetched(held: Held) -> int:
    size = len(held.data)
    return sum(min(size if stop is None else stop, size) - start for start, stop in held.asked)


ARRAYS = {
    "x": rows(20, 3, dtype=">i2"),
    "y": np.float64(2.5),
    "a/b": np.asfortranarray(rows(4, 5)),
    "none": np.zeros((0, 2)),
    "z": np.array([True, False]),
}


@pytest.mark.parametrize("packed", [False, True])
def test_an_archive_is_a_sample(packed: bool) -> None:
    held = Held(archive(packed=packed, **ARRAYS))
    object_format = open_format("npz", {})
    ((sample, start, stop),) = visited(object_format, held)
    assert sample.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(sample[name], array)
        assert sample[name].dtype == np.asarray(array).dtype.newbyteorder("<")
        assert sample[name].flags.c_contiguous
    assert (start, stop) == (0, held.entry.size)
    assert held.asked == [(0, None)]
    assert not object_format.ranged
    assert asyncio.run(object_format.measure(held)).samples == 1


@pytest.mark.parametrize("packed", [False, True])
def test_some_arrays_are_read_without_the_others(packed: bool) -> None:
    noise = np.random.default_rng(0).bytes(400_000)
    big = {name: np.frombuffer(noise, "u1") for name in "abcd"}
    held = Held(archive(packed=packed, **big, x=rows(100, 3), y=np.int64(3)))
    ((sample, _, _),) = visited(open_format("npz", {"fields": ["y", "x"]}), held)
    assert list(sample) == ["y", "x"]
    np.testing.assert_array_equal(sample["x"], rows(100, 3))
    assert fetched(held) < 10_000
    assert len(held.asked) == 2  # the end, and both arrays
    with pytest.raises(FormatError, match=r"^k: expected an array 'z', found a, b, c, d, x, y"):
        visited(open_format("npz", {"fields": ["z"]}), held)


def test_the_end_may_be_long() -> None:
    many: dict[str, Any] = {f"array-of-a-long-name-{i:05d}": np.int64(i) for i in range(1500)}
    held = Held(archive(**many))
    ((sample, _, _),) = visited(open_format("npz", {"fields": [list(many)[77]]}), held)
    assert list(sample.values()) == [77]
    commented = zipped({"x.npy": npy(rows(50_000, 4))}, comment=b"c" * 60_000)
    held = Held(commented)
    found = visited(open_format("npz", {"axis": 0}), held, 3, 50_000)
    np.testing.assert_array_equal(found[0][0]["x"], rows(50_000, 4)[3])


@pytest.mark.parametrize("read", ["range", "whole"])
@pytest.mark.parametrize("packed", [False, True])
def test_each_row_is_a_sample(read: str, packed: bool) -> None:
    x, y = rows(40, 6, dtype=">f8"), np.arange(40, dtype="i8")
    held = Held(archive(packed=packed, x=x, y=y, rate=np.float32(500)))
    options = {"axis": 0, "fields": ["x", "y"], "read": read}
    object_format = open_format("npz", options)
    if packed and read == "range":
        with pytest.raises(FormatError, match=r"x is compressed.*set read: whole"):
            visited(object_format, held)
        return
    found = visited(object_format, held)
    assert [row[1:] for row in found] == [(i, i + 1) for i in range(40)]
    for sample, start, _ in found:
        np.testing.assert_array_equal(sample["x"], x[start])
        assert sample["y"] == start
    assert asyncio.run(object_format.measure(held)).samples == 40
    with pytest.raises(FormatError, match=r"as many rows each, found x 40, y 40, rate|axis 0"):
        visited(open_format("npz", {"axis": 0, "read": read}), held)
    assert len(visited(object_format, held, take=7)) == 7


@settings(max_examples=40)
@given(
    st.integers(0, 60), st.integers(1, 9), st.integers(1, 9), st.integers(1, 7),
    st.sampled_from(["zero", "random"]), st.sampled_from(["drop", "pad"]),
)  # fmt: skip
def test_windows_of_all_arrays_together(
    count: int, window: int, stride: int, parts: int, phase: str, edge: str
) -> None:
    x, y = rows(count, 2), rows(count, dtype="<i8")
    held = Held(archive(x=x, y=y))
    options = {"window": window, "stride": stride, "phase": phase, "edge": edge}
    object_format = open_format("npz", options)
    found = [row for part in range(parts) for row in visited(object_format, held, part, parts)]
    whole = visited(open_format("npz", {**options, "read": "whole"}), held)
    assert [row[1:] for row in found] == [row[1:] for row in whole]
    for (sample, start, stop), (other, *_) in zip(found, whole, strict=True):
        for name, array in (("x", x), ("y", y)):
            np.testing.assert_array_equal(sample[name][: stop - start], array[start:stop])
            np.testing.assert_array_equal(sample[name], other[name])
            assert len(sample[name]) == window
            assert not sample[name][stop - start :].any()
    measure = asyncio.run(object_format.measure(held))
    last = count if edge == "pad" else count - window + 1
    assert measure.samples == len(range(0, last, stride))
    if measure.samples:
        exact = (held.entry.size - measure.overhead_bytes) / measure.stride_bytes
        assert int(exact + 1e-9) == measure.samples


def test_a_row_is_a_request_for_each_array() -> None:
    held = Held(archive(x=rows(10_000, 256), y=rows(10_000, 8)))
    object_format = open_format("npz", {"axis": 0})
    visited(object_format, held, 3, 10_000)
    assert fetched(held) < 7000  # the end, two heads, two rows
    held.asked.clear()
    ((sample, _, _),) = visited(object_format, held, 5, 10_000)
    assert [stop - start for start, stop in held.asked if stop is not None] == [1024, 32]
    np.testing.assert_array_equal(sample["x"], rows(10_000, 256)[5])


def test_an_archive_with_wide_numbers() -> None:
    """Of more than 4 GB the numbers stand elsewhere; they may in any."""
    array = npy(rows(50, 4))
    name = b"x.npy"
    local = struct.pack("<4s5H3I2H", b"PK\3\4", 45, 0, 0, 0, 0, zlib.crc32(array), 2**32 - 1,
                        2**32 - 1, len(name), 20)  # fmt: skip
    local += name + struct.pack("<HHQQ", 1, 16, len(array), len(array)) + array
    extra = struct.pack("<HH3x", 9, 3) + struct.pack("<HHQQQ", 1, 24, len(array), len(array), 0)
    central = struct.pack("<4s6H3I5H2I", b"PK\1\2", 45, 45, 0, 0, 0, 0, zlib.crc32(array),
                          2**32 - 1, 2**32 - 1, len(name), len(extra), 0, 0, 0, 0, 2**32 - 1)  # fmt: skip
    central += name + extra
    at = len(local)
    end = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, len(central), at)
    end += struct.pack("<4sIQI", b"PK\6\7", 0, at + len(central), 1)
    end += struct.pack("<4sHHHHIIH", b"PK\5\6", 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF, 2**32 - 1,
                       2**32 - 1, 0)  # fmt: skip
    data = local + central + end
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None
    for options in ({}, {"axis": 0}):
        found = visited(open_format("npz", options), Held(data))
        np.testing.assert_array_equal(np.atleast_2d(found[-1][0]["x"])[-1], rows(50, 4)[-1])


def test_an_archive_behind_other_bytes() -> None:
    """As unzip and NumPy do, for archives that unpack themselves."""
    data = b"#!/bin/sh\n" * 9 + archive(x=rows(9, 2))
    for options in ({}, {"axis": 0}):
        found = visited(open_format("npz", options), Held(data))
        np.testing.assert_array_equal(np.atleast_2d(found[-1][0]["x"])[-1], rows(9, 2)[-1])


def test_a_directory_that_claims_to_be_long() -> None:
    data = bytes(3 << 20) + GOOD
    at = data.index(b"PK\5\6")
    data = data[: at + 12] + struct.pack("<II", 2 << 20, 0) + data[at + 20 :]
    held = Held(data)
    with pytest.raises(FormatError, match=r"^k: its zip directory claims 2,097,"):
        visited(open_format("npz", {"axis": 0}), held)
    assert fetched(held) < 5000


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :]


GOOD = zipped({"x.npy": npy(rows(9, 3)), "y.npy": npy(rows(9))})
CENTRAL = GOOD.index(b"PK\1\2")


def patched(offset: int, form: str, value: int, base: int = CENTRAL) -> bytes:
    data = bytearray(GOOD)
    struct.pack_into(form, data, base + offset, value)
    return bytes(data)


def same_place() -> bytes:
    second = GOOD.index(b"PK\1\2", CENTRAL + 4)
    return patched(42, "<I", 0, second)


def same_name() -> bytes:
    return GOOD.replace(b"y.npy", b"x.npy")


BAD = {
    "nothing": (b"", "expected an .npz archive"),
    "something else": (b"<html>" * 50, "starts with b'<html><h'"),
    "cut off": (GOOD[:-30], "cut off"),
    "without its start": (GOOD[40:], "one piece|damaged"),
    "no arrays": (zipped({"a.txt": b"text"}), "archive of arrays, found none"),
    "encrypted": (patched(8, "<H", 1), "x.npy of the archive is encrypted"),
    "another method": (patched(10, "<H", 12), "found x.npy of method 12"),
    "stored in fewer bytes": (patched(20, "<I", 5), "of method 0"),
    "two of a name": (same_name(), "same name"),
    "two in a place": (same_place(), "overlap"),
    "beyond the directory": (patched(42, "<I", CENTRAL + 5), "overlap"),
    "not where it should be": (patched(42, "<I", 2), "not where the zip directory says"),
    "a flipped bit": (flipped(GOOD, 200), "x.npy of the archive is damaged"),
    "a flipped checksum": (patched(16, "<I", 1), "x.npy of the archive is damaged"),
    "objects": (zipped({"x.npy": npy(np.array([{}], object))}), "x.npy: it has an array of Python objects"),
    "no array": (zipped({"x.npy": b"text" * 5}), "x.npy: expected an .npy file"),
    "too many": (zipped({f"{i}.npy": b"" for i in range(5000)}), "at most 4,096 arrays"),
    "less than promised": (
        zipped({"x.npy": npy(rows(9, 3))[:-8]}), "promises 236 bytes, the object has 228"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(name: str) -> None:
    data, words = BAD[name]
    with pytest.raises(FormatError, match=rf"^k: .*({words})"):
        visited(open_format("npz", {}), Held(data))
    if "flipped" not in name:  # ranges have no checksum of their own
        with pytest.raises(FormatError, match=r"^k: "):
            visited(open_format("npz", {"axis": 0}), Held(data))


def deflated(data: bytes) -> bytes:
    squeezing = zlib.compressobj(9, zlib.DEFLATED, -15)
    return squeezing.compress(data) + squeezing.flush()


@pytest.mark.parametrize(
    ("real", "said"), [(5 << 20, 1000), (1000, 1 << 31), (5 << 20, (5 << 20) - 1)]
)
def test_bombs(real: int, said: int) -> None:
    """However large it would come out, no more than was said is taken; nor what was said."""
    packed = deflated(bytes(real))
    local = struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 8, 0, 0, 0, 0, 0, 1, 0) + b"x" + packed
    member = ZipMember("x", 8, 0, len(packed), said, 0, len(local))
    tracemalloc.start()
    with pytest.raises(FormatError, match="x does not have the"):
        unpack_member(memoryview(local), member, "k")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * min(real, said) + 100_000
    damaged = ZipMember("x", 8, 0, len(packed) - 1, real, 0, len(local))
    with pytest.raises(FormatError, match="k: member x"):
        unpack_member(memoryview(flipped(local, 35)), damaged, "k")


def test_an_archive_that_says_it_is_too_large() -> None:
    data = bytearray(archive(packed=True, x=rows(30, 3)))
    at = data.index(b"PK\1\2")
    struct.pack_into("<I", data, at + 24, 2_000_000_000)
    with pytest.raises(FormatError, match=r"1,000,000,000 bytes, found 2,000,000,000"):
        visited(open_format("npz", {}), Held(bytes(data)))


def test_headers_of_members_may_be_long() -> None:
    array = rows(6, 3)
    header = npy(array, version=(2, 0))
    text = b"{'descr': '<f4', 'fortran_order': False, 'shape': (6, 3)}".ljust(4000) + b"\n"
    long = header[:8] + struct.pack("<I", len(text)) + text + array.tobytes()
    big = npy(rows(30_000, 3))
    held = Held(zipped({"x.npy": long, "other.npy": big}))
    found = visited(open_format("npz", {"axis": 0, "fields": ["x"]}), held)
    np.testing.assert_array_equal([row[0]["x"] for row in found], array)


def test_a_member_that_unpacks_to_far_more_than_its_array() -> None:
    with zipfile.ZipFile(file := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", npy(np.arange(4)) + bytes(1 << 21))
    with pytest.raises(
        FormatError, match="has an array of 32 bytes, and the zip directory says"
    ):
        visited(open_format("npz", {}), Held(file.getvalue()))
