"""E1's task: which project a window of 4 KiB of Python source is from, in files that training has not seen.

The files are those of pinned wheels. A quarter of a project's files are the test, the same ones for
every seed. An object holds windows of one project, whose folder names it: `scipy/000.bin`.
"""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.accuracy.wheels import wheel

Windows = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]

WINDOW = 4096
PROJECTS = (
    "aeon==1.6.0",
    "altair==6.3.0",
    "bokeh==3.9.2",
    "botocore==1.43.117",
    "django==5.2.19",
    "holoviews==1.23.2",
    "matplotlib==3.11.2",
    "networkx==3.6.1",
    "nltk==3.10.4",
    "numpy==2.4.6",
    "pandas==3.1.1",
    "panel==1.9.4",
    "plotly==7.1.0",
    "pyarrow==26.0.1",
    "scikit_image==0.26.0",
    "scikit_learn==1.9.1",
    "scipy==1.17.1",
    "sphinx==9.0.4",
    "statsmodels==0.15.0",
    "streamlit==1.67.0",
)
TEST_SHARE = 0.25  # of the files
MOST, MOST_TEST = 1_500, 100  # windows of a project
PER_OBJECT = 64


class Fragments(NamedTuple):
    """Windows [count, 4096], and the number of each one's project."""

    windows: Windows
    labels: Numbers


def fragments() -> tuple[Fragments, Fragments]:
    """Return the windows to train on, 77 MB in the order of projects, and those of the test."""
    random = np.random.default_rng(0)
    training: list[list[bytes]] = []
    test: list[list[bytes]] = []
    for project in PROJECTS:
        files = list(_sources(wheel(project)))
        held_out = set(random.permutation(len(files))[: round(TEST_SHARE * len(files))])
        split = [[], []]  # type: list[list[bytes]]
        for number, data in enumerate(files):
            split[number in held_out].extend(_cut(data))
        training.append(_some(split[False], MOST, random))
        test.append(_some(split[True], MOST_TEST, random))
    return _labelled(training), _labelled(test)


def write_objects(samples: Fragments, folder: Path) -> None:
    """Write the windows as objects of a project each."""
    for number, project in enumerate(PROJECTS):
        home = folder / project.partition("==")[0]
        home.mkdir(parents=True)
        windows = samples.windows[samples.labels == number]
        for part, start in enumerate(range(0, len(windows), PER_OBJECT)):
            windows[start : start + PER_OBJECT].tofile(home / f"{part:03}.bin")


def write_table(folder: Path, table: Path) -> None:
    """Write which object of the folder is of which project."""
    names = [project.partition("==")[0] for project in PROJECTS]
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("path", "y", "windows"))
        for path in sorted(folder.rglob("*.bin")):
            key = path.relative_to(folder)
            windows = path.stat().st_size // WINDOW
            writer.writerow((key, names.index(key.parts[0]), windows))


def _sources(archive: Path) -> Iterator[bytes]:
    """Yield the Python sources that are long enough for a window."""
    with zipfile.ZipFile(archive) as opened:
        for name in sorted(opened.namelist()):
            if name.endswith(".py") and opened.getinfo(name).file_size >= WINDOW:
                yield opened.read(name)


def _cut(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data) - WINDOW + 1, WINDOW):
        yield data[start : start + WINDOW]


def _some(windows: list[bytes], most: int, random: np.random.Generator) -> list[bytes]:
    return [windows[place] for place in random.permutation(len(windows))[:most]]


def _labelled(by_project: list[list[bytes]]) -> Fragments:
    contents = b"".join(window for windows in by_project for window in windows)
    counts = [len(windows) for windows in by_project]
    labels = np.repeat(np.arange(len(by_project)), counts)
    return Fragments(np.frombuffer(contents, np.uint8).reshape(-1, WINDOW), labels)
