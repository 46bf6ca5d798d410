"""A store or a proxy answers range requests with other bytes.

Content-Range or the length of such a response shows the mistake. The request is retried, the bytes
are never decoded, and no sample is lost.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from growcache import Snapshot
from tests.accidents import commands
from tests.servers import Bucket
from tests.servers.tampering import tampering
from tests.servers.web import web

OBJECTS, ROWS, COLUMNS = 12, 6, 2048  # larger than the first fetch of a header
KINDS = ["other_bytes", "other_total", "short_range", "short", "cut_off", "short_chunked"]


def array(number: int) -> bytes:
    """Return an object whose rows hold their object's number and row."""
    rows = np.arange(ROWS, dtype="<i8")[:, None] + 1000 * number
    file = io.BytesIO()
    np.save(file, np.repeat(rows, COLUMNS, axis=1))
    return file.getvalue()


def objects() -> dict[str, bytes]:
    return {f"{number:02}.npy": array(number) for number in range(OBJECTS)}


def fill(cache: Path, source: dict[str, Any]) -> dict[str, Any]:
    """Run the service until all samples are cached; return its status."""
    config = commands.write_config(
        cache.with_suffix(".yaml"),
        {"format": "npy", "options": {"axis": 0}, **source},
        sampling={"timeout_seconds": 20, "max_skipped": 0.9},
    )
    ran = commands.growcache("run", config, "--until-full", seconds=120)
    assert ran.returncode == 0, ran.stderr
    return commands.status(cache)


def wrong(cache: Path) -> tuple[int, int]:
    """Return the number of samples, and the number with wrong values."""
    with Snapshot.take(cache) as snapshot:
        bad = 0
        for i in range(len(snapshot)):
            origin = snapshot.origin(i)
            number = int(origin.key.rpartition("/")[2].removesuffix(".npy"))
            expected = np.full(COLUMNS, 1000 * number + origin.start, "<i8")
            bad += not np.array_equal(snapshot[i]["x"], expected)
        return len(snapshot), bad


def all_right(cache: Path, status: dict[str, Any]) -> None:
    assert wrong(cache) == (OBJECTS * ROWS, 0)
    assert status["holes"] == 0
    assert status["failures"] > 0


def slow(*kinds: str) -> list[object]:
    return [pytest.param(*kind.split("+"), marks=pytest.mark.slow) for kind in kinds]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("client", "kind"),
    [
        ("fsspec", "other_bytes"),
        *slow("auto+other_bytes"),
        *slow(*(f"{client}+{kind}" for client in ("auto", "fsspec") for kind in KINDS[1:])),
    ],
)
def test_of_s3(tmp_path: Path, bucket: Bucket, client: str, kind: str) -> None:
    for name, data in objects().items():
        bucket.put(name, data)
    with tampering(bucket.server.endpoint, objects(), kind, each=3) as proxy:
        options = {**bucket.storage_options, "endpoint_url": proxy.endpoint}
        source = {"url": bucket.url("*.npy"), "storage_options": options, "client": client}
        status = fill(tmp_path / "cache", source)
    assert proxy.done > 10
    all_right(tmp_path / "cache", status)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "kind"),
    [
        ("index", "other_bytes"),
        *slow("index+short_range", "addresses+other_bytes", "addresses+short_range"),
        *slow(
            *(
                f"{names}+{kind}"
                for names in ("index", "addresses")
                for kind in ("other_total", *KINDS[3:], "login_page")
            )
        ),
    ],
)
@pytest.mark.parametrize("etags", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_of_a_web_server(tmp_path: Path, names: str, kind: str, etags: bool) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, data in objects().items():
        (folder / name).write_bytes(data)
    with (
        web(folder, etags=etags) as address,
        tampering(address, objects(), kind, each=3) as proxy,
    ):
        asked = ["*.npy"] if names == "index" else [*objects()]
        status = fill(tmp_path / "cache", {"url": [f"{proxy.endpoint}/{n}" for n in asked]})
    assert proxy.done > 10
    all_right(tmp_path / "cache", status)
