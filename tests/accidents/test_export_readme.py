"""The programs in an export's README run as they are in the export's folder."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.accidents.commands import growcache, rows_of, write_config, write_objects


def exported(folder: Path, source: dict[str, Any], *arguments: str) -> Path:
    """Fill a small cache, export it, and return the export's folder."""
    config = write_config(folder / "c.yaml", source)
    assert growcache("run", config, "--until-full").returncode == 0
    out = folder / "copies" / "a copy"
    out.parent.mkdir()
    done = growcache("export", config.with_suffix(""), out, *arguments)
    assert done.returncode == 0, done.stderr
    return out


def programs(readme: Path) -> list[str]:
    """Return the programs of a README."""
    return re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)


def run(program: str, folder: Path) -> str:
    """Run a program in a folder; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, (program, done.stderr)
    return done.stdout


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.skipif(find_spec("torch") is None, reason="needs the extra torch")
def test_all_programs_run_in_the_folder_of_an_npy_export(tmp_path: Path) -> None:
    url = write_objects(tmp_path / "in", count=4)
    source = rows_of(url)
    out = exported(tmp_path, source, "--format", "npy")
    reading, loading = programs(out / "README.md")
    count = "\nprint(sum(len(a['x']) for a in [arrays]))"
    assert int(run(reading + count, out)) > 0
    assert "'x': 64" in run(loading, out)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.tensorflow
@pytest.mark.skipif(find_spec("torch") is None, reason="needs the extra torch")
@pytest.mark.skipif(find_spec("tensorflow") is None, reason="needs the extra tensorflow")
def test_all_programs_run_in_the_folder_of_a_tfrecord_export(tmp_path: Path) -> None:
    url = write_objects(tmp_path / "in", count=4)
    out = exported(tmp_path, rows_of(url))
    reading, loading = programs(out / "README.md")
    assert run(reading + "\nprint(sum(1 for _ in dataset))", out).split()[-1] == "64"
    assert "'x': 64" in run(loading, out)
