"""Objects that are rewritten between listing and reading, with every client; `peek` afterwards."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from growcache import Snapshot
from tests.accidents import commands
from tests.servers import Bucket
from tests.servers.web import web

OBJECTS = 12
Put = Callable[[str, bytes], None]


def array(value: int) -> bytes:
    file = io.BytesIO()
    np.save(file, np.full(8, value))
    return file.getvalue()


@contextlib.contextmanager
def place(
    request: pytest.FixtureRequest, name: str, folder: Path
) -> Iterator[tuple[dict[str, Any], Put]]:
    """Yield a source, and a function that puts objects into its store."""
    kind, _, client = name.partition("+")
    if kind == "s3":
        bucket: Bucket = request.getfixturevalue("bucket")
        options = bucket.storage_options
        url = bucket.url("*.npy")
        yield {"url": url, "storage_options": options, "client": client}, bucket.put
        return

    def put(name: str, data: bytes) -> None:
        (folder / name).write_bytes(data)

    if kind == "ssh":
        ssh = request.getfixturevalue("ssh_server")
        yield {"url": ssh.url(f"{folder}/*.npy"), "storage_options": ssh.options}, put
    elif kind == "files":
        yield {"url": f"{folder}/*.npy", "client": client}, put
    else:
        with web(folder, etags="etags" in kind) as address:
            names = [f"{number:02}.npy" for number in range(OBJECTS)]
            asked = names if client == "obstore" else ["*.npy"]
            yield {"url": [f"{address}/{name}" for name in asked]}, put


def cached(cache: Path) -> dict[int, tuple[str, int]]:
    """Return the shard position and the value of each object's sample."""
    with Snapshot.take(cache) as snapshot:
        places = [f"{row.number}:{i}" for row in snapshot.shards for i in range(row.samples)]
        found = {}
        for i, place in enumerate(places):
            number = int(Path(snapshot.origin(i).key).stem)
            found[number] = (place, int(snapshot[i]["x"][0]))
        return found


def refetched(config: Path, cache: Path, place: str) -> str:
    """Return the output of `peek --refetch` for one sample."""
    again = commands.growcache(
        "peek", cache, "--sample", place, "--refetch", "--config", config
    )
    assert "Traceback" not in again.stderr
    return again.stdout + again.stderr


SLOW = [
    "s3+fsspec",
    "web etags+fsspec",
    "web etags+obstore",
    "web+fsspec",
    "files+fsspec",
    "ssh",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "files+auto",
        *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW),
    ],
)
def test_they_are_holes_and_peek_says_so(
    tmp_path: Path, request: pytest.FixtureRequest, name: str
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    cache = tmp_path / "cache"
    with place(request, name, folder) as (source, put):
        for number in range(OBJECTS):
            put(f"{number:02}.npy", array(number))
        config = commands.write_config(
            tmp_path / "cache.yaml",
            {"format": "npy", **source},
            sampling={"shard_samples": 4, "max_skipped": 0.95},
        )
        assert commands.growcache("run", config, "--samples", "4").returncode == 0
        first = cached(cache)
        left = [number for number in range(OBJECTS) if number not in first]
        assert left
        rewritten = [*left[::2], min(first)]
        for number in rewritten:
            data = array(1000 + number)
            # This store has no version but the size, so the size must change.
            put(f"{number:02}.npy", data if name != "web+fsspec" else data + b" ")
        assert commands.growcache("run", config, "--until-full").returncode == 0
        assert {n: value for n, (_, value) in cached(cache).items()} == {
            number: number for number in range(OBJECTS) if number not in left[::2]
        }
        assert commands.status(cache)["holes"] == len(left[::2])
        assert "is changed" in refetched(config, cache, first[min(first)][0])
        assert "is equal" in refetched(config, cache, first[max(first)][0])
