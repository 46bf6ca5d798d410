"""Formats that store samples in chunks, through the service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from growcache import Snapshot
from growcache.config_source import SourceConfig
from growcache.sampling.sources import open_listings
from growcache.schema import Origin
from growcache.store.contract import Entry
from tests.sampling.services import run, status, write_config


def test_every_row_of_parquet_files_is_drawn_once(tmp_path: Path) -> None:
    """A visit is worth a row group, in tables of any ratio of rows to bytes."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "data").mkdir()
    rng, rows = np.random.default_rng(0), {"a": 300, "b": 90, "c": 1000}
    for name, count in rows.items():
        noise = rng.integers(0, 2 if name == "c" else 1 << 60, (count, 8))
        x = pa.FixedSizeListArray.from_arrays(pa.array(noise.reshape(-1)), 8)
        table = pa.table(
            {"x": x, "n": range(count), "name": [name * (n % 5) for n in range(count)]}
        )
        pq.write_table(table, tmp_path / "data" / f"{name}.parquet", row_group_size=40)
    config = write_config(
        tmp_path / "c.yaml",
        f"{tmp_path}/data/*.parquet",
        source={"format": "parquet"},
        sampling={"shard_samples": 100},
    )
    assert run(config, "--until-full") == (0, "")
    drawn = set()
    with Snapshot.take(tmp_path / "c") as snapshot:
        assert len(snapshot) == sum(rows.values())
        for i in range(len(snapshot)):
            origin, sample = snapshot.origin(i), snapshot[i]
            name = Path(origin.key).stem
            assert (int(sample["n"]), str(sample["name"])) == (
                origin.start,
                name * (origin.start % 5),
            )
            drawn.add((name, origin.start))
    assert len(drawn) == sum(rows.values())


@pytest.mark.slow
def test_every_window_of_hdf5_files_is_drawn_once(tmp_path: Path) -> None:
    """Whatever their ratio of rows to bytes, and with one that is none."""
    h5py = pytest.importorskip("h5py")
    (tmp_path / "data").mkdir()
    rng, rows = np.random.default_rng(0), {"a": 3000, "b": 900, "c": 5000}
    for name, count in rows.items():
        with h5py.File(tmp_path / "data" / f"{name}.h5", "w") as file:
            noise = rng.integers(0, 2 if name == "c" else 1 << 30, (count, 8))
            file.create_dataset("x", data=noise, chunks=(100, 8), compression="gzip")
            file["n"] = np.arange(count)
    (tmp_path / "data" / "d.h5").write_bytes(b"no such file")
    config = write_config(
        tmp_path / "c.yaml",
        f"{tmp_path}/data/*.h5",
        source={"format": "hdf5", "options": {"datasets": ["x", "n"], "window": 10}},
        sampling={"max_skipped": 0.5, "shard_samples": 100},
    )
    assert run(config, "--until-full") == (0, "")
    found = status(tmp_path / "c")
    assert (found.samples, found.holes) == (sum(rows.values()) // 10, 1)
    starts = set()
    with Snapshot.take(tmp_path / "c") as snapshot:
        for i in range(len(snapshot)):
            origin = snapshot.origin(i)
            assert snapshot[i]["n"].tolist() == list(range(origin.start, origin.stop))
            starts.add((Path(origin.key).stem, origin.start))
    assert starts == {(name, at) for name, count in rows.items() for at in range(0, count, 10)}


def half_written(folder: Path) -> np.ndarray[Any, np.dtype[np.int32]]:
    """A Zarr array of 200 windows of 8 rows, of which 60 start in chunks that were never written."""
    zarr = pytest.importorskip("zarr")
    array = zarr.create_array(
        folder, shape=(1600, 2), chunks=(80, 2), dtype="i4", fill_value=-7
    )
    values = np.full((1600, 2), -7, "i4")
    for n in range(20):
        if n % 3:
            values[n * 80 : n * 80 + 80] = n
            array[n * 80 : n * 80 + 80] = n
    return values


def test_a_listing_of_zarr_ends_with_the_chunks_that_were_never_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    half_written(tmp_path / "a.zarr")

    def pages(pattern: str, **options: Any) -> list[list[Entry]]:
        url = f"{tmp_path}/a.zarr/{pattern}"
        source = SourceConfig(url=(url,), format="zarr", options={"window": 8, **options})
        listing = open_listings([source], timeout_seconds=5, on_retry=lambda _: None)
        return list(listing.pages())

    *listed, unwritten = pages("c/**")
    assert sum(map(len, listed)) == 13
    assert all(entry.is_unwritten for entry in unwritten)
    folder = f"{tmp_path}/a.zarr/c"
    assert [entry.key for entry in unwritten] == [f"{folder}/{n}/0" for n in range(0, 20, 3)]
    assert "listing has 7 chunks that were never written" in caplog.text
    found = [entry.key for page in pages("c/1?/0") for entry in page]
    assert sorted(found) == [f"{folder}/{n}/0" for n in range(10, 20)]
    assert sum(map(len, pages("c/**", unwritten="skip"))) == 13


@pytest.mark.slow
def test_chunks_that_were_never_written_are_drawn_and_noticed_once_they_are(
    tmp_path: Path,
) -> None:
    zarr = pytest.importorskip("zarr")
    values = half_written(tmp_path / "a.zarr")
    config = write_config(
        tmp_path / "c.yaml",
        f"{tmp_path}/a.zarr/c/**",
        source={"format": "zarr", "options": {"window": 8}},
        sampling={"max_skipped": 1.0, "shard_samples": 20},
    )
    code, said = run(config, "--samples", "1")
    assert code == 0
    assert "listing has 7 chunks that were never written" in said
    zarr.open_array(tmp_path / "a.zarr")[:80] = 1000
    values[:80] = 1000
    before = {origin for origin, _ in read_all(tmp_path / "c")}
    assert run(config, "--until-full")[0] == 0
    drawn = read_all(tmp_path / "c")
    late = [o for o, _ in drawn if o.start < 80]
    assert len(drawn) == 200 if late else 190
    assert len({(o.start, o.stop) for o, _ in drawn}) == len(drawn)
    code, said = run(config, "--until-full", "--refresh")
    assert code == 0
    drawn = read_all(tmp_path / "c")
    assert len(drawn) == 200
    for origin, x in drawn:
        if origin not in before:  # that was drawn before the chunk was written
            np.testing.assert_array_equal(x, values[origin.start : origin.stop])


def read_all(cache: Path) -> list[tuple[Origin, Any]]:
    with Snapshot.take(cache) as snapshot:
        found = [(snapshot.origin(i), snapshot[i]) for i in range(len(snapshot))]
    return [(origin, np.asarray(next(iter(sample.values())))) for origin, sample in found]
