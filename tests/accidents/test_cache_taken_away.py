"""A service ends with a one-line error if its cache is damaged or its disk is unsuitable."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.accidents.commands import (
    Running,
    command,
    growcache,
    is_gone,
    message_of,
    rows_of,
    running,
    status,
    wait_for_status,
    wait_until,
    write_config,
    write_objects,
)
from tests.accidents.trainers import Trainer, loading, trainer
from tests.disks import small_disk

ENDLESS = "batches = (batch for _ in range(10**6) for batch in loader)"
BATCH = "say(len(next(batches)['x']))"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    source = rows_of(write_objects(tmp_path / "in"))
    return write_config(tmp_path / "c" / "c.yaml", source, cache={"min_uses": 0})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()


def started(service: Running, cache: Path) -> None:
    """Wait until the service draws."""
    wait_for_status(cache, lambda found: found["drawn"] and found["pid"] == service.process.pid)


def ends_with_one_line(service: Running) -> str:
    """Wait until the service fails with a one-line error; return the line."""
    assert service.process.wait(30) == 1, service.errors
    said = service.errors.strip()
    assert said.count("\n") == 0, said
    assert "Traceback" not in said
    return said


# Each function damages a cache; CASES maps it to the expected message.


def removed(cache: Path) -> None:
    shutil.rmtree(cache, ignore_errors=True)  # files written meanwhile may stay
    if cache.exists():
        cache.rename(cache.with_name("rest"))


def moved(cache: Path) -> None:
    cache.rename(cache.with_name("moved"))


def replaced_by_nothing(cache: Path) -> None:
    moved(cache)
    cache.mkdir()


def replaced_by_a_copy(cache: Path) -> None:
    """Replace the cache by a copy taken while the service ran: its index still has a log."""
    coming_and_going = shutil.ignore_patterns("*.tmp", "*-*-*-*")
    shutil.copytree(cache, cache.with_name("copy"), ignore=coming_and_going)
    moved(cache)
    cache.with_name("copy").rename(cache)


def index_deleted(cache: Path) -> None:
    (cache / "index.sqlite").unlink()


def index_replaced(cache: Path) -> None:
    shutil.copy(cache / "index.sqlite", cache / "copy")
    (cache / "copy").rename(cache / "index.sqlite")


def lock_deleted(cache: Path) -> None:
    (cache / "supervisor.lock").unlink()


def shards_deleted(cache: Path) -> None:
    shutil.rmtree(cache / "shards", ignore_errors=True)
    if (cache / "shards").exists():
        (cache / "shards").rename(cache / "rest")


def incoming_deleted(cache: Path) -> None:
    (cache / "incoming").rename(cache / "rest")


DIRECTORY = "was removed, moved or replaced while the service ran"
INSIDE = "was removed or replaced while the service ran"
CASES: dict[Callable[[Path], None], str] = {
    removed: "while the service ran",  # names the first path found missing
    moved: DIRECTORY,
    replaced_by_nothing: DIRECTORY,
    replaced_by_a_copy: DIRECTORY,
    index_deleted: f"index.sqlite {INSIDE}",
    index_replaced: f"index.sqlite {INSIDE}",
    lock_deleted: f"supervisor.lock {INSIDE}",
    shards_deleted: f"shards {INSIDE}",
    incoming_deleted: f"incoming {INSIDE}",
}
FEW = {removed}


@pytest.mark.parametrize(
    "harm", [c if c in FEW else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
def test_a_service_ends_when_its_cache_is_taken_away(
    harm: Callable[[Path], None], config: Path
) -> None:
    cache = config.with_suffix("")
    with running(config) as service:
        started(service, cache)
        harm(cache)
        there = sorted(cache.rglob("*")) if "replaced_by" in harm.__name__ else None
        assert CASES[harm] in ends_with_one_line(service)
        if there is not None:
            assert sorted(cache.rglob("*")) == there, "the service wrote into the new directory"
    shown = growcache("status", cache)
    assert "Traceback" not in shown.stderr
    assert shown.returncode in (0, 2)
    assert "running" not in shown.stdout
    shutil.rmtree(cache / "rest", ignore_errors=True)
    done = growcache("run", config, "--until-full")
    assert (done.returncode, done.stderr) == (0, "")
    assert growcache("check", cache).returncode == 0
    assert status(cache)["samples"] >= 16


VANISHING = """
import pathlib, runpy, sys
rename = pathlib.Path.rename
def vanish(self, target):
    if target.name == "issued":
        self.unlink()
    return rename(self, target)
