"""Whatever the umask: all that growcache creates is its owner's only, unless others are asked in."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from growcache.cache.files import CacheLayout
from growcache.loading.snapshot import Snapshot
from tests.sampling.services import make_source, wait_until, write_config

CLI = [sys.executable, "-m", "growcache"]


def below(root: Path) -> Iterator[Path]:
    """Yield all paths below; one that goes meanwhile is no error, unlike with `rglob`."""
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            yield Path(folder, name)


def open_to_others(*roots: Path) -> dict[str, str]:
    """Every path at or below the roots that its group or others can do anything with."""
    found = {}
    for root in roots:
        for path in [root, *below(root)]:
            try:
                mode = path.lstat().st_mode
            except FileNotFoundError:  # a service is at work
                continue
            if mode & 0o077 and not stat.S_ISLNK(mode):
                found[str(path.relative_to(root.parent))] = oct(mode)
    return found


@pytest.fixture
def no_umask() -> Iterator[None]:
    """Nothing is taken from the mode that a file is made with, here and in children."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("no_umask")
@pytest.mark.parametrize(
    "cache_format", ["tfrecord", pytest.param("npy", marks=pytest.mark.slow)]
)
def test_a_running_service_and_its_reader(tmp_path: Path, cache_format: str) -> None:
    url = make_source(tmp_path / "data", 24)
    cache = tmp_path / "new" / "deeper" / "cache"
    config = write_config(
        tmp_path / "c.yaml", url, cache={"path": str(cache), "format": cache_format}
    )
    seen: dict[str, str] = {}
    names: set[str] = set()

    def look() -> None:
        seen.update(open_to_others(tmp_path / "new"))
        names.update(path.name for path in below(cache))

    with subprocess.Popen([*CLI, "run", str(config)], stdout=subprocess.DEVNULL) as process:
        try:

            def filled() -> bool:
                look()
                return (
                    CacheLayout(cache).status.exists()
                    and len(list(cache.glob("shards/*.json"))) > 2
                )

            wait_until(filled)
            with Snapshot.take(cache):
                look()
        finally:
            process.terminate()
    look()
    assert seen == {}
    wanted = {"index.sqlite", "index.sqlite-wal", "index.sqlite-shm", "catalog.bin"}
    wanted |= {"identity.json", "issued", "editions.json", "ballast", "status.json"}
    wanted |= {"metrics.json", "supervisor.lock", "samplers.lock", "00000000.json"}
    assert wanted <= names
    assert any(name.endswith(".lease") for name in names)


@pytest.mark.slow
@pytest.mark.usefixtures("no_umask")
def test_what_the_other_commands_write(tmp_path: Path) -> None:
    url = make_source(tmp_path / "data", 12)
    mine = tmp_path / "mine"
    mine.mkdir(0o700)

    def run(*words: str) -> None:
        subprocess.run([*CLI, *words], cwd=mine, check=True, stdout=subprocess.DEVNULL)

    run("init", "growcache.yaml", "--url", url, "--cache", "cache", "--yes")
    run("run", "growcache.yaml", "--until-full")
    run("export", "cache", "copy", "--format", "npy")
    assert open_to_others(mine) == {}
    run("export", "cache", "theirs", "--shared")
    theirs = mine / "theirs"
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in [theirs, *theirs.rglob("*")])
