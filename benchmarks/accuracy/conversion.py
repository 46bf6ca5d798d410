"""The time and disk space of a conversion to a loader's own format.

E1's loaders with such a format need it before their first training. Each loader writes all samples to the local disk,
shuffled and uncompressed, in a separate process. The time includes its imports. `python -m benchmarks.accuracy.conversion`.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import tempfile
from pathlib import Path
from statistics import median
from typing import NamedTuple

import benchmarks.accuracy.conversion as about
from benchmarks.accuracy.far_runs import Far, Loader, far_store
from benchmarks.accuracy.results import HERE, commit_name, machine_name
from benchmarks.accuracy.to_target import RIVALS

RESULTS = HERE / "conversion.csv"
REPETITIONS = 3


class Conversion(NamedTuple):
    """A conversion of all samples.

    Attributes:
        arm: name of the loader.
        seconds: that it took, the median of several.
        store_bytes: size of the result.
        commit: of growcache.
        machine: that ran it.
    """

    arm: str
    seconds: float
    store_bytes: int
    commit: str
    machine: str


def read_conversions(path: Path = RESULTS) -> dict[str, Conversion]:
    """Return the conversions by loader; none if there is no file yet."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        rows = [
            Conversion(
                row["arm"],
                float(row["seconds"]),
                int(row["store_bytes"]),
                row["commit"],
                row["machine"],
            )
            for row in csv.DictReader(file)
        ]
    return {row.arm: row for row in rows}


def measure(environments: Path | None) -> list[Conversion]:
    """Convert for every loader; those that share a format share a conversion."""
    found: dict[str | None, tuple[float, int]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="accuracy-") as scratch,
        far_store(environments or Path(scratch) / "environments") as far,
    ):
        for arm, loader in RIVALS.items():
            if loader.format not in found:
                found[loader.format] = _converted(far, loader)
            print(f"{arm}: %s s, %s bytes" % found[loader.format], flush=True)
    where = commit_name(), machine_name()
    return [Conversion(arm, *found[one.format], *where) for arm, one in RIVALS.items()]


def _converted(far: Far, loader: Loader) -> tuple[float, int]:
    """Return the median seconds and the bytes of a conversion."""
    assert loader.format is not None
    seconds = []
    for _ in range(REPETITIONS):
        shutil.rmtree(far.bucket / loader.format, ignore_errors=True)
        seconds.append(far.convert(loader))
    return round(median(seconds), 2), far.converted_bytes(loader)


def main() -> None:
    parser = argparse.ArgumentParser(description=about.__doc__)
    parser.add_argument("--environments", type=Path, help="where other loaders are installed")
    rows = measure(parser.parse_args().environments)
    with RESULTS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([Conversion._fields, *rows])


if __name__ == "__main__":
    main()
