"""Columns that are more than numbers and text, and those that the key says."""

from __future__ import annotations

import datetime
import io
import json
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from packaging.version import Version

from growcache.errors import ConfigError, FormatError
from growcache.formats import open_format
from growcache.formats.base import PartlyReadError
from tests.formats.held import Held, visited

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def held(table: Any, key: str = "k") -> Held:
    file = io.BytesIO()
    pq.write_table(pa.table(table), file)
    return Held(file.getvalue(), key)


def read(table: Any, key: str = "k", **options: Any) -> list[dict[str, Any]]:
    return [s for s, _, _ in visited(open_format("parquet", options), held(table, key))]


def plain(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {n: v if isinstance(v, str | bytes) else v.tolist() for n, v in one.items()}
        for one in samples
    ]


META = [{"author": "é", "at": {"x": 1, "y": 2.5}}, {"author": "b", "at": {"x": 3, "y": None}}]
AT = pa.struct({"x": pa.int64(), "y": pa.float64()})


def test_structs_are_flattened() -> None:
    table = {"meta": pa.array(META, pa.struct({"author": pa.string(), "at": AT})), "y": [1, 2]}
    first, second = read(table)
    assert list(first) == ["meta.author", "meta.at.x", "meta.at.y", "y"]
    assert plain([first])[0] == {"meta.author": "é", "meta.at.x": 1, "meta.at.y": 2.5, "y": 1}
    assert np.isnan(second["meta.at.y"])
    assert plain(read(table, columns=["y", "meta.at.x"])) == [
        {"y": 1, "meta.at.x": 1}, {"y": 2, "meta.at.x": 3},
    ]  # fmt: skip
    assert [json.loads(one["meta"]) for one in read(table, json=["meta"])] == META
    with pytest.raises(FormatError, match=r"expected one column 'meta\.at\.z'"):
        read(table, columns=["meta.at.z"])


def test_a_null_struct_is_null_in_all_of_its_fields() -> None:
    table = {"s": pa.array([{"a": 1, "f": 1.0}, None, {"a": None, "f": 2.0}])}
    with pytest.raises(PartlyReadError, match=r"column 's\.a' is null in row 1"):
        read(table)
    assert plain(read(table, nulls="drop")) == [{"s.a": 1, "s.f": 1.0}]
    assert len(read(table, columns=["s.f"])) == 3


def test_a_dotted_column_is_found_beside_a_struct_of_its_name() -> None:
    table = {"a": pa.array([{"b": 1, "c": 2}]), "a.b": pa.array([3])}
    assert plain(read(table, columns=["a.b", "a.c"])) == [{"a.b": 3, "a.c": 2}]
    with pytest.raises(FormatError, match=r"two columns would be the field 'a\.b'"):
        read(table)


@pytest.mark.parametrize("data", ["binary", "large_binary"])
def test_images_of_datasets_are_bytes(data: str) -> None:
    type_ = pa.struct({"bytes": getattr(pa, data)(), "path": pa.string()})
    images = pa.array([{"bytes": b"\x89PNG", "path": None}, {"bytes": b"", "path": "a"}], type_)
    table = {"image": images, "label": [1, 2]}
    assert [one["image"] for one in read(table)] == [b"\x89PNG", b""]
    assert list(read(table)[0]) == ["image", "label"]
    assert plain(read({"image": images[1:]}, columns=["image.path"])) == [{"image.path": "a"}]


CHATS = [[{"from": "user", "n": 1}], [], [{"from": "é", "n": None}, {"from": "b", "n": 2}]]


