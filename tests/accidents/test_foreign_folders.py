"""growcache leaves directories that are no cache, and foreign files in a cache, untouched."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import orjson
import pytest

from tests.accidents.commands import (
    command,
    growcache,
    rows_of,
    status,
    write_config,
    write_objects,
)

MARKER = "growcache.json"
NOBODY = 65534


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_objects(tmp_path_factory.mktemp("source"), count=20, columns=8)


@pytest.fixture(scope="module")
def filled(objects: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with samples."""
    config = config_for(tmp_path_factory.mktemp("filled") / "c", objects)
    assert growcache("run", config, "--samples", "64").returncode == 0
    return config.with_suffix("")


@pytest.fixture
def cache(filled: Path, tmp_path: Path) -> Path:
    """A copy of the filled cache, with its timestamps."""
    return Path(shutil.copytree(filled, tmp_path / "cache"))


def config_for(cache: Path, objects: str) -> Path:
    """Return the config of a cache at that path; the file is next to it."""
    source = rows_of(objects)
    return write_config(cache.with_suffix(".yaml"), source, cache={"path": str(cache)})


def picture(folder: Path) -> dict[str, Any]:
    """Return the mode, modification time, and bytes or link target of everything in a folder."""
    found: dict[str, Any] = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        about = path.lstat()
        content: object = None
        if stat.S_ISLNK(about.st_mode):
            content = path.readlink()
        elif stat.S_ISREG(about.st_mode):
            content = path.read_bytes()
        found[str(path.relative_to(folder))] = (about.st_mode, about.st_mtime_ns, content)
    return found


def assert_refused(*words: str | Path) -> str:
    """Run a command that must end with code 2 and one or two lines of stderr; return them."""
    done = growcache(*words)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2, done
    assert 1 <= len(lines) <= 2, done
    assert "Traceback" not in done.stderr
    return done.stderr


def writers(config: Path, cache: Path) -> list[list[str | Path]]:
    """Return the commands that change a cache."""
    return [["run", config], ["clear", cache, "--yes"], ["check", cache, "--repair"]]


def write(folder: Path, **files: bytes) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


# Directories of other programs, each with names that a cache uses too.


def incoming(folder: Path) -> None:
    write(folder, **{"incoming/thesis.tex": b"years of work", "incoming/a/b.txt": b"deep"})


def linked_incoming(folder: Path) -> None:
    write(folder.parent / "precious", **{"thesis.tex": b"years", "0.npy/0.npy": b"of work"})
    (folder / "incoming").symlink_to(folder.parent / "precious")


def dataset(folder: Path) -> None:
    names = ("00000000.npy", "00000001.tfrecord", "00000001.json", "00000002.npy/x.npy")
    write(folder, **{f"shards/{name}": b"of another program" for name in names})
    write(folder, **{"identity.json": b"{}", "editions.json": b"[]", "issued": b"12"})


def linked_shards(folder: Path) -> None:
    write(folder.parent / "precious", **{"00000000.tfrecord": b"real"})
    (folder / "shards").symlink_to(folder.parent / "precious")


def home(folder: Path) -> None:
    write(folder, **{".bashrc": b"x", ".ssh/id": b"key", "notes/a.txt": b"a", ".a.tmp": b"b"})


def repository(folder: Path) -> None:
    write(
        folder,
        **{".git/HEAD": b"ref", "README.md": b"x", "leases/house.lease": b"2,000 a month"},
    )


def locks(folder: Path) -> None:
    write(folder, **{"supervisor.lock": b"", "samplers.lock": b"", "status.json": b'{"a": 1}'})


def database(folder: Path) -> None:
    """Another program's SQLite database and its write-ahead log, as left by a killed process."""
    connection = sqlite3.connect(folder / "index.sqlite")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE music (title TEXT)")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.execute("INSERT INTO music VALUES ('a song')")
    connection.commit()
    copies = {name.name: name.read_bytes() for name in folder.iterdir()}
    connection.close()
    write(folder, **copies)
    (folder / "index.sqlite-shm").unlink(missing_ok=True)


FOREIGN = [
    incoming, linked_incoming, dataset, linked_shards, home, repository, locks, database,
]  # fmt: skip
LINKED = ("incoming", "shards", "leases", "supervisor.lock", "ballast")
FEW = {linked_incoming, dataset, database, "sidecars", "incoming"}  # not marked slow


def some(value: Any, few: set[Any]) -> Any:
    """Return a parameter that is marked slow unless it is one of the few."""
    return value if value in few else pytest.param(value, marks=pytest.mark.slow)


