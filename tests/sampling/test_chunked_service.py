"""Formats that store samples in chunks, through the service."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from growcache import Snapshot
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
