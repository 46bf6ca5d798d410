"""Tables of labels: the types of cells, the row of a key, and files that are no tables."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from growcache.errors import FormatError
from growcache.sampling import label_table
from growcache.sampling.label_table import (
    NO_ROW,
    ColumnBuilder,
    KeyedTable,
    TextColumn,
    parse_table,
)

HAS_PARQUET = importlib.util.find_spec("pyarrow") is not None
LINES = 'path,subject,age\na.npy,anna,31\nb.npy,bert,\nc.npy,"c, d",7\n'


def table(data: str | bytes, *columns: str, kind: str = "csv", key: str = "path") -> KeyedTable:
    return parse_table(data if isinstance(data, bytes) else data.encode(), kind, key, columns)


def column(*cells: str) -> list[Any]:
    """The values of a CSV's cells, in order."""
    lines = "".join(f'{n},"{cell}"\n' for n, cell in enumerate(cells))
    found = table(f"k,x\n{lines}", "x", key="k")
    return [found.cell("x", int(row)) for row in found.find(list(map(str, range(len(cells)))))]


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["1", "-2", "0"], [1, -2, 0]),
        (["1", "2.5", "1e3", "-.5", "inf"], [1.0, 2.5, 1000.0, -0.5, np.inf]),
        (["1", "", "3"], [1.0, np.nan, 3.0]),
        (["1", "n/a", "NaN", "NA", "2"], [1.0, np.nan, np.nan, np.nan, 2.0]),
        (["007", "1"], ["007", "1"]),
        (["1", "1_000"], ["1", "1_000"]),
        (["9" * 19, "1"], [float("9" * 19), 1.0]),
        (["a", "", "n/a"], ["a", "", "n/a"]),
        (["", ""], ["", ""]),
        (["ä\x00b", "c\nd"], ["ä\x00b", "c\nd"]),
        (["\u0661", "1"], ["\u0661", "1"]),
    ],
)
def test_all_cells_say_what_a_column_is(cells: list[str], expected: list[Any]) -> None:
    found = column(*cells)
    assert [type(cell) for cell in found] == [type(cell) for cell in expected]
    np.testing.assert_equal(found, expected)


def values(found: KeyedTable, keys: str = "abc") -> list[list[Any]]:
    rows = found.find([f"{key}.npy" for key in keys]).tolist()
    return [[found.cell(name, row) for name in ("subject", "age")] for row in rows]


ROWS = [["anna", 31.0], ["bert", np.nan], ["c, d", 7.0]]


def parquet(values: dict[str, list[Any]]) -> bytes:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = io.BytesIO()
    parquet.write_table(pa.table(values), file)
    return file.getvalue()


def in_every_kind() -> dict[str, bytes]:
    names = ("path", "subject", "age")
    cells: list[list[Any]] = [
        ["a.npy", "anna", 31],
        ["b.npy", "bert", None],
        ["c.npy", "c, d", 7],
    ]
    rows = [dict(zip(names, row, strict=True)) for row in cells]
    lines = "\n".join(json.dumps(row) for row in rows).encode()
    found = {
        "csv": LINES.encode("utf-8-sig"),
        "csv.gz": gzip.compress(LINES.replace("\n", "\r\n").encode()),
        "tsv": LINES.replace(",", "\t").replace("c\t", "c,").encode(),
        "jsonl": lines.replace(b', "age": null', b""),
        "jsonl.gz": gzip.compress(lines + b"\n\n"),
    }
    if HAS_PARQUET:
        columns = zip(*cells, strict=True)
        found["parquet"] = parquet(dict(zip(names, map(list, columns), strict=True)))
    return found


def test_the_same_table_in_every_kind_of_file_is_one() -> None:
    tables = {k: table(v, "subject", "age", kind=k) for k, v in in_every_kind().items()}
    for found in tables.values():
        np.testing.assert_equal(values(found), ROWS)
    assert len({found.digest for found in tables.values()}) == 1


@pytest.mark.parametrize(
    ("was", "becomes", "same"),
    [
        ("a.npy,anna,31\nb.npy,bert,\n", "b.npy,bert,\na.npy,anna,31\n", True),
        ("anna", "anne", False),
        ("31", "31.5", False),
        ("a.npy,anna", "a2.npy,anna", False),
        ("bert,\n", "bert,0\n", False),
        ("c.npy,", "d.npy,x,1\nc.npy,", False),
        ("path", "key", None),
    ],
)
def test_the_digest_is_of_rows_whatever_their_order(
    was: str, becomes: str, same: bool | None
) -> None:
    changed = LINES.replace(was, becomes)
    found = table(changed, "subject", "age", key="key" if same is None else "path")
    assert (found.digest == table(LINES, "subject", "age").digest) is (same is not False)


