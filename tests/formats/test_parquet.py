from __future__ import annotations

import asyncio
import datetime
import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from growcache.errors import FormatError
from growcache.formats import open_format
from growcache.formats.base import PartlyReadError, Visit
from tests.formats.held import Held, Row, visited

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS = 200
TABLE = pa.table(
    {
        "int": pa.array(range(ROWS), pa.int32()),
        "unsigned": pa.array(range(ROWS), pa.uint8()),
        "bool": [n % 3 == 0 for n in range(ROWS)],
        "half": pa.array(np.arange(ROWS).astype("f2")),
        "text": [f"é{n}" for n in range(ROWS)],
        "large": pa.array([f"{n}" for n in range(ROWS)], pa.large_string()),
        "binary": [bytes([n]) * (n % 5) for n in range(ROWS)],
        "three": pa.array([b"%03d" % n for n in range(ROWS)], pa.binary(3)),
        "fixed": pa.array([[n, n + 1] for n in range(ROWS)], pa.list_(pa.float32(), 2)),
        "list": pa.array([list(range(n % 4)) for n in range(ROWS)], pa.list_(pa.int16())),
        "pairs": pa.array(
            [[[n, 1]] * (n % 3) for n in range(ROWS)], pa.list_(pa.list_(pa.int64(), 2))
        ),
        "category": pa.array(["ab"[n % 2] for n in range(ROWS)]).dictionary_encode(),
    }
)


def parquet(table: Any = TABLE, **settings: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file, **settings)
    return file.getvalue()


def rows(table: Any, **options: Any) -> list[Row]:
    return visited(open_format("parquet", options), Held(parquet(table, row_group_size=7)))


def column(values: list[Any], type_: Any, **options: Any) -> list[Any]:
    return [s["x"] for s, _, _ in rows(pa.table({"x": pa.array(values, type_)}), **options)]


@pytest.mark.parametrize(
    "written",
    [
        {"row_group_size": 30},
        {"compression": "zstd"},
        {"row_group_size": 64, "data_page_version": "2.0", "compression": "gzip"},
        {"use_dictionary": False, "data_page_size": 100},
        {"row_group_size": 50, "use_byte_stream_split": ["fixed"], "use_dictionary": False},
    ],
)
def test_every_row_and_kind_of_column(written: dict[str, Any]) -> None:
    found = visited(open_format("parquet", {}), Held(parquet(**written)))
    assert [(start, stop) for _, start, stop in found] == [(n, n + 1) for n in range(ROWS)]
    dtypes = {"int": "<i4", "unsigned": "|u1", "bool": "|b1", "half": "<f2"}
    for sample, at, _ in found:
        for name, value in sample.items():
            expected = TABLE[name][at].as_py()
            if isinstance(expected, bytes | str):
                assert value == expected
                assert type(value) is type(expected)
            else:
                np.testing.assert_array_equal(value, np.array(expected).reshape(value.shape))
        assert {name: sample[name].dtype.str for name in dtypes} == dtypes
        assert (sample["fixed"].dtype.str, sample["list"].dtype.str) == ("<f4", "<i2")
        assert sample["pairs"].shape == (at % 3, 2)


def test_times_are_integers_in_the_unit_of_the_column() -> None:
    day = datetime.date(2020, 1, 2)
    (x,) = column([day], pa.date32())
    assert (x.dtype.str, int(x)) == ("<i4", 18263)
    for unit, per_second in (("s", 1), ("ms", 1000), ("us", 10**6), ("ns", 10**9)):
        moment = datetime.datetime(2020, 1, 2)
        (x,) = column([moment], pa.timestamp(unit))
        assert x.dtype.str == "<i8"
        assert int(x) == 18263 * 86400 * (
            per_second if unit != "s" else 1000 if x > 1e11 else 1
        )


def test_null_is_nan_or_no_row() -> None:
    assert np.isnan(column([1.0, None], pa.float32())[1])
    assert np.isnan(column([[1.0, None]], pa.list_(pa.float64()))[0][1])
    for values, type_ in (
        ([1, None], pa.int64()), ([True, None], pa.bool_()), (["a", None], pa.string()),
        ([[1], None], pa.list_(pa.int8())), ([[1], [None]], pa.list_(pa.int8())),
        ([[1, 2], [3, None]], pa.list_(pa.int8(), 2)),
    ):  # fmt: skip
        with pytest.raises(
            PartlyReadError, match=r"^k: column 'x' is null in row 1.*nulls: drop"
        ) as partly:
            column(values, type_)
        assert [start for _, start, _ in partly.value.found] == [0]
        assert len(column(values, type_, nulls="drop")) == 1


def test_rows_that_are_left_out_keep_the_others_where_they_are() -> None:
    table = pa.table({"x": pa.array([None if n % 3 else n for n in range(50)], pa.int64())})
    found = rows(table, nulls="drop")
    assert (
        [int(s["x"]) for s, _, _ in found] == [a for _, a, _ in found] == list(range(0, 50, 3))
    )


