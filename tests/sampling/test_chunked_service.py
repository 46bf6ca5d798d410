"""Formats that store samples in chunks, through the service."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from growcache import Snapshot
from tests.sampling.services import run, status, write_config


def test_every_window_of_hdf5_files_is_drawn_once(tmp_path: Path) -> None:
    """Whatever their ratio of rows to bytes, and beside one that is none."""
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
