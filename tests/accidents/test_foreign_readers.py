"""Readers of other users, and foreign entries in the lease directory, end neither side."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.accidents.commands import (
    command,
    growcache,
    message_of,
    rows_of,
    status,
    wait_for_status,
    wait_until,
    write_config,
    write_objects,
)
from tests.accidents.trainers import loading, trainer
from tests.accidents.users import can_be_others, done_as, started

pytestmark = [
    pytest.mark.skipif(not can_be_others(), reason="needs rights to be another user"),
]

SERVICE, OTHER = 12345, 23456
TAKE = "import sys, growcache; growcache.Snapshot.take(sys.argv[1])"


@pytest.fixture(scope="module")
def open_folder() -> Iterator[Path]:
    """A directory that other users can read."""
    folder = Path(tempfile.mkdtemp(prefix="growcache-users-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def config(open_folder: Path) -> Path:
    url = write_objects(open_folder / "in", count=24, rows=16, columns=4096)
    home = open_folder / "service"
    home.mkdir()
    os.chown(home, SERVICE, SERVICE)
    made = write_config(
        home / "cache.yaml",
        rows_of(url),
        # Without a limit, a service that draws without end takes a whole core.
        sampling={"shard_samples": 8, "max_bytes_per_second": "10MB"},
        cache={"max_bytes": "4MB", "min_uses": 0},
    )
    os.chown(made, SERVICE, SERVICE)
    for path in (open_folder / "in").iterdir():
        path.chmod(0o644)
    return made


@pytest.fixture
def cache(config: Path) -> Iterator[Path]:
    """A cache at its bound, with a service that does not run as root."""
    path = config.with_suffix("")
    with at_its_bound(config):
        yield path


@contextmanager
def at_its_bound(config: Path) -> Iterator[None]:
    """Run the service, and check that it survives the block."""
    errors, begin = config.with_suffix(".stderr"), time.time()
    with started(SERVICE, command("run", config), errors) as service:
        # Recovery removes torn leases, so wait for a status of this service, not of the last one.
        wait_for_status(
            config.with_suffix(""),
            lambda found: found["evicted_samples"] > 0 and found["updated_at"] > begin,
        )
        yield
        assert service.poll() is None, errors.read_text()
        assert "Traceback" not in errors.read_text()


def is_drawing(cache: Path) -> None:
    before = status(cache)["drawn"]
    wait_for_status(cache, lambda found: found["drawn"] > before + 40)


def test_a_reader_that_is_root_is_heeded_as_any(cache: Path) -> None:
    """A trainer in a container often runs as root while the service does not."""
    with trainer(cache, loading(job="root"), "next(batches)") as loop:
        loop.ask("say()")
        found = [one for one in status(cache)["leases"] if one["job"] == "root"]
        assert {(one["open"], one["shards"] > 0) for one in found} == {(True, True)}
        assert status(cache)["foreign_leases"] == []
        assert loop.ask("say(sum(len(batch['x']) for batch in batches) > 0)") == [True]
    is_drawing(cache)


@pytest.mark.slow
def test_another_user_is_refused_in_one_line(cache: Path) -> None:
    done = done_as(OTHER, [sys.executable, "-c", TAKE, str(cache)])
    last = message_of(done.stderr)
    assert f"uid {SERVICE}" in last, done.stderr
    assert f"uid {OTHER}" in last
    for name in ("status", "release"):
        done = done_as(OTHER, command(name, cache))
        assert done.returncode == 2, done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def put(path: Path, content: bytes = b"", *, mode: int = 0o600, uid: int = OTHER) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    os.chown(path, uid, uid)
    return path


def named(cache: Path) -> dict[str, Any]:
    """Return the unreadable leases that `status` reports to the service's user, by name."""
    done = done_as(SERVICE, command("status", cache, "--json"))
    assert done.returncode == 0, done.stderr
    return {one["name"]: one for one in json.loads(done.stdout)["foreign_leases"]}


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold a file as a reader holds its lease."""
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    path.unlink(missing_ok=True)


def files(cache: Path) -> set[str]:
    return {path.name for path in (cache / "shards").iterdir()}


def seen_files(cache: Path) -> set[str]:
    """Return the shard files that remain once the service has scanned the current leases."""
    now = time.time()
    wait_for_status(cache, lambda found: found["updated_at"] > now + 0.5)
    return files(cache)


def has_gone_on(cache: Path) -> None:
    """Wait until the service has drawn and evicted all that the leases permit."""
    before = status(cache)["drawn"]
    wait_for_status(
        cache, lambda now: now["drawn"] > before + 160 or now["state"] in ("waiting", "full")
    )


@pytest.mark.parametrize("uid", [OTHER, pytest.param(SERVICE, marks=pytest.mark.slow)])
def test_what_cannot_be_read_and_is_held_protects_and_is_named(cache: Path, uid: int) -> None:
    """Another user's lease, and a lease of a later version."""
    before = files(cache)
    path = put(cache / "leases" / f"{'a' * 32}.lease", b"GCLEASE9" + bytes(900), uid=uid)
    with held(path):
        there = before & seen_files(cache)
        found = named(cache)[path.name]
        assert (found["uid"], found["pid"], found["held"]) == (uid, os.getpid(), True)
        assert ("one user" in found["advice"]) == (uid == OTHER)
        has_gone_on(cache)
        assert there <= files(cache)
        shown = growcache("status", cache).stdout
        assert f"uid {uid}, pid {os.getpid()}" in shown
    is_drawing(cache)
    wait_until(lambda: not there & files(cache))


