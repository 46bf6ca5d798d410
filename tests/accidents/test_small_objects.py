"""A visit to a small object yields all of its samples, so no fetched bytes are wasted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import growcache
from tests.accidents.commands import growcache as command
from tests.accidents.commands import status, write_config
from tests.servers.slowlink import SlowLink, slowlink
from tests.servers.web import web

OBJECTS, ROWS, WIDTH = 40, 50, 300  # each object has 60,000 bytes of rows
AMPLIFICATION = 1.2


def array_of(number: int) -> Any:
    """Return rows that start with the object's number and the row."""
    values = np.random.default_rng(number).random((ROWS, WIDTH)).astype("<f4")
    values[:, 0], values[:, 1] = number, np.arange(ROWS)
    return values


def write_npy(path: Path, values: Any) -> None:
    np.save(path, values)


def write_npz(path: Path, values: Any) -> None:
    np.savez(path, x=values)


def write_hdf5(path: Path, values: Any) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=values)


WRITERS: dict[str, tuple[str, Callable[[Path, Any], None]]] = {
    "npy": ("npy", write_npy),
    "npz": ("npz", write_npz),
    "hdf5": ("h5", write_hdf5),
}


@contextmanager
def store(folder: Path, form: str) -> Iterator[tuple[str, SlowLink]]:
    """Serve small objects of a format through a proxy that counts bytes."""
    ending, write = WRITERS[form]
    (folder / "objects").mkdir()
    for number in range(OBJECTS):
        write(folder / "objects" / f"{number:03d}.{ending}", array_of(number))
    with web(folder) as address, slowlink(address) as link:
        yield f"{link.endpoint}/objects/*.{ending}", link


def config_of(folder: Path, url: str, form: str, **sampling: Any) -> Path:
    source = {"url": url, "format": form, "options": {"axis": 0}}
    return write_config(
        folder / "cache.yaml",
        source,
        sampling={"workers": 2, **sampling},
        cache={"max_bytes": "60MB"},
    )


@pytest.mark.parametrize(
    "form", [f if f == "npz" else pytest.param(f, marks=pytest.mark.slow) for f in WRITERS]
)
def test_what_is_fetched_of_small_objects_is_kept(tmp_path: Path, form: str) -> None:
    with store(tmp_path, form) as (url, link):
        config = config_of(tmp_path, url, form, shard_samples=64)
        done = command("run", config, "--until-full", seconds=120)
        fetched = link.counts().bytes
    assert done.returncode == 0, done.stderr
    found = status(tmp_path / "cache")
    assert (found["samples"], found["holes"]) == (OBJECTS * ROWS, 0)
    # The probe takes eight of these objects, which are read again when they are drawn.
    needed = OBJECTS * ROWS * WIDTH * 4
    assert fetched <= AMPLIFICATION * needed * (OBJECTS + 8) / OBJECTS
    assert_each_row_once_and_dealt(tmp_path / "cache")


def assert_each_row_once_and_dealt(cache: Path) -> None:
    with growcache.Snapshot.take(cache) as snapshot:
        samples = [snapshot[i]["x"] for i in range(len(snapshot))]
        shard_of = [n for n, shard in enumerate(snapshot.shards) for _ in range(shard.samples)]
    assert {(int(x[0]), int(x[1])) for x in samples} == {
        (number, row) for number in range(OBJECTS) for row in range(ROWS)
    }
    for x in samples[::97]:
        np.testing.assert_array_equal(x, array_of(int(x[0]))[int(x[1])])
    together = Counter((shard, int(x[0])) for shard, x in zip(shard_of, samples, strict=True))
    # A visit's samples are spread over the shards of its group, few to a shard.
    assert max(together.values()) <= 5


@pytest.mark.parametrize("form", ["npy", pytest.param("npz", marks=pytest.mark.slow)])
def test_one_sample_of_a_small_object_is_read_by_range(tmp_path: Path, form: str) -> None:
    """With `samples_per_object=1` a sample is fetched without the rest of its object."""
    with store(tmp_path, form) as (url, link):
        config = config_of(tmp_path, url, form, shard_samples=8, samples_per_object=1)
        done = command("run", config, "--samples", str(OBJECTS), seconds=120)
        fetched = link.counts().bytes
    assert done.returncode == 0, done.stderr
    # Fetching whole objects, one for each sample, would take three times these bytes.
    assert fetched < OBJECTS * ROWS * WIDTH * 4 / 3