@pytest.mark.parametrize(
    ("values", "type_"),
    [
        ([["a", "é"], [], [None]], pa.list_(pa.string())),
        (CHATS, pa.list_(pa.struct({"from": pa.string(), "n": pa.int64()}))),
        ([{"a": 1}, {}, {"b": 2}], pa.map_(pa.string(), pa.int32())),
        ([["a", "b"]], pa.list_(pa.string(), 2)),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_array_is_json(values: list[Any], type_: Any) -> None:
    assert [json.loads(one["x"]) for one in read({"x": pa.array(values, type_)})] == values


def test_times_and_decimals_in_json_are_text() -> None:
    values = [{"d": datetime.date(2024, 1, 2), "n": Decimal("1.50")}]
    (found,) = read({"x": pa.array([values])})
    assert json.loads(found["x"]) == [{"d": "2024-01-02", "n": "1.50"}]


def test_lists_of_lists_are_arrays() -> None:
    even = [[[1, 2], [3, 4], [5, 6]], [], [[7, 8]]]
    found = read({"x": pa.array(even, pa.list_(pa.list_(pa.int16())))})
    assert [one["x"].tolist() for one in found] == even
    assert {one["x"].dtype.str for one in found} == {"<i2"}
    uneven = pa.array([[[1.0], [2.0]], [[1.0], [2.0, 3.0]]])
    with pytest.raises(
        PartlyReadError, match=r"lists of different lengths in row 1.*json: \[x\]"
    ):
        read({"x": uneven})
    assert json.loads(read({"x": uneven}, json=["x"])[1]["x"]) == [[1.0], [2.0, 3.0]]
    deep = np.arange(24.0).reshape(1, 2, 3, 4).tolist()
    np.testing.assert_array_equal(read({"x": pa.array(deep)})[0]["x"], deep[0])
    gone = pa.array([[[1], None], [[1], [2]], [[None], [1]], [[1], [2]]])
    assert len(read({"x": gone}, nulls="drop")) == 2
    if Version(pa.__version__) < Version("26"):
        return  # it cannot read null lists of a fixed length
    fixed = pa.array([[[1, 2]] * 2, None], pa.list_(pa.list_(pa.int8(), 2), 2))
    assert read({"x": fixed}, nulls="drop")[0]["x"].shape == (2, 2)


def test_decimals_are_numbers_or_text() -> None:
    x = pa.array([Decimal("1.50"), Decimal("-20.25")], pa.decimal128(6, 2))
    assert [float(one["x"]) for one in read({"x": x})] == [1.5, -20.25]
    assert [one["x"] for one in read({"x": x}, decimals="str")] == ["1.50", "-20.25"]
    lists = pa.array([[Decimal("1.5")], []], pa.list_(pa.decimal256(40, 2)))
    assert [one["x"].tolist() for one in read({"x": lists})] == [[1.5], []]


@pytest.mark.parametrize(
    ("key", "options", "expected"),
    [
        ("t/year=2024/month=03/p.parquet", {}, {"year": 2024, "month": 3}),
        ("t/region=eu%20west/p.parquet", {}, {"region": "eu west"}),
        ("t/day=2024-01-02/a=b.parquet", {}, {"day": "2024-01-02"}),
        ("t/n=-5/p.parquet", {"partitions": {"n": "int16"}}, {"n": -5}),
        ("t/n=05/p.parquet", {"partitions": {"n": "str"}}, {"n": "05"}),
        ("t/f=1.5/p.parquet", {"partitions": {"f": "float32"}}, {"f": 1.5}),
        ("t/n=1/p.parquet", {"partitions": False}, {}),
        ("t/x=1/p.parquet", {}, {}),  # the column of the file
        ("t/a=1/b=2/p.parquet", {"columns": ["b", "x"]}, {"b": 2}),
    ],
)
def test_what_a_key_says(key: str, options: dict[str, Any], expected: dict[str, Any]) -> None:
    (found,) = read({"x": [7]}, key, **options)
    assert plain([found])[0] == {"x": 7, **expected}
    for name, dtype in (options.get("partitions") or {}).items():
        assert dtype == "str" or found[name].dtype == dtype
    assert all(
        v.dtype == np.int64 for v in found.values() if not options and type(v) is not str
    )


@pytest.mark.parametrize(
    ("key", "options", "words"),
    [
        ("a=__HIVE_DEFAULT_PARTITION__/p", {}, "its key says that a is null; set nulls: drop"),
        ("a=b/p", {"partitions": {"a": "int64"}}, "its key has a=b, which is not int64"),
        ("p", {"partitions": {"a": "int64"}}, "expected a folder a=VALUE in the key"),
        ("a=1/p", {"columns": ["a"]}, "names only values from the key"),
        ("p", {"json": ["z"]}, "json names 'z', which is not read"),
    ],
)
def test_keys_that_say_something_else(key: str, options: Any, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        read({"x": [7]}, key, **options)
    assert not words.startswith("its key says") or not read({"x": [7]}, key, nulls="drop")


def test_a_cache_of_before_keeps_to_its_columns() -> None:
    """Its samples have nothing of the keys: every other one was a hole after the update."""
    for said in ("a=1/k", "a=__HIVE_DEFAULT_PARTITION__/k"):
        reader, one = open_format("parquet", {}), held({"x": [7]}, said)
        reader.follow_fields(["x"])
        ((sample, _, _),) = visited(reader, one)
        assert list(sample) == ["x"]
        reader.follow_fields(["a", "x"])
    ((sample, _, _),) = visited(reader, held({"x": [7]}, "a=1/b=2/k"))
    assert list(sample) == ["x", "a"]


def test_options_of_columns() -> None:
    for options, words in (
        ({"partitions": {"a": "int"}}, "true, false or a mapping"),
        ({"decimals": "float32"}, "expected float64 or str"),
        ({"json": "x"}, "a list of different names"),
    ):
        with pytest.raises(ConfigError, match=words):
            open_format("parquet", options)


def test_an_encrypted_file_says_so() -> None:
    data = held({"x": [1]}).data
    with pytest.raises(FormatError, match=r"^k: it is encrypted, and growcache takes no keys"):
        visited(open_format("parquet", {}), Held(data[:-4] + b"PARE"))


def test_a_row_of_many_values_is_no_json() -> None:
    table = {"x": pa.array([["a"] * 550_000])}
    with pytest.raises(
        FormatError, match=r"a row of about 3.*bytes, but one that becomes JSON"
    ):
        read(table)


def test_lists_that_repeat_a_value_are_counted_before_they_are_read() -> None:
    lists = pa.ListArray.from_arrays(pa.array([0, 9_000_000], pa.int32()), pa.nulls(9_000_000, pa.int64()))  # fmt: skip
    source = held({"x": lists})
    assert len(source.data) < 10_000
    with pytest.raises(
        FormatError, match=r"one visit may yield .*, and row group 0 has 72,000,000"
    ):
        visited(open_format("parquet", {}), source)
    assert sum((stop or 0) - start for start, stop in source.asked) <= 2 * len(source.data)
