"""A user error ends a script with a traceback of the user's lines only, and the message."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.accidents.commands import growcache, message_of, write_config, write_objects

MAKING = """
from {door} import EpochLoader
EpochLoader("cache", batch_size=0)
"""
ITERATING = """
from {door} import EpochLoader
def train():
    for batch in EpochLoader({cache!r}, batch_size=10**6, min_samples=1, gather={gather!r}):
        pass
train()
"""
SERVING = """
import growcache
with growcache.serve({{"source": {{"url": "x"}}, "caches": 1}}):
    pass
"""
SERVING_NOTHING = """
import growcache
from {door} import EpochLoader
folder = {cache!r} + "/none"
values = {{"source": {{"url": folder + "/*.npy"}}, "cache": {{"path": folder + "2", "max_bytes": "1GB"}}}}
with growcache.serve(values) as config:
    for batch in EpochLoader(config.cache.path, batch_size=8):
        pass
"""
TENSORFLOW = """
import growcache.tensorflow as gtf
gtf.dataset({cache!r}, batch_size=8, ragged="list")
"""
DEFECT = """
from {door} import EpochLoader
def broken(sample):
    return sample["no such field"]
for batch in EpochLoader({cache!r}, batch_size=8, min_samples=1, transform=broken):
    pass
"""
NUMPY = "growcache.numpy"
TORCH = pytest.param("growcache.torch", marks=pytest.mark.torch)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    source = {"url": write_objects(folder / "in", count=8), "format": "npy"}
    config = write_config(folder / "c.yaml", {**source, "options": {"axis": 0}})
    assert growcache("run", config, "--until-full").returncode == 0
    return config.with_suffix("")


def errors_of(folder: Path, program: str, **environment: str) -> list[str]:
    """Run a script that fails; return the lines of its traceback."""
    script = folder / "train.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" in done.stderr
    return done.stderr[done.stderr.index("Traceback") :].splitlines()


def files(lines: list[str]) -> list[str]:
    """Return the files that a traceback names."""
    return [line.split('"')[1] for line in lines if line.startswith('  File "')]


@pytest.mark.parametrize(
    ("program", "error", "frames"),
    [
        pytest.param(MAKING, "ConfigError: batch_size", 1, marks=pytest.mark.slow),
        (ITERATING, "ConfigError: all 128 samples", 2),
        pytest.param(SERVING, "ConfigError: ", 1, marks=pytest.mark.slow),
        (SERVING_NOTHING, "CacheError: ", 1),
    ],
)
def test_it_ends_with_the_users_line(
    cache: Path, tmp_path: Path, program: str, error: str, frames: int
) -> None:
    values = {"door": NUMPY, "cache": str(cache), "gather": "process"}
    lines = errors_of(tmp_path, program.format(**values))
    assert files(lines) == [str(tmp_path / "train.py")] * frames, "\n".join(lines)
    assert f"growcache.errors.{error}" in "\n".join(lines[-8:])


def test_a_variable_asks_for_the_whole_traceback(cache: Path, tmp_path: Path) -> None:
    program = ITERATING.format(door=NUMPY, cache=str(cache), gather="process")
    whole = errors_of(tmp_path, program, GROWCACHE_TRACEBACK="1")
    assert any("growcache" in name for name in files(whole))


@pytest.mark.slow
@pytest.mark.torch
def test_of_torch(cache: Path, tmp_path: Path) -> None:
    values = {"door": "growcache.torch", "cache": str(cache), "gather": "thread"}
    lines = errors_of(tmp_path, ITERATING.format(**values))
    assert files(lines) == [str(tmp_path / "train.py")] * 2, "\n".join(lines)


@pytest.mark.slow
@pytest.mark.tensorflow
def test_of_tensorflow(cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    lines = errors_of(tmp_path, TENSORFLOW.format(cache=str(cache)))
    assert files(lines) == [str(tmp_path / "train.py")], "\n".join(lines)
    assert "ConfigError: ragged" in message_of("\n".join(lines))


def test_a_defect_is_shown_whole(cache: Path, tmp_path: Path) -> None:
    lines = errors_of(tmp_path, DEFECT.format(door=NUMPY, cache=str(cache)))
    assert any("growcache" in name for name in files(lines))
    assert files(lines)[-1] == str(tmp_path / "train.py")
    assert "KeyError: 'no such field'" in "\n".join(lines)
