"""What cannot work says so in one line, with exit code 2, on real servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sampling.services import run, write_config
from tests.servers import Bucket


def refusal(tmp_path: Path, url: str, **storage_options: Any) -> str:
    """Return the one line that the service says when it gives up."""
    config = write_config(tmp_path / "c.yaml", url, source={"storage_options": storage_options})
    code, errors = run(config, seconds=40)
    assert code == 2, errors
    assert len(errors.splitlines()) == 1, errors
    assert "Traceback" not in errors
    return errors


def test_a_wrong_secret(s3: Bucket, tmp_path: Path) -> None:
    if not s3.server.checks_credentials:
        pytest.skip(f"{s3.server.name} accepts every secret")
    options = {**s3.storage_options, "secret": "mistyped-secret"}
    line = refusal(tmp_path, s3.url("*.npy"), **options)
    assert s3.name in line
    assert "mistyped-secret" not in line


def test_a_missing_bucket(s3: Bucket, tmp_path: Path) -> None:
    line = refusal(tmp_path, "s3://no-such-bucket/*.npy", **s3.storage_options)
    assert "no-such-bucket" in line


@pytest.mark.slow
def test_an_empty_listing(s3: Bucket, tmp_path: Path) -> None:
    s3.put("elsewhere/a.npy", b"")
    line = refusal(tmp_path, s3.url("recordings/*.npy"), **s3.storage_options)
    assert "empty" in line
    assert "recordings/*.npy" in line


def test_objects_of_another_format(s3: Bucket, tmp_path: Path) -> None:
    s3.put("a.npy", b"no array at all")
    config = write_config(
        tmp_path / "c.yaml", s3.url("*.npy"), source={"storage_options": s3.storage_options}
    )
    code, errors = run(config, seconds=40)
    assert code == 1
    assert "a.npy" in errors
    assert len(errors.splitlines()) <= 2
