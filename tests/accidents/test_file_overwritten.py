"""A sample never mixes two versions of a file that is overwritten in place during a read."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from growcache import Snapshot
from tests.accidents import commands
from tests.servers.overwriting import overwritten_when_opened
from tests.servers.sftp import Ssh

OBJECTS, VALUES, ROWS = 8, 1 << 22, 8


def plain(value: int) -> bytes:
    return np.full(VALUES, value, "<i8").tobytes()


def array(value: int) -> bytes:
    file = io.BytesIO()
    np.save(file, np.full((ROWS, VALUES // ROWS), value, "<i8"))
    return file.getvalue()


def versions(cache: Path) -> dict[str, set[int]]:
    """Return the values that each object's samples hold."""
    found: dict[str, set[int]] = {}
    with Snapshot.take(cache) as snapshot:
        for i in range(len(snapshot)):
            key = snapshot.origin(i).key
            (value,) = snapshot[i].values()
            values = np.frombuffer(value, "<i8") if isinstance(value, bytes) else value
            found.setdefault(key, set()).update(np.unique(values).tolist())
    return found


def write_to_disk(path: Path, data: bytes) -> None:
    """Write a file and drop it from the page cache, so that reading it takes a while."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fill_while_overwritten(
    tmp_path: Path, source: dict[str, Any], content: Callable[[int], bytes] = plain
) -> dict[str, Any]:
    """Run the service while every second object is overwritten during its read."""
    folder = tmp_path / "data"
    folder.mkdir()
    paths = [folder / f"{number:02}.npy" for number in range(OBJECTS)]
    for number, path in enumerate(paths):
        write_to_disk(path, content(number))
    config = commands.write_config(
        tmp_path / "cache.yaml",
        {"format": "bytes", **source},
        sampling={"max_skipped": 0.9, "shard_samples": 1, "timeout_seconds": 20},
        cache={"max_bytes": "700MB"},
    )
    new = {path: content(1000 + n) for n, path in enumerate(paths) if n % 2}
    with overwritten_when_opened(new) as done:
        ran = commands.growcache("run", config, "--until-full")
    assert ran.returncode == 0, ran.stderr
    assert len(done) == len(new)
    return commands.status(tmp_path / "cache")


def as_listed(cache: Path, status: dict[str, Any]) -> None:
    """Check that every sample is of the listed version, and that each missing object is a hole."""
    found = {int(Path(key).stem): values for key, values in versions(cache).items()}
    assert found == {number: {number} for number in found}
    assert {*range(0, OBJECTS, 2)} <= {*found}
    assert status["holes"] == OBJECTS - len(found)


@pytest.mark.slow
@pytest.mark.parametrize("client", ["auto", pytest.param("fsspec", marks=pytest.mark.slow)])
def test_of_this_machine(tmp_path: Path, client: str) -> None:
    source = {"url": f"{tmp_path}/data/*.npy", "client": client}
    as_listed(tmp_path / "cache", fill_while_overwritten(tmp_path, source))


@pytest.mark.slow
def test_read_by_several_ranges(tmp_path: Path) -> None:
    """Each row is read by a request of its own; all cached rows are of the listed version."""
    source = {"url": f"{tmp_path}/data/*.npy", "format": "npy", "options": {"axis": 0}}
    fill_while_overwritten(tmp_path, source, array)
    found = versions(tmp_path / "cache")
    assert all(values == {int(Path(key).stem)} for key, values in found.items())


@pytest.mark.slow
def test_of_an_ssh_server(tmp_path: Path, ssh_server: Ssh) -> None:
    source = {
        "url": ssh_server.url(f"{tmp_path}/data/*.npy"),
        "storage_options": ssh_server.options,
    }
    as_listed(tmp_path / "cache", fill_while_overwritten(tmp_path, source))