@pytest.fixture
def strange(config: Path) -> Iterator[list[str]]:
    """Entries of the lease directory that are no valid lease; yield their names."""
    leases, outside = config.with_suffix("") / "leases", config.parent / "outside"
    outside.write_bytes(b"foreign")
    leases.mkdir(parents=True, exist_ok=True)
    for folder in (leases.parent, leases):
        os.chown(folder, SERVICE, SERVICE)
    put(leases / f"{'b' * 32}.lease")
    put(leases / f"{'c' * 32}.lease", b"GCLEASE9" + bytes(900), mode=0o644, uid=SERVICE)
    put(leases / f".{'d' * 32}.tmp", b"x")
    (leases / f"{'e' * 32}.lease").symlink_to(outside)
    os.mkfifo(leases / f"{'f' * 32}.lease")
    (leases / f"{'0' * 32}.lease").mkdir()
    yield [f"{letter * 32}.lease" for letter in "bcef0"]
    assert outside.read_bytes() == b"foreign"
    shutil.rmtree(leases / f"{'0' * 32}.lease")
    for path in leases.iterdir():
        path.unlink()


@pytest.mark.slow
def test_what_is_no_lease_ends_nothing(cache: Path, strange: list[str]) -> None:
    is_drawing(cache)
    found = named(cache)
    assert set(strange) <= found.keys()
    assert not any(one["held"] for one in found.values())
    for name in ("status", "check", "release"):
        done = done_as(SERVICE, command(name, cache))
        assert (done.returncode, done.stderr) == (0, ""), name


@pytest.fixture
def filled_before(config: Path) -> None:
    """Leave a cache behind: a service refuses a directory that holds only strange files."""
    if not (config.with_suffix("") / "growcache.json").exists():
        with at_its_bound(config):
            pass


@pytest.mark.slow
def test_a_start_with_all_of_that_is_a_start(
    filled_before: None, strange: list[str], config: Path
) -> None:
    with at_its_bound(config):
        is_drawing(config.with_suffix(""))


@pytest.mark.slow
def test_a_read_only_mount_is_refused_in_one_line(cache: Path) -> None:
    mount = f'mount --bind {cache} {cache} && mount -o remount,ro,bind {cache} && exec "$@"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, "-c", TAKE, str(cache)],
        capture_output=True,
        text=True,
        check=False,
    )
    if "mount:" in done.stderr or "unshare:" in done.stderr:
        pytest.skip("nothing can be mounted here")
    assert "mount the cache's folder writable" in message_of(done.stderr)
