"""Modes of what is in a cache: its owner's only, or its group's where the cache's folder is shared."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from growcache.cache import directory, locks
from growcache.cache.directory import adopt
from growcache.cache.files import CacheLayout
from growcache.errors import CachePathError
from growcache.numpy import EpochLoader
from tests.filled import Filled


@pytest.fixture(params=[0o002, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(folder: Path, is_kind: Callable[[Path], bool]) -> set[str]:
    """Return the modes of all folders, or of all files, in a folder."""
    found = {path.lstat().st_mode for path in folder.rglob("*") if is_kind(path)}
    return {f"{stat.S_IMODE(mode):o}" for mode in found}


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("cache_format", ["tfrecord", "npy"])
@pytest.mark.parametrize(
    ("mode", "folders", "files"),
    [
        (0o2770, "2770", "660"),
        (0o2777, "2770", "660"),  # as Kubernetes makes an emptyDir with fsGroup
        (0o775, "700", "600"),
        (0o2750, "2700", "600"),
    ],
)
def test_modes_follow_the_folder_of_the_cache_whatever_the_umask(
    tmp_path: Path, mode: int, folders: str, files: str, cache_format: str
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(mode)
    filled = Filled(cache, cache_format=cache_format)
    filled.add(0, samples=16)
    with EpochLoader(cache, batch_size=4, min_samples=8) as loader:
        next(iter(loader))
        assert modes(cache, Path.is_dir) == {folders}
        assert modes(cache, Path.is_file) == {files}
        assert any((cache / "leases").iterdir())
    filled.close()


def test_a_folder_that_growcache_makes_is_its_owners_only(tmp_path: Path) -> None:
    """A project's folder is often shared; a cache in it is not, unless its own folder says so."""
    tmp_path.chmod(0o2770)
    with Filled(tmp_path / "missing" / "cache") as filled:
        filled.add(0)
    assert {mode[-3:] for mode in modes(tmp_path, Path.is_dir)} == {"700"}
    assert modes(tmp_path, Path.is_file) == {"600"}


def test_who_is_not_in_the_group_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o2770)
    monkeypatch.setattr(directory, "may_share_with_group", lambda folder: False)
    with pytest.raises(CachePathError, match=r"shared with its group .* --group-add"):
        adopt(CacheLayout(tmp_path))
    assert not any(tmp_path.iterdir())


def test_a_file_that_cannot_be_shared_leaves_no_descriptor_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, folder: Path) -> None:
        raise PermissionError("not its owner")

    monkeypatch.setattr(locks, "share_if_folder_is", refuse)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(PermissionError):
        locks.open_owned(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
