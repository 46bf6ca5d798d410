"""Records, times, text and small floats in .npy and .npz: what NumPy writes, value by value."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.errors import ConfigError, FormatError
from growcache.formats import open_format
from growcache.formats.npy_dtypes import parse_descr
from tests.formats.held import Held, visited

ml_dtypes = pytest.importorskip("ml_dtypes")

RECORD = np.dtype(
    [
        ("x", ">f4"),
        ("name", "<U5"),
        ("raw", "S3"),
        ("at", "M8[ns]"),
        ("inner", [("n", "<i2"), ("pair", "<f8", (2,))], (3,)),
    ]
)


def records(count: int = 6) -> Any:
    found = np.zeros(count, RECORD)
    found["x"] = np.arange(count) / 2
    found["name"] = [f"é{n}" for n in range(count)]
    found["raw"] = [b"%d" % n for n in range(count)]
    found["at"] = np.arange(count).astype("M8[ns]") + np.timedelta64(5, "s")
    found["inner"]["n"] = np.arange(3 * count).reshape(count, 3)
    found["inner"]["pair"] = np.arange(6 * count).reshape(count, 3, 2)
    return found


def npy(array: Any) -> Held:
    file = io.BytesIO()
    np.save(file, array)
    return Held(file.getvalue())


def read(array: Any, **options: Any) -> list[Mapping[str, Any]]:
    return [sample for sample, _, _ in visited(open_format("npy", options), npy(array))]


def test_rows_of_records_are_samples_of_their_fields() -> None:
    array = records()
    found = read(array, axis=0)
    assert len(found) == len(array)
    for sample, row in zip(found, array, strict=True):
        assert list(sample) == ["x", "name", "raw", "at", "inner.n", "inner.pair"]
        assert (sample["name"], sample["raw"]) == (str(row["name"]), bytes(row["raw"]))
        assert (sample["x"].dtype.str, sample["x"].shape, sample["x"]) == ("<f4", (), row["x"])
        assert (sample["at"].dtype.str, int(sample["at"])) == (
            "<i8",
            int(row["at"].astype("i8")),
        )
        np.testing.assert_array_equal(sample["inner.n"], row["inner"]["n"])
        np.testing.assert_array_equal(sample["inner.pair"], row["inner"]["pair"])
        assert sample["inner.pair"].flags.c_contiguous


def test_windows_and_whole_arrays_of_records() -> None:
    array = records()
    found = read(array, window=2, fields=["x", "inner"])
    assert [one["x"].tolist() for one in found] == array["x"].reshape(3, 2).tolist()
    assert found[1]["inner.pair"].shape == (2, 3, 2)
    (whole,) = read(array, fields=["at"])
    np.testing.assert_array_equal(whole["at"], array["at"].astype("i8"))
    with pytest.raises(FormatError, match=r"^k: name is text of shape \[6\].*axis: 0 without"):
        read(array)
    with pytest.raises(
        FormatError, match="expected a field 'z', found x, name, raw, at, inner"
    ):
        read(array, fields=["z"])


def test_records_with_padding_are_read_by_range() -> None:
    aligned = np.zeros(5000, np.dtype([("a", "i1"), ("b", "f8")], align=True))
    aligned["b"] = np.arange(5000)
    held = npy(aligned)
    found = visited(open_format("npy", {"window": 10}), held, 3, 500)
    assert [s["b"].tolist() for s, _, _ in found] == [list(range(30, 40))]
    assert sum((stop or 0) - start for start, stop in held.asked) < 2000


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).astype("M8[D]"),
        np.array(["NaT", "2024-01-02"], "M8[us]"),
        np.arange(6).astype(">m8[25s]"),
    ],
    ids=str,
)
def test_times_are_integers_in_their_unit(array: npt.NDArray[Any]) -> None:
    (whole,) = read(array)
    assert (whole["x"].dtype.str, whole["x"].tolist()) == ("<i8", array.astype("i8").tolist())
    assert [int(one["x"]) for one in read(array, axis=0)] == array.astype("i8").tolist()


def test_rows_of_text() -> None:
    assert [one["x"] for one in read(np.array(["é", "bc"]), axis=0)] == ["é", "bc"]
    assert [one["x"] for one in read(np.array([b"a", b"bc"]), axis=0)] == [b"a", b"bc"]
    assert read(np.array("é")) == [{"x": "é"}]
    bad = npy(np.array(["a", "b"]))
    bad.data = bad.data[:-1] + b"\xff"
    with pytest.raises(FormatError, match=r"^k: x is text that is not valid Unicode"):
        visited(open_format("npy", {"axis": 0}), bad)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_small_floats_are_widened_without_loss(name: str) -> None:
    dtype = getattr(ml_dtypes, name)
    codes = np.arange(1 << 8 * dtype(0).itemsize, dtype=f"u{dtype(0).itemsize}").reshape(16, -1)
    values = codes.view(dtype)
    (found,) = read(values, dtype=name)
    assert found["x"].dtype == (np.float32 if name == "bfloat16" else np.float16)
    np.testing.assert_array_equal(found["x"], values.astype(found["x"].dtype))
    assert len(read(values, dtype=name, axis=0)) == 16
    with pytest.raises(FormatError, match="NumPy stores bfloat16 and float8 this way; set"):
        read(values)
    other = "float8_e5m2" if name == "bfloat16" else "bfloat16"
    with pytest.raises(
        FormatError, match=f"source.options.dtype is {other}, and the array has"
    ):
        read(values, dtype=other)


def test_arrays_of_an_archive_have_fields_of_their_name() -> None:
    file = io.BytesIO()
    np.savez(file, r=records(), t=np.arange(6).astype("M8[s]"), y=np.arange(6))
    held = Held(file.getvalue())
    for options in ({"axis": 0}, {"axis": 0, "read": "whole"}):
        found = visited(open_format("npz", options), held)
        assert [sample["r.name"] for sample, _, _ in found] == [f"é{n}" for n in range(6)]
        assert list(found[2][0])[-2:] == ["t", "y"]
        assert int(found[2][0]["t"]) == 2
        assert found[2][0]["r.inner.n"].tolist() == [6, 7, 8]


_LEAVES = st.sampled_from(["<f4", ">i2", "|b1", "<U3", "|S2", "<M8[ms]", "<c8"])
_DTYPES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(
        st.tuples(inner, st.lists(st.integers(0, 3), max_size=2)), min_size=1, max_size=4
    ).map(lambda kinds: [(f"f{n}", kind, tuple(size)) for n, (kind, size) in enumerate(kinds)]),
    max_leaves=8,
)


@given(_DTYPES)
def test_a_header_says_the_dtype_that_was_written(kind: Any) -> None:
    dtype = np.dtype(kind)
    descr = np.lib.format.dtype_to_descr(dtype)
    found = parse_descr(repr(descr))
    assert (found[0] if dtype.kind == "U" else found) == dtype


@pytest.mark.parametrize(
    "descr",
    [
        "[]", "[(", "[('a')]", "[('a', '<f4'), ('a', '<f4')]", "[('a', '|O')]", "[('a', '<f4', (99999999,))]",
        "[('a', '<f4', (-1,))]", "[('a', '<V4')]", "[('', '<f4')]", "[('a', '<f4')]x", "[('a', f)]", "'<U99999999'",
        "'<f3'", "'|V3'", "[" * 5000, "[('a', " * 900 + "'<f4'" + ")]" * 900,
    ],
)  # fmt: skip
def test_dtypes_that_are_refused(descr: str) -> None:
    with pytest.raises(FormatError):
        parse_descr(descr)


def test_an_option_that_is_no_dtype() -> None:
    with pytest.raises(ConfigError, match="expected bfloat16 or float8_e4m3fn or float8_e5m2"):
        open_format("npy", {"dtype": "float8"})
