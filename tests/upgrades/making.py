"""What the caches of earlier versions were filled from, the same on every machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.golden.making import write_npy

CACHES = Path(__file__).with_name("caches")
# A catalog has the whole paths of its objects, so these are the same wherever a cache was filled.
FOLDER = Path("/tmp/growcache-upgrades")
OBJECTS, DRAWN = 12, 60  # samples that are drawn before a cache is kept
MTIME = 1_700_000_000  # a listing has it, and an object with another one was rewritten
CODE = '''
"""A transform of fixed bytes: its digest is part of every fingerprint."""


def doubled(sample):
    x = sample["x"]
    return {"x": 2 * x, "sum": x.sum()}  # any rows
'''
CONFIG = """
source: {{url: "{objects}/*.npy", format: npy, options: {{window: 1}}}}
sampling: {{seed: 3, shard_samples: 8, workers: 1, transform: "upgrade_code:doubled"}}
cache: {{path: {name}, max_bytes: 16MB, format: {form}, min_free: 0}}
"""
CONFIGS = {
    "records": CONFIG.format(objects=FOLDER, name="records", form="tfrecord"),
    "arrays": CONFIG.format(objects=FOLDER, name="arrays", form="npy"),
}


def rows(number: int) -> npt.NDArray[np.float32]:
    count = 4 + 3 * number
    return np.arange(count * 4, dtype=np.float32).reshape(count, 4) + 1000 * number


def write_inputs(work: Path) -> None:
    if not FOLDER.exists():
        write_objects()
    (work / "upgrade_code.py").write_text(CODE)
    for name, text in CONFIGS.items():
        (work / f"{name}.yaml").write_text(text)


def write_objects() -> None:
    """Write them all or, where another test does so at the same moment, none."""
    made = Path(tempfile.mkdtemp(dir=FOLDER.parent))
    for number in range(OBJECTS):
        path = made / f"{number:02}.npy"
        write_npy(path, rows(number))
        os.utime(path, (MTIME, MTIME))
    made.chmod(0o755)
    try:
        made.rename(FOLDER)
    except OSError:
        shutil.rmtree(made)


def run_growcache(
    work: Path, name: str, *more: str, tree: Path | None = None
) -> subprocess.CompletedProcess[str]:
    paths = [str(tree or Path(__file__).parents[2]), str(work)]
    return subprocess.run(
        [sys.executable, "-m", "growcache", "run", f"{name}.yaml", *more],
        cwd=work,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def unpack(kept: Path, work: Path) -> None:
    """Put a kept cache among its inputs, as the directory that its configuration names."""
    with tarfile.open(kept) as files:
        files.extractall(work, filter="data")
