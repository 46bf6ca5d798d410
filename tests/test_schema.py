"""What can be a sample, and what fits a schema whose dimensions differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from growcache.errors import FormatError
from growcache.schema import Field, Schema, sample_bytes

RAGGED = Schema.declared(
    {"x": ["float32", None, 3], "note": "str", "data": "bytes", "y": "int8"}
)


def test_what_is_found_is_fixed_but_for_bytes_and_text() -> None:
    sample = {
        "b": b"ab",
        "nb": np.bytes_(b"ab"),
        "nb0": np.array(b"ab"),
        "s": "ä",
        "ns": np.str_("ä"),
        "ns0": np.array("ä"),
        "x": np.zeros((2, 0, 3), ">f4"),
        "y": True,
    }
    found = Schema.from_sample(sample)
    assert str(found) == (
        "b: bytes, nb: bytes, nb0: bytes, ns: str, ns0: str, s: str, "
        "x: float32[2, 0, 3], y: bool[]"
    )
    plain = found.conform(sample)
    assert [type(plain[name]) for name in ("b", "nb", "nb0")] == [bytes] * 3
    assert [type(plain[name]) for name in ("s", "ns", "ns0")] == [str] * 3
    assert plain["x"].dtype.str == "<f4"
    assert found.conform(plain) == plain
    assert sample_bytes(plain) == 3 * 2 + 3 * 2 + 1


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        ({}, "non-empty dict"),
        ([1], "non-empty dict of arrays, found list"),
        ({1: 2}, "names .* must be strings, found 1"),
        ({"": 2}, "must be strings, found ''"),
        ({1: 2, "a": 3}, "must be strings, found 1"),
        ({"x": np.array([b"a", b"b"])}, "has dtype |S1"),
        ({"x": ["a", "b"]}, "has dtype <U1"),
        ({"x": np.array([None])}, "has dtype object"),
        ({"x": None}, "has dtype object"),
        ({"x": np.zeros(2, [("a", "i4")])}, "has dtype"),
        ({"x": np.zeros(2, "M8[s]")}, "has dtype datetime64"),
        ({"x": "\ud800"}, "not valid Unicode; cache it as bytes"),
    ],
)
def test_what_no_sample_is(sample: Any, expected: str) -> None:
    with pytest.raises(FormatError, match=expected.replace("|", r"\|")):
        Schema.from_sample(sample)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"x": np.zeros((2, 4), "<f4")}, r"x: float32\[2, 4\]"),
        ({"x": np.zeros(6, "<f4")}, r"x: float32\[6\]"),
        ({"x": np.zeros((2, 3), "<f8")}, r"x: float64\[2, 3\]"),
        ({"note": b"bytes"}, "note: bytes"),
        ({"note": "\ud800"}, "not valid Unicode"),
        ({"data": np.zeros(3, "|u1")}, r"data: uint8\[3\]"),
        ({"y": np.zeros(1, "|i1")}, r"y: int8\[1\]"),
        ({"more": 1}, "more: int64"),
    ],
)
def test_a_sample_that_does_not_fit_is_refused(change: dict[str, Any], found: str) -> None:
    fitting: dict[str, Any] = {
        "x": np.zeros((5, 3), "<f4"),
        "note": "",
        "data": b"",
        "y": np.int8(1),
    }
    assert list(RAGGED.conform(fitting)) == ["data", "note", "x", "y"]
    with pytest.raises(FormatError, match=found):
        RAGGED.conform(fitting | change)


def test_an_empty_list_is_a_value_without_items_of_a_ragged_field() -> None:
    schema = Schema((Field("boxes", "<i8", (None, 4)), Field("x", "<f8", ())))
    conformed = schema.conform({"boxes": np.asarray([]), "x": np.asarray(1.0)})
    assert (conformed["boxes"].dtype, conformed["boxes"].shape) == ("<i8", (0, 4))
    fixed = Schema((Field("boxes", "<i8", (2, 4)),))
    for wrong in (np.empty(0, "<f4"), np.empty((0, 3), "<f8")):
        with pytest.raises(FormatError, match="expected a sample with"):
            schema.conform({"boxes": wrong, "x": np.asarray(1.0)})
    with pytest.raises(FormatError, match="expected a sample with"):
        fixed.conform({"boxes": np.asarray([])})


def test_a_covering_schema_is_ragged_where_samples_differ() -> None:
    shapes = [(3, 8), (5, 8), (3, 8)]
    schemas = [Schema.from_sample({"n": "x" * n, "x": np.zeros((n, m))}) for n, m in shapes]
    covering = Schema.covering(schemas)
    assert str(covering) == "n: str, x: float64[?, 8]"
    assert all(covering.allows(schema) for schema in schemas)
    assert Schema.covering([covering, *schemas]) == covering
    assert Schema.covering(schemas[:1]) == schemas[0]
    assert not schemas[0].allows(covering)


@pytest.mark.parametrize(
    "other", [{"x": np.zeros(3)}, {"x": np.zeros((3, 8), "<f4")}, {"y": np.zeros((3, 8))}]
)
def test_schemas_that_differ_in_more_have_none(other: Any) -> None:
    with pytest.raises(FormatError, match="cannot be in one cache"):
        Schema.covering(
            [Schema.from_sample({"x": np.zeros((3, 8))}), Schema.from_sample(other)]
        )


def test_a_schema_comes_back_from_json() -> None:
    assert Schema.from_json(RAGGED.to_json()) == RAGGED
    assert ["x", "<f4", [None, 3]] in RAGGED.to_json()


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ({}, "at least one field"),
        ({"x": ["float33", 3]}, "x: expected bytes, str or a dtype; did you mean float32"),
        ({"x": ["float32", -1]}, "x: dimensions are integers"),
        ({"x": ["float32", 1.5]}, "x: dimensions are integers"),
        ({"x": ["float32", True]}, "x: dimensions are integers"),
        ({"x": ["bytes", 3]}, "x: bytes has no dimensions"),
        ({"x": "object"}, "x: expected bytes, str or a dtype"),
        ({1: "int8"}, "must be strings, found 1"),
    ],
)
def test_what_cannot_be_declared(what: Any, expected: str) -> None:
    with pytest.raises(FormatError, match=expected):
        Schema.declared(what)


def test_a_ragged_field_keeps_the_names_that_batches_need() -> None:
    for end in ("_offsets", "_shapes", "_lengths"):
        Schema.from_sample({"x": np.zeros(3), f"x{end}": np.zeros(3)})
        with pytest.raises(FormatError, match=f"need the name 'x{end}'"):
            Schema.declared({"x": ["float32", None], f"x{end}": "int8"})


def test_what_has_no_one_size_says_so() -> None:
    for ask in (
        lambda: RAGGED.nbytes,
        lambda: RAGGED["x"].nbytes,
        lambda: RAGGED["note"].fixed_shape,
    ):
        with pytest.raises(ValueError, match="is ragged"):
            ask()
    x = Field("x", "<f4", (None, 3, None))
    assert (x.ragged_dims, x.unit_bytes, x.shape_of((5, 7))) == ((0, 2), 12, (5, 3, 7))
    assert RAGGED["note"].ragged_dims == (0,)