pathlib.Path.rename = vanish
sys.argv = ["growcache", "run", sys.argv[1]]
runpy.run_module("growcache", run_name="__main__")
"""


def test_a_removed_temporary_file_is_a_cache_taken_away(config: Path) -> None:
    """Whoever removes the directory may have removed no other file so far."""
    program = [sys.executable, "-c", VANISHING, str(config)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done
    assert re.search(rf"/c/\.issued\.[0-9a-f]{{8}}\.tmp {INSIDE}", done.stderr), done


@contextmanager
def reading(front: str, cache: Path) -> Iterator[Trainer]:
    """A loader that makes one batch per request, epoch after epoch."""
    options = loading(front, batch_size=4, min_samples=32, seed=0)
    with trainer(cache, options, ENDLESS, stderr=subprocess.PIPE) as reader:
        yield reader


@pytest.mark.parametrize("front", ["numpy", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_loader_of_a_cache_that_is_removed_says_so(front: str, config: Path) -> None:
    pytest.importorskip(front)
    cache = config.with_suffix("")
    assert growcache("run", config, "--samples", "128").returncode == 0
    with reading(front, cache) as reader:
        assert reader.ask(BATCH) == [4]
        removed(cache)
        batches: list[list[int]] = []
        with pytest.raises(AssertionError, match="the trainer ended with 1"):
            batches.extend(iter(lambda: reader.ask(BATCH), None))
        assert reader.process.stderr is not None
        said = reader.process.stderr.read()
    assert batches  # batches made ahead from mapped shards are still delivered
    *_, error, code = said.strip().splitlines()
    assert f"CacheMissingError: the cache at {cache} was removed while it was read" in error, (
        said
    )
    assert code == "(GC401; growcache explain GC401)"


@pytest.mark.slow
@pytest.mark.parametrize("front", ["numpy", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_loader_goes_on_when_the_index_is_made_again(front: str, config: Path) -> None:
    pytest.importorskip(front)
    cache = config.with_suffix("")
    assert growcache("run", config, "--samples", "128").returncode == 0
    with reading(front, cache) as reader:
        assert reader.ask(BATCH) == [4]
        index_deleted(cache)
        assert growcache("run", config, "--samples", "16").returncode == 0
        for _ in range(100):  # several epochs
            assert reader.ask(BATCH) == [4]


# Unsuitable disks.


@pytest.mark.slow
def test_a_file_system_without_locks_is_refused_in_one_line(config: Path) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed (Debian: apt-get install strace)")
    cache = config.with_suffix("")
    for error in ("ENOLCK", "EOPNOTSUPP"):
        done = without_flock(error, "run", config)
        assert done.returncode == 2, done
        assert done.stderr.count("\n") == 1, done
        assert "does not support locks (flock: " in done.stderr
    assert growcache("run", config, "--samples", "16").returncode == 0
    done = without_flock("ENOSYS", "status", cache)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done
    assert "does not support locks (flock: " in done.stderr


def without_flock(error: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command with every `flock` call failing."""
    strace = ["strace", "-f", "-qq", "-o", os.devnull, "-e", "trace=flock"]
    strace += ["-e", f"inject=flock:error={error}"]
    return subprocess.run(
        [*strace, *command(*words)], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize(
    "parts",
    [[200] * 3, *(pytest.param(p, marks=pytest.mark.slow) for p in ([250] * 17, [300]))],
)
def test_a_path_that_is_too_long_is_said_so(parts: list[int], config: Path) -> None:
    deep = "/".join([str(config.parent), *("x" * length for length in parts)])
    commands = [["status", deep], ["check", deep], ["clear", deep, "--yes"]]
    for words in (["run", str(config), "--set", f"cache.path={deep}"], *commands):
        done = growcache(*words)
        assert done.returncode == 2, done
        assert 1 <= done.stderr.strip().count("\n") + 1 <= 2, done
        assert "Traceback" not in done.stderr
        assert "too long" in done.stderr or (words in commands and parts == [200] * 3), done
    program = "import sys; from growcache.numpy import EpochLoader; EpochLoader(sys.argv[1], batch_size=4)"
    if parts != [200] * 3:  # this path is legal, so the loader would wait for a cache
        loader = subprocess.run(
            [sys.executable, "-c", program, deep], capture_output=True, text=True, check=False
        )
        assert "too long" in message_of(loader.stderr)


@pytest.mark.slow
def test_a_path_just_short_enough_works(config: Path) -> None:
    deep = config.parent / ("x" * 200)
    deep /= "x" * (504 - len(f"{deep}//index.sqlite"))  # SQLite's limit
    done = growcache("run", config, "--set", f"cache.path={deep}", "--samples", "16")
    assert (done.returncode, done.stderr) == (0, "")
    assert status(deep)["samples"] >= 16


@pytest.mark.slow
def test_a_disk_that_turns_read_only_ends_the_service(config: Path, tmp_path: Path) -> None:
    """ext4 remounts read-only after a disk error."""
    with small_disk(tmp_path / "disk", 64 << 20, "ext4") as disk:
        device = Path(
            next(
                line.split()[0]
                for line in Path("/proc/mounts").read_text().splitlines()
                if line.split()[1] == str(disk)
            )
        )
        fail = Path("/sys/fs/ext4") / device.name / "trigger_fs_error"
        subprocess.run(["mount", "-o", "remount,errors=remount-ro", str(disk)], check=True)
        cache = disk / "cache"
        with running(config, "--set", f"cache.path={cache}") as service:
            started(service, cache)
            fail.write_text("tried by growcache's tests")
            said = ends_with_one_line(service).lower()
            # A write at that very moment fails with an I/O error instead.
            words = ("read-only", "readonly", "i/o error", "input/output error")
            assert any(word in said for word in words), said
        shown = growcache("status", cache)
        assert "Traceback" not in shown.stderr
        assert "running" not in shown.stdout


@pytest.mark.slow
def test_it_ends_with_its_trainer_as_well(config: Path) -> None:
    """A service that a trainer started reports its end to the trainer, which continues."""
    program = (
        "import sys, growcache\n"
        "with growcache.serve(sys.argv[1]) as config:\n"
        "    print(1, flush=True); sys.stdin.readline()\n"
        "print('went on', flush=True)"
    )
    cache = config.with_suffix("")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        [sys.executable, "-c", program, str(config)],
        text=True,
        **pipes,  # type: ignore[call-overload]
    ) as trainer:
        assert trainer.stdout.readline() == "1\n"
        pid = wait_for_status(cache, lambda found: found["drawn"])["pid"]
        index_deleted(cache)
        wait_until(lambda: is_gone(pid))
        said, errors = trainer.communicate("\n", timeout=300)
    assert (trainer.returncode, said) == (0, "went on\n")
    assert errors.count("\n") == 1
    assert f"the sampling service stopped: {cache}/index.sqlite was removed" in errors


@pytest.mark.slow
def test_a_clean_stop_still_is_one(config: Path) -> None:
    with running(config) as service:
        started(service, config.with_suffix(""))
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(30) == 0
        assert service.errors == ""
    assert status(config.with_suffix(""))["state"] == "stopped"