def test_other_columns_do_not_matter() -> None:
    more = "note," + LINES.replace("\n", "\n1,").removesuffix("1,")
    assert table(more, "age").digest == table(LINES, "age").digest
    assert table(LINES, "age").digest != table(LINES, "subject").digest


@settings(max_examples=40)
@given(st.dictionaries(st.text(min_size=1), st.text(), min_size=1), st.lists(st.text()))
def test_a_key_finds_its_row_and_no_other(rows: dict[str, str], others: list[str]) -> None:
    keys, texts = ColumnBuilder(), ColumnBuilder()
    keys.add_texts(list(rows))
    texts.add_values(list(rows.values()))
    made = KeyedTable(keys, {"x": texts})
    asked = [*rows, *others]
    for key, row in zip(asked, made.find(asked).tolist(), strict=True):
        assert (row != NO_ROW) == (key in rows)
        assert row == NO_ROW or made.cell("x", row) == rows[key]


def test_a_row_costs_tens_of_bytes() -> None:
    count = 30_000
    lines = [f"sub-{n // 50}/run-{n:06}.npy,sub-{n // 50},{n % 3}" for n in range(count)]
    found = table("path,subject,state\n" + "\n".join(lines), "subject", "state")
    assert found.nbytes < 40 * count
    assert isinstance(found.column("subject"), TextColumn)


BAD = [
    ("csv", "", "no column 'path'; it has "),
    ("csv", "path,subject\n", "no column 'age'; it has 'path', 'subject'"),
    ("csv", "path,Subject,age\na,b,1\n", "no column 'subject'; did you mean 'Subject'"),
    ("csv", "path;subject;age\na;b;1\n", "no column 'path'.*commas in .csv, by tabs in .tsv"),
    ("csv", "path,subject,age,age\na,b,1,1\n", "two columns 'age'"),
    ("csv", "path,subject,age\n", "it has no rows"),
    ("csv", LINES + "a.npy,x,1\n", "two rows have the key 'a.npy'"),
    ("csv", LINES + "d.npy,x\n", "line 5: expected 3 cells, as in the first line, found 2"),
    ("csv", LINES + ",x,1\n", "line 5: its key is empty"),
    ("csv", LINES.encode() + b"\xff\xfe,x,1\n", "expected UTF-8"),
    ("csv", LINES + "x" * 200_000 + ",y,1\n", "line 5: field larger than field limit"),
    ("csv.gz", LINES, "its .gz is damaged: Not a gzipped file"),
    # Without the time, because this text is part of the tests' names, which workers compare.
    ("csv.gz", gzip.compress(LINES.encode(), mtime=0)[:-9], "its .gz is damaged"),
    ("jsonl", "[1]\n", r"line 1: expected an object, found b'\[1\]"),
    ("jsonl", '{"path": "a"\n', "line 1: expected JSON"),
    ("jsonl", '{"path": "a"}\n\n{"path": null}\n', "line 3: it has no 'path'"),
    ("jsonl", '{"path": "a", "subject": 1}\n', "no column 'age'; it has 'path', 'subject'"),
    ("jsonl", '{"path": 1, "subject": [1], "age": 1}\n', "column 'subject': .* found list"),
    ("jsonl", "", "it has no rows"),
    ("parquet", "no", "expected Parquet"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "data", "words"), BAD)
def test_what_is_no_table_is_told_with_its_place(
    kind: str, data: str | bytes, words: str
) -> None:
    if kind == "parquet" and not HAS_PARQUET:
        pytest.skip("needs pyarrow")
    with pytest.raises(FormatError, match=words):
        table(data, "subject", "age", kind=kind)


def test_a_table_is_bounded_unpacked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_table, "MOST_TABLE_BYTES", 1_000_000)
    bomb = gzip.compress(LINES.encode() + b"x.npy,1,2\n" * 200_000)
    assert len(bomb) < 100_000
    with pytest.raises(FormatError, match="at most 1,000,000 bytes, found more, unpacked"):
        table(bomb, "subject", kind="csv.gz")


def test_cells_of_parquet_that_are_no_labels() -> None:
    import datetime

    when = [datetime.datetime(2026, 1, 1)]
    with pytest.raises(FormatError, match="column 'when': expected numbers and texts"):
        table(parquet({"path": ["a"], "when": when}), "when", kind="parquet")
    with pytest.raises(FormatError, match=r"row 1 or a later one has no 'path'"):
        table(parquet({"path": [None], "x": [1]}), "x", kind="parquet")
    made = table(parquet({"path": [1], "x": [True]}), "x", kind="parquet")
    assert made.cell("x", int(made.find(["1"])[0])) == 1