def test_columns_that_have_no_place_in_a_sample() -> None:
    for value, type_ in (
        ([[(1, 1)]], pa.map_(pa.int8(), pa.int8())), ([[b"a"]], pa.list_(pa.binary())),
        ([None], pa.null()), ([[{"a": b"b"}]], pa.list_(pa.struct({"a": pa.binary()}))),
    ):  # fmt: skip
        table = pa.table({"x": pa.array(value, type_), "y": [1]})
        with pytest.raises(FormatError, match=r"^k: column 'x' has type"):
            rows(table)
        assert int(rows(table, columns=["y"])[0][0]["y"]) == 1


def test_columns_beside_structs_are_found() -> None:
    table = pa.table(
        {
            "a.b": [1, 2],
            "s": pa.array([{"a": {"b": 1}, "c": [1]}] * 2),
            "l": [[1], [2, 3]],
            "y": [5, 6],
        }
    )
    found = rows(table, columns=["l", "y", "a.b"])
    assert [int(s["y"]) for s, _, _ in found] == [5, 6]
    assert found[1][0]["l"].tolist() == [2, 3]
    assert int(found[1][0]["a.b"]) == 2


@settings(max_examples=40)
@given(st.integers(0, 60), st.integers(1, 25), st.integers(1, 9), st.integers(0, 70))
def test_every_row_is_in_one_part(count: int, group: int, parts: int, take: int) -> None:
    held = Held(
        parquet(pa.table({"x": pa.array(range(count), pa.int64())}), row_group_size=group)
    )
    object_format = open_format("parquet", {})
    found = [row for part in range(parts) for row in visited(object_format, held, part, parts)]
    assert [int(s["x"]) for s, _, _ in found] == [a for _, a, _ in found] == list(range(count))
    few = [a for _, a, _ in visited(object_format, held, take=take)]
    assert few == sorted(set(few))
    assert len(few) == min(count, take)
    assert len({a // group for a in few}) <= -(-take // group) + 1


def test_what_a_visit_reads() -> None:
    """The footer once, then the wanted columns of a row group."""
    noise = np.random.default_rng(0).random(100_000)
    table = pa.table({"x": noise, "other": noise, "y": noise})
    held = Held(parquet(table, row_group_size=5000, use_dictionary=False))
    object_format = open_format("parquet", {"columns": ["x", "y"]})
    measure = asyncio.run(object_format.measure(held))
    assert (measure.samples, measure.together) == (100_000, 5000)
    assert len(held.asked) == 1
    held.asked.clear()
    metadata = pq.read_metadata(io.BytesIO(held.data))
    for part in (3, 7):
        assert len(visited(object_format, held, part, 20)) == 5000
    read = sum((stop or 0) - start for start, stop in held.asked)
    stored = sum(
        metadata.row_group(g).column(c).total_compressed_size for g in (3, 7) for c in (0, 2)
    )
    assert read <= 1.1 * stored
    assert len(held.asked) == 4


def test_a_long_footer_is_read_twice() -> None:
    held = Held(
        parquet(pa.table({f"column {n:04}": [1.5] * 40 for n in range(60)}), row_group_size=1)
    )
    object_format = open_format("parquet", {"columns": ["column 0007"]})
    assert float(visited(object_format, held, 39, 40)[0][0]["column 0007"]) == 1.5
    assert len(held.asked) == 3


def test_visits_side_by_side_read_a_footer_once() -> None:
    held = Held(parquet(pa.table({"x": np.arange(80_000.0)}), row_group_size=10_000))
    object_format = open_format("parquet", {})

    async def visits() -> None:
        await asyncio.gather(
            *(object_format.read(held, Visit(part, 8, 0, 0)) for part in range(8))
        )

    asyncio.run(visits())
    assert len(held.asked) == 9


def test_how_long_footers_are_is_learnt() -> None:
    object_format = open_format("parquet", {})
    wide = pa.table({f"column {n:04}": [1.5] * 40 for n in range(60)})
    for table, settings_, most in ((TABLE, {}, 6_000), (wide, {"row_group_size": 1}, 400_000)):
        data = parquet(table, **settings_)
        footer = int.from_bytes(data[-8:-4], "little") + 8
        for n in range(6):
            held = Held(data, f"k{n}")
            asyncio.run(object_format.measure(held))
        assert len(held.asked) == 1
        assert footer <= held.entry.size - held.asked[0][0] <= max(most, footer * 5 // 4)


def test_columns_by_name() -> None:
    with pytest.raises(
        FormatError, match=r"^k: expected one column 'txt'; did you mean 'text'"
    ):
        rows(TABLE, columns=["txt"])


def test_a_long_value_that_many_rows_share_is_counted() -> None:
    table = pa.table({"x": pa.array(["a" * 100_000] * 800).dictionary_encode()})
    data = parquet(table)
    with pytest.raises(FormatError, match=r"^k: one visit may yield .* found more"):
        visited(open_format("parquet", {}), Held(data))
    assert len(visited(open_format("parquet", {}), Held(data), 1, 80)) == 10


def test_a_damaged_page_is_a_hole() -> None:
    data = bytearray(parquet(compression="gzip"))
    data[60:90] = bytes(30)
    with pytest.raises(FormatError, match=r"^k: cannot be read as Parquet"):
        visited(open_format("parquet", {}), Held(bytes(data)))
