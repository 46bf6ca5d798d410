"""What killed services left of a Ray of their own is removed at the next start, and nothing else."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from growcache.sampling.engines.ray_folder import PREFIX, RayFolder


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gc-") as folder:  # a short path
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def make_old(path: Path) -> None:
    os.utime(path, (0, 0))


def test_a_folder_goes_with_its_service(parent: Path) -> None:
    folder = RayFolder()
    (Path(folder.path) / "session").mkdir()
    folder.remove()
    assert not list(parent.iterdir())


def test_only_what_a_killed_service_left_is_removed(parent: Path) -> None:
    running = RayFolder()
    make_old(Path(running.path))
    kept = [parent / "other", parent / f"{PREFIX}new"]
    left = parent / f"{PREFIX}left"
    for folder in (*kept, left):
        folder.mkdir()
    (left / "session").write_bytes(b"")
    link = parent / f"{PREFIX}link"
    link.symlink_to(kept[0])
    for folder in (kept[0], left):
        make_old(folder)
    found = RayFolder()
    assert {*parent.iterdir()} == {Path(found.path), Path(running.path), *kept, link}
    running.remove()
    found.remove()
