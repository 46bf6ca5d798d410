"""Parquet files of pandas, polars, DuckDB, pyarrow and datasets."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from tests.matrix.case import Case, Place, Values

ROWS = 12


def _lib(name: str) -> Any:
    """Import what is untyped, and may be missing where cases are only listed."""
    return import_module(name)


def _frame(first: int = 0) -> dict[str, Any]:
    n = np.arange(first, first + ROWS)
    return {
        "n": n,
        "f": (n / 4).astype("f4"),
        "text": [f"é{i}" for i in n.tolist()],
        "even": n % 2 == 0,
        "when": np.datetime64("2024-01-02T03:04:05", "us") + n,
        "tags": [["a", "b"][: i % 3] for i in n.tolist()],
        "nested": [{"a": i, "b": {"c": i / 2}} for i in n.tolist()],
    }


# ------------------------------------------------------------------------------- writers


def write_pandas(folder: Path, **settings: Any) -> None:
    pd = _lib("pandas")
    for i in range(2):
        frame = pd.DataFrame(_frame(i))
        frame["kind"] = pd.Categorical(np.where(frame["even"], "yes", "no"))
        frame["small"] = pd.Categorical(frame["n"] % 3)
        frame.to_parquet(folder / f"{i}.parquet", **settings)


def write_polars(folder: Path, **settings: Any) -> None:
    pl = _lib("polars")
    for i in range(2):
        frame = pl.DataFrame(_frame(i)).with_columns(
            pl.col("text").cast(pl.Categorical).alias("kind"),
            pl.col("n").cast(pl.Decimal(10, 2)).alias("price"),
            pl.col("when").dt.date().alias("day"),
            pl.concat_list("n", "n").list.to_array(2).alias("pair"),
        )
        frame.write_parquet(folder / f"{i}.parquet", **settings)


def write_duckdb(folder: Path, options: str = "", what: str = "*") -> None:
    query = (
        "SELECT i AS n, (i / 4)::FLOAT AS f, 'é' || i AS text, i % 2 = 0 AS even, (i * 1.25)::DECIMAL(9, 2) AS price, "
        "DATE '2024-01-02' + i::INTEGER AS day, [i, i + 1][: (i % 3)] AS numbers, ['a', 'b'] AS tags, "
        "{'a': i, 'b': {'c': i / 2}} AS nested, MAP {'k': i} AS pairs, i % 3 AS part, 'p' || (i % 2) AS side "
        "FROM range(24) t(i)"
    )
    target = folder / "out.parquet" if not options else folder
    extra = ", " + options if options else ""
    _lib("duckdb").sql(
        f"COPY (SELECT {what} FROM ({query})) TO '{target}' (FORMAT parquet{extra})"
    )


def write_hive(folder: Path) -> None:
    pa, ds = _lib("pyarrow"), _lib("pyarrow.dataset")
    n = np.arange(24)
    table = pa.table(
        {"n": n, "year": 2020 + n % 2, "region": [f"eu {i % 3}" for i in n.tolist()]}
    )
    hive = ds.partitioning(
        pa.schema([("year", pa.int32()), ("region", pa.string())]), flavor="hive"
    )
    ds.write_dataset(table, folder, format="parquet", partitioning=hive)


def write_datasets(folder: Path) -> None:
    hf, image = _lib("datasets"), _lib("PIL.Image")
    rows = {
        "image": [image.fromarray(np.full((4, 5, 3), i, np.uint8)) for i in range(ROWS)],
        "label": [i % 2 for i in range(ROWS)],
        "matrix": [np.full((2, 3), i, np.float32) for i in range(ROWS)],
        "chat": [[{"role": "user", "content": f"{i}"}] * (i % 3) for i in range(ROWS)],
    }
    features = hf.Features(
        image=hf.Image(),
        label=hf.ClassLabel(names=["no", "yes"]),
        matrix=hf.Array2D((2, 3), "float32"),
        chat=[{"role": hf.Value("string"), "content": hf.Value("string")}],
    )
    hf.Dataset.from_dict(rows, features=features).to_parquet(str(folder / "a.parquet"))


# ------------------------------------------------------------- the same rows by libraries


@functools.cache
def _pandas_rows(path: Path) -> Any:
    return _lib("pandas").read_parquet(path)


def by_pandas(place: Place) -> Values:
    row = _pandas_rows(place.path).iloc[place.start]
    return {
        "n": np.int64(row["n"]),
        "f": np.float32(row["f"]),
        "text": row["text"],
        "even": np.bool_(row["even"]),
        "when": np.int64(row["when"].value // 1000),  # of microseconds, as the column
        "tags": json.dumps(list(row["tags"]), separators=(",", ":")),
        "nested.a": np.int64(row["nested"]["a"]),
        "nested.b.c": np.float64(row["nested"]["b"]["c"]),
        "kind": row["kind"],
        "small": np.int64(row["small"]),
    }


@functools.cache
def _polars_rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = _lib("polars").read_parquet(path).to_dicts()
    return rows


def by_polars(place: Place, decimals: str = "float64") -> Values:
    row = _polars_rows(place.path)[place.start]
    return {
        "n": np.int64(row["n"]),
        "f": np.float32(row["f"]),
        "text": row["text"],
        "even": np.bool_(row["even"]),
        "when": np.datetime64(row["when"], "us").astype(np.int64),
        "tags": json.dumps(row["tags"], separators=(",", ":")),
        "nested.a": np.int64(row["nested"]["a"]),
        "nested.b.c": np.float64(row["nested"]["b"]["c"]),
        "kind": row["kind"],
        "price": str(row["price"]) if decimals == "str" else np.float64(row["price"]),
        "day": np.datetime64(row["day"], "D").astype(np.int32),
        "pair": np.array(row["pair"], np.int64),
    }


@functools.cache
def _duckdb_rows(path: Path) -> list[dict[str, Any]]:
    found = _lib("duckdb").read_parquet(str(path), hive_partitioning=True)
    return [dict(zip(found.columns, row, strict=True)) for row in found.fetchall()]


def by_duckdb(place: Place) -> Values:
    row = _duckdb_rows(place.path)[place.start]
    return {
        "n": np.int64(row["n"]),
        "f": np.float32(row["f"]),
        "text": row["text"],
        "even": np.bool_(row["even"]),
        "price": np.float64(row["price"]),
        "day": np.datetime64(row["day"], "D").astype(np.int32),
        "numbers": np.array(row["numbers"], np.int64),
        "tags": json.dumps(row["tags"], separators=(",", ":")),
        "nested.a": np.int64(row["nested"]["a"]),
        "nested.b.c": np.float64(row["nested"]["b"]["c"]),
        "pairs": json.dumps(row["pairs"], separators=(",", ":")),
        "part": np.int64(row["part"]),
        "side": row["side"],
    }


def by_duckdb_partitions(place: Place) -> Values:
    row = _duckdb_rows(place.path)[place.start]
    return {"n": np.int64(row["n"]), "part": np.int64(row["part"]), "side": row["side"]}


@functools.cache
def _dataset_rows(folder: Path, path: Path) -> list[dict[str, Any]]:
    ds = _lib("pyarrow.dataset")
    found = ds.dataset(
        path, format="parquet", partitioning="hive", partition_base_dir=str(folder)
    )
    rows: list[dict[str, Any]] = found.to_table().to_pylist()
    return rows


def by_dataset(place: Place) -> Values:
    row = _dataset_rows(place.path.parents[2], place.path)[place.start]
    return {"n": np.int64(row["n"]), "year": np.int64(row["year"]), "region": row["region"]}


@functools.cache
def _hf_rows(path: Path) -> Any:
    return _lib("datasets").load_dataset(
        "parquet", data_files=str(path), split="train", cache_dir=str(path.parents[1] / "hf")
    )


def by_datasets(place: Place) -> Values:
    rows = _hf_rows(place.path)
    row = rows.cast_column("image", _lib("datasets").Image(decode=False))[place.start]
    return {
        "image": row["image"]["bytes"],
        "label": np.int64(row["label"]),
        "matrix": np.array(row["matrix"], np.float32),
        "chat": json.dumps(row["chat"], separators=(",", ":")),
    }


def _case(
    writer: str, holds: str, write: Callable[[Path], None], expected: Any, samples: int = 24,
    url: str = "*.parquet", needs: str = "", **options: Any,
) -> Case:  # fmt: skip
    needed = ("pyarrow", needs or writer.partition(".")[0])
    return Case(writer, holds, "parquet", write, expected, samples, options, url, needs=needed)


def _fewer(names: tuple[str, ...], expected: Callable[[Place], Values], place: Place) -> Values:
    return {name: value for name, value in expected(place).items() if name in names}


_STRUCT = ("nested.a", "nested.b.c")
_PANDAS = "pandas.DataFrame.to_parquet"
CASES = [
    _case(_PANDAS, "numbers, text, times, lists of text, structs, categories", write_pandas, by_pandas),
    _case(_PANDAS, "gzip", partial(write_pandas, compression="gzip"), by_pandas),
    _case(_PANDAS, "no compression, row groups of 5", partial(write_pandas, compression=None, row_group_size=5), by_pandas),
    _case(_PANDAS, "a struct", write_pandas, partial(_fewer, _STRUCT, by_pandas), columns=["nested"]),
    _case(_PANDAS, "a value in a struct", write_pandas, partial(_fewer, ("nested.b.c",), by_pandas), columns=["nested.b.c"]),
    _case("polars.write_parquet", "zstd, with decimals, dates, arrays", write_polars, by_polars),
    _case("polars.write_parquet", "lz4, decimals as text", partial(write_polars, compression="lz4"), partial(by_polars, decimals="str"), decimals="str"),
    _case("polars.write_parquet", "snappy, small pages", partial(write_polars, compression="snappy", data_page_size=64, row_group_size=5), by_polars),
    _case("duckdb COPY", "decimals, lists, structs, maps", write_duckdb, by_duckdb, needs="duckdb"),
    _case("duckdb COPY", "PARTITION_BY, two levels", partial(write_duckdb, options="PARTITION_BY (part, side)", what="n, part, side"),
          by_duckdb_partitions, url="**/*.parquet", needs="duckdb"),
    _case("pyarrow.dataset.write_dataset", "hive partitions year and region", write_hive, by_dataset, url="**/*.parquet"),
    _case("pyarrow.dataset.write_dataset", "one of two partitions", write_hive, partial(_fewer, ("n", "year"), by_dataset), url="**/*.parquet", columns=["n", "year"]),
    _case("datasets.Dataset.to_parquet", "images, Array2D, chats", write_datasets, by_datasets, samples=12),
]  # fmt: skip
