"""Objects of every size, through the service, in both cache formats."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from growcache.cache.check import check
from growcache.cache.files import CacheLayout, allocated_tree
from growcache.cache.index.reader import read_index
from growcache.cache.sidecar import Sidecar
from growcache.loading.snapshot import Snapshot
from tests.sampling.services import run, write_config

OBJECTS = 60
HUGE = 55  # the object that no shard has room for


def make_objects(folder: Path) -> str:
    """Objects of bytes; the first ones, which are probed, are of middling size."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(OBJECTS):
        nbytes = 5_000 if i < 30 else int(rng.integers(0, 10_000))
        name = f"{i:03d} ä#%.bin"
        (folder / name).write_bytes(rng.bytes(12_000_000 if i == HUGE else nbytes))
    return f"{folder}/*.bin"


def digests(cache: Path) -> dict[str, str]:
    return {
        str(path.relative_to(cache)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((cache / "shards").rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize(
    "cache_format", ["tfrecord", pytest.param("npy", marks=pytest.mark.slow)]
)
def test_objects_of_every_size_are_cached_byte_for_byte(
    tmp_path: Path, cache_format: str
) -> None:
    url = make_objects(tmp_path / "objects")
    found = []
    for workers, concurrency in ((1, 1), (3, 5)):
        config = write_config(
            tmp_path / f"{workers}.yaml",
            url,
            source={"format": "bytes"},
            sampling={"workers": workers, "concurrency": concurrency, "max_skipped": 0.5},
            cache={"format": cache_format},
        )
        assert run(config, "--until-full") == (0, "")
        found.append(digests(tmp_path / f"{workers}"))
    assert found[0] == found[1]

    cache = tmp_path / "1"
    view = read_index(cache)
    assert (view.complete, view.totals.samples, view.totals.holes) == (True, OBJECTS - 1, 1)
    assert view.cache_format == cache_format
    (hole,) = [
        hole
        for row in view.shards
        for hole in Sidecar.from_bytes(
            CacheLayout(cache).sidecar(row.number).read_bytes()
        ).holes
    ]
    assert Path(hole.key).name.startswith(f"{HUGE:03d}")
    assert "a sample of 12,000,000 bytes does not fit into the " in hole.reason
    with Snapshot.take(cache) as snapshot:
        for i in range(len(snapshot)):
            key = snapshot.origin(i).key
            assert snapshot[i] == {"data": (tmp_path / "objects" / key).read_bytes()}
    assert check(cache) == []
    assert allocated_tree(cache) < 20_000_000
