"""kill -9 at system calls of a real supervisor and of a real sampler; the next one finishes the work.

Both are processes of `growcache run`. The result is compared byte for byte with the
shards of an undisturbed service.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from growcache.cache.check import check
from growcache.cache.files import CacheLayout
from growcache.cache.index.reader import IndexView, read_index
from growcache.errors import CacheMissingError
from tests.crash import tracing
from tests.crash.tracing import CHANGING, Call, need_strace
from tests.sampling.services import make_source, run, write_config

OBJECTS = 60
SECONDS = 1200
EVERY = 12  # of a supervisor's calls, in the long run

# What a sampler does to the disk and says to its supervisor, by thread.
OF_A_SAMPLER = [
    (name, nth)
    for name in ("mkdir", "openat", "fallocate", "writev", "fsync", "write")
    for nth in ((1, 2, 3, 4) if name != "mkdir" else (1, 2))
]


def _config(folder: Path, cache_format: str) -> Path:
    url = str(folder.parent / "objects" / "*.npy")
    return write_config(
        folder / "cache.yaml",
        url,
        sampling={"workers": 1, "shard_samples": 8},
        cache={"path": str(folder / "cache"), "format": cache_format, "max_bytes": "20MB"},
    )


@pytest.fixture(scope="module", params=["npy"])
def undisturbed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, str]]:
    """A folder with a source, and `whole`, a cache that was filled in peace."""
    need_strace()
    folder = tmp_path_factory.mktemp("services")
    make_source(folder / "objects", OBJECTS)
    (folder / "whole").mkdir()
    assert run(_config(folder / "whole", request.param), "--until-full") == (0, "")
    yield folder, request.param
    shutil.rmtree(folder)


def _marks(some: int | None) -> Any:
    return [] if some else [pytest.mark.slow, pytest.mark.timeout(SECONDS)]


@pytest.mark.parametrize("some", [1, pytest.param(None, marks=_marks(None))])
def test_a_supervisor_killed_at_a_call(undisturbed: tuple[Path, str], some: int | None) -> None:
    folder, cache_format = undisturbed
    log = folder / "log"
    _traced_run(_fresh(folder, cache_format), f"trace={CHANGING}", "-y", "-o", str(log))
    calls = [call for call in tracing.calls_in(log, folder / "life") if _counts(call)]
    assert len(calls) > 100
    points = random.sample(calls, some) if some else calls[random.randrange(EVERY) :: EVERY]
    reached = 0
    for call in points:
        config = _fresh(folder, cache_format)
        code = _traced_run(config, f"inject={call.name}:signal=SIGKILL:when={call.nth}")
        reached += tracing.died(code)
        _finishes(folder, config, f"supervisor killed at {call}")
    assert reached >= len(points) - len(points) // 10, "few of these calls were made again"


@pytest.mark.parametrize("some", [1, pytest.param(None, marks=_marks(None))])
def test_a_sampler_killed_at_a_call(undisturbed: tuple[Path, str], some: int | None) -> None:
    folder, cache_format = undisturbed
    points = random.sample(OF_A_SAMPLER, some) if some else OF_A_SAMPLER
    for name, nth in points:
        config = _fresh(folder, cache_format)
        once, python = config.parent / "once", config.parent / "python"
        inject = (
            f"-f -qq -o /dev/null -e trace={name} -e inject={name}:signal=SIGKILL:when={nth}"
        )
        python.write_text(
            f'#!/bin/sh\nmkdir {once} 2>/dev/null && exec strace {inject} {sys.executable} "$@"\n'
            f'exec {sys.executable} "$@"\n'
        )
        python.chmod(0o700)
        # The service starts its samplers with this "Python", the first one under strace.
        program = (
            f"import sys; sys.executable = {str(python)!r}\n"
            "from growcache.cli.cli import main; main()"
        )
        command = [sys.executable, "-c", program, "run", str(config), "--until-full"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"{name}#{nth}: {done.stderr}"
        assert once.exists()
        _right(folder, config, f"sampler killed at {name}#{nth}")


def _fresh(folder: Path, cache_format: str) -> Path:
    shutil.rmtree(folder / "life", ignore_errors=True)
    (folder / "life").mkdir()
    return _config(folder / "life", cache_format)


def _counts(call: Call) -> bool:
    # Status and metrics are written by the clock.
    by_clock = any(
        name in path for path in call.paths for name in ("status.json", "metrics.json")
    )
    return call.result >= 0 and not by_clock


def _traced_run(config: Path, what: str, *more: str) -> int:
    """Run the service, its supervisor's one thread that owns the cache under strace."""
    command = ["strace", "-qq", "-e", what, *(more or ("-o", "/dev/null"))]
    if what.startswith("inject"):
        command += ["-e", "trace=" + what.split("=")[1].split(":")[0]]
    command += [sys.executable, "-m", "growcache", "run", str(config), "--until-full"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


def _dead(root: Path, where: str) -> IndexView:
    try:
        view = read_index(root)
    except CacheMissingError:
        return IndexView()
    assert [f for f in check(root) if f.severity == "error"] == [], where
    return view


def _finishes(folder: Path, config: Path, where: str) -> None:
    root = config.parent / "cache"
    dead = _dead(root, where)
    assert run(config, "--until-full") == (0, ""), where
    now = {row.number: row.digest for row in read_index(root).shards}
    assert {row.number: row.digest for row in dead.shards}.items() <= now.items(), where
    _right(folder, config, where)


def _right(folder: Path, config: Path, where: str) -> None:
    root = config.parent / "cache"
    view, whole = read_index(root), read_index(folder / "whole" / "cache")
    assert view.totals.drawn_shards == whole.totals.drawn_shards, where
    assert view.totals.drawn == view.totals.samples == OBJECTS, where
    assert view.totals.lost_shards == 0, where
    assert _files(root) == _files(folder / "whole" / "cache"), where
    assert check(root) == [], where
    assert not list(CacheLayout(root).incoming.iterdir()), where


def _files(root: Path) -> dict[str, bytes]:
    """Every file of every shard, with its bytes."""
    shards = CacheLayout(root).shards
    return {
        str(path.relative_to(shards)): path.read_bytes()
        for path in shards.rglob("*")
        if path.is_file()
    }