@pytest.mark.parametrize("make", [some(make, FEW) for make in FOREIGN])
def test_a_folder_of_somebody_else_stays_as_it_is(
    make: Callable[[Path], None], objects: str, tmp_path: Path
) -> None:
    folder = tmp_path / "outer" / "data"
    folder.mkdir(parents=True)
    make(folder)
    config = config_for(tmp_path / "c", objects)
    before = picture(folder.parent)
    run = ["run", config, "--set", f"cache.path={folder}", "--samples", "8"]
    for words in (run, *(others(folder, tmp_path) if make is database else ())):
        assert_refused(*words)
        assert picture(folder.parent) == before, words
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("make", FOREIGN)
def test_no_other_command_touches_it(make: Callable[[Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "outer" / "data"
    folder.mkdir(parents=True)
    make(folder)
    before = picture(folder.parent)
    for words in others(folder, tmp_path):
        assert_refused(*words)
        assert picture(folder.parent) == before, words


def others(folder: Path, out: Path) -> list[list[str | Path]]:
    """Return the commands that take a cache."""
    return [
        ["clear", folder, "--yes"],
        ["check", folder, "--repair"],
        ["check", folder],
        ["status", folder],
        ["export", folder, out / "out"],
    ]


@pytest.mark.slow
def test_a_service_of_the_trainer_refuses_it_too(objects: str, tmp_path: Path) -> None:
    config = config_for(tmp_path / "data", objects)
    (tmp_path / "data").mkdir()
    incoming(tmp_path / "data")
    before = picture(tmp_path / "data")
    program = f"import growcache\nwith growcache.serve({str(config)!r}): pass"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "is not a growcache cache, and is not empty (it holds incoming)" in done.stderr
    assert picture(tmp_path / "data") == before


@pytest.mark.slow
def test_an_export_goes_into_nothing_of_somebody_else(filled: Path, tmp_path: Path) -> None:
    home(out := tmp_path / "outer" / "data")
    (tmp_path / "outer" / "link").symlink_to(out)
    before = picture(tmp_path / "outer")
    for where in (out, tmp_path / "outer" / "link"):
        assert_refused("export", filled, where)
        assert picture(tmp_path / "outer") == before
    assert growcache("export", filled, tmp_path / "copy").returncode == 0
    assert growcache("check", tmp_path / "copy").returncode == 0
    assert (tmp_path / "copy" / MARKER).exists()


# Directories that are accepted.


def test_what_is_empty_or_ours_is_taken(objects: str, tmp_path: Path) -> None:
    folder = tmp_path / "real"
    (folder / "lost+found").mkdir(parents=True)
    (folder / f".{MARKER}.0123abcd.tmp").write_bytes(b"half a mar")  # left by a killed service
    (tmp_path / "c").symlink_to(folder)
    config = config_for(tmp_path / "c", objects)
    assert growcache("run", config, "--samples", "16").returncode == 0
    assert json.loads((folder / MARKER).read_bytes())["layout"] == 1
    assert status(tmp_path / "c")["samples"] >= 16
    assert not list(folder.glob(".*.tmp"))


@pytest.mark.parametrize("left", [some(left, FEW) for left in ("all", "identity", "sidecars")])
def test_a_cache_without_the_marker_is_known_by_what_is_in_it(
    left: str, cache: Path, objects: str
) -> None:
    config, before = config_for(cache, objects), status(cache)["drawn"]
    (cache / MARKER).unlink()
    for path in list(cache.iterdir()) if left != "all" else ():
        if path.is_file() and path.stem != left:
            path.unlink()
    done = growcache("run", config, "--samples", "8")
    assert done.returncode == 0, done.stderr
    assert (cache / MARKER).exists()
    found = status(cache)
    assert found["drawn"] >= before + 8
    assert growcache("check", cache).returncode == 0


def test_a_damaged_marker_is_mended_and_a_later_layout_is_refused(
    cache: Path, objects: str
) -> None:
    config, marker = config_for(cache, objects), cache / MARKER
    whole = marker.read_bytes()
    marker.write_bytes(whole[:-4])
    assert growcache("check", cache, "--repair").returncode == 0
    assert marker.read_bytes() == whole
    values = {**json.loads(whole), "layout": 3}
    del values["crc32c"]
    crc = google_crc32c.value(orjson.dumps(values, option=orjson.OPT_SORT_KEYS))
    marker.write_bytes(orjson.dumps({**values, "crc32c": f"{crc:08x}"}))
    before = picture(cache)
    readers: list[list[str | Path]] = [["status", cache]]
    for words in (*writers(config, cache)[:2], *readers):
        assert "a newer growcache (layout 3, this one knows 2)" in assert_refused(*words)
        assert picture(cache) == before


# Foreign files in a cache.

STRANGERS = {
    "incoming/thesis.tex": b"years",
    "incoming/a-00000001.npy": b"an array",
    "incoming/photos/a.jpg": b"a photo",
    "incoming/photos.npy/0.npy": b"an array",
    "shards/00000099.npy": b"an array, where a folder of arrays would be",
    "shards/12.tfrecord": b"records",
    "leases/house.lease": b"2,000 a month",
    "leases/.house.tmp": b"2,000 a month",
    ".thesis.tmp": b"a draft",
    "notes.txt": b"notes",
}


@pytest.mark.slow
def test_what_is_not_ours_stays_and_is_named(cache: Path, objects: str) -> None:
    config = config_for(cache, objects)
    write(cache, **STRANGERS)
    for path in cache.rglob("*"):
        if str(path.relative_to(cache)) in STRANGERS:
            os.utime(path, (1e9, 1e9))  # abandoned long ago
    litter = cache / "incoming" / "0123abcd-00000007-0-ef01-00000007.json"
    litter.write_bytes(b"of a sampler that died")
    done = growcache("run", config, "--samples", "8")
    assert done.returncode == 0
    assert f"recovery leaves foreign files in {cache}: '" in done.stderr
    assert not litter.exists()
    assert_there(cache)
    shown = growcache("check", cache, "--repair")
    assert shown.returncode == 0
    tops = {cache.joinpath(*Path(name).parts[:2]) for name in STRANGERS}
    assert [
        path for path in tops if f"{path}: not a file of growcache" not in shown.stdout
    ] == []
    assert_there(cache)
    done = growcache("clear", cache, "--yes")
    assert done.returncode == 0
    assert "Left in place" in done.stdout
    assert_there(cache)
    assert {p.name for p in (cache / "shards").iterdir()} == {"00000099.npy", "12.tfrecord"}
    assert growcache("run", config, "--samples", "8").returncode == 0


@pytest.mark.parametrize(
    "name",
    [
        "mine/data",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("shards/mine", "mine.data")),
    ],
)
def test_what_is_not_ours_counts_in_the_bound(name: str, tmp_path: Path) -> None:
    objects = write_objects(tmp_path / "source", columns=256)
    config, cache = config_for(tmp_path / "c", objects), tmp_path / "c"
    words = ["--set", "cache.max_bytes=6MB"]
    assert growcache("run", config, "--samples", "64", *words).returncode == 0
    write(cache, **{name: os.urandom(4_500_000)})
    done = growcache("run", config, "--until-full", *words)
    assert done.returncode == 0, done.stderr
    assert status(cache)["samples"] > 0
    assert sum(path.lstat().st_blocks for path in (cache, *cache.rglob("*"))) * 512 <= 6_000_000


def assert_there(cache: Path) -> None:
    for name, data in STRANGERS.items():
        assert (cache / name).read_bytes() == data, name


@pytest.mark.parametrize("name", [some(name, FEW) for name in LINKED])
def test_no_link_is_followed(name: str, cache: Path, objects: str, tmp_path: Path) -> None:
    config, precious = config_for(cache, objects), tmp_path / "precious"
    (cache / name).rename(precious)
    (cache / name).symlink_to(precious)
    before = picture(tmp_path)
    for words in writers(config, cache):
        assert f"{cache / name}: expected" in assert_refused(*words)
        assert picture(tmp_path) == before, words


@pytest.mark.slow
def test_folders_of_another_user_are_refused(cache: Path, objects: str) -> None:
    config = config_for(cache, objects)
    if os.geteuid():
        pytest.skip("only root can give a folder away")
    os.chown(cache / "incoming", NOBODY, NOBODY)
    before = picture(cache)
    for words in writers(config, cache):
        assert f"belongs to user {NOBODY}, and this is user 0" in assert_refused(*words)
        assert picture(cache) == before


# Races and crashes.


@pytest.mark.slow
def test_a_folder_that_becomes_a_link_meanwhile_is_not_followed(
    objects: str, tmp_path: Path
) -> None:
    """A directory is replaced by a link after the check at the start; the service ends."""
    config = config_for(tmp_path / "c", objects)
    precious = tmp_path / "precious"
    cache = config.with_suffix("")
    assert growcache("run", config, "--samples", "8").returncode == 0
    shards = {f"shards/{p.name}": p.read_bytes() for p in (cache / "shards").iterdir()}
    write(precious, **shards)
    before = picture(precious)
    with subprocess.Popen(
        command("run", config, "--set", "cache.max_bytes=4MB", "--set", "cache.min_uses=0"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as service:
        while status(cache).get("pid") != service.pid or not status(cache)["workers"]:
            assert service.poll() is None
        for name in ("shards", "incoming"):
            (cache / name).rename(cache / f"{name}.moved")
            (cache / name).symlink_to(precious / "shards")
        _, said = service.communicate(timeout=300)
    assert service.returncode == 1
    assert "Traceback" not in said
    assert picture(precious) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "nth"),
    [("mkdir", 1), ("rename", 1), ("fsync", 2), ("mkdir", 2), ("flock", 1), ("pwrite64", 1)],
)
def test_a_cache_that_was_half_made_starts_by_itself(
    call: str, nth: int, objects: str, tmp_path: Path
) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed (Debian: apt-get install strace)")
    config = config_for(tmp_path / "c", objects)
    words = ["strace", "-qq", "-o", os.devnull, "-e", f"trace={call}"]
    words += ["-e", f"inject={call}:signal=SIGKILL:when={nth}"]
    killed = subprocess.run([*words, *command("run", config, "--samples", "8")], check=False)
    assert killed.returncode
    done = growcache("run", config, "--samples", "8")
    assert (done.returncode, done.stderr) == (0, "")
    assert status(config.with_suffix(""))["samples"] >= 8
