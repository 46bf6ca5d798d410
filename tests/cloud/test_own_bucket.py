"""A service and a loader on the user's bucket: credentials reach every process, and a listing is shared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from growcache.numpy import EpochLoader
from tests.cloud.place import key_of, new_folder, open_objects, options

OBJECTS = 24


@pytest.fixture
def folder() -> str:
    """A folder of small arrays."""
    made = new_folder()
    objects = open_objects(made, options())
    for number in range(OBJECTS):
        file = f"{key_of(made)}data/{number:02d}.npy"
        objects.put(file, npy(np.full((4, 8), number, "<f4")))
    return made


def npy(array: np.ndarray) -> bytes:
    from io import BytesIO

    written = BytesIO()
    np.save(written, array)
    return written.getvalue()


def run(tmp_path: Path, name: str, source: dict[str, object]) -> dict[str, object]:
    """Run a service until all is cached; return its last status. Skip where it may not write."""
    config = {"source": source, "cache": {"path": str(tmp_path / name), "max_bytes": "50MB"}}
    file = tmp_path / f"{name}.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "growcache"]
    ran = subprocess.run(
        [*command, "run", str(file), "--until-full"],
        check=True, timeout=300, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    if "may not publish" in ran.stderr:
        pytest.skip(ran.stderr.splitlines()[0])
    shown = subprocess.run(
        [*command, "status", str(tmp_path / name), "--json"], check=True, capture_output=True
    )
    status: dict[str, object] = json.loads(shown.stdout)
    return status


@pytest.mark.parametrize("client", ["own-auto", "own-fsspec"])
def test_a_service_caches_every_object(tmp_path: Path, folder: str, client: str) -> None:
    source: dict[str, object] = {
        "url": f"{folder}data/*.npy",
        "format": "npy",
        "storage_options": options(),
        "client": client.removeprefix("own-"),
    }
    status = run(tmp_path, "cache", source)
    assert (status["state"], status["samples"], status["holes"]) == ("stopped", OBJECTS, 0)
    with EpochLoader(tmp_path / "cache", batch_size=4, fixed=True) as loader:
        values = np.concatenate([batch["x"][:, 0, 0] for batch in loader])
    assert sorted(values.tolist()) == list(range(OBJECTS))


def test_a_listing_in_the_bucket_is_shared_own(tmp_path: Path, folder: str) -> None:
    source: dict[str, object] = {
        "url": f"{folder}data/*.npy",
        "format": "npy",
        "storage_options": options(),
        "catalog": f"{folder}listing",
    }
    first, second = (run(tmp_path, name, source)["catalogs"] for name in ("one", "two"))
    assert "published" in json.dumps(first)
    assert first != second
