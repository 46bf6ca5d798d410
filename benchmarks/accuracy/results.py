"""The results of experiments: a CSV file each, to which the rows of a run are appended at its end.

A run that was stopped therefore left nothing, and one that is there is skipped the next time.
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.accuracy.training import Point
from benchmarks.measure import machine

HERE = Path(__file__).parent
LAST_POINTS = 3  # whose mean is the final value of a run


class Run(NamedTuple):
    """The key of a run in a results file."""

    experiment: str
    arm: str
    seed: int


class Row(NamedTuple):
    """An evaluation of a run.

    Attributes:
        experiment: name of the experiment, which may contain the task.
        arm: what the run trained on.
        seed: of the split, the model and the samplers; runs with equal seeds are paired.
        step: steps that were made.
        seconds: time of these steps, evaluations excluded.
        metric: accuracy in percent or bits per byte, as the experiment says.
        egress_bytes: read from the store by then.
        commit: of growcache.
        machine: that ran it.
        figures: other figures of the run as a JSON object, in its last row only.
    """

    experiment: str
    arm: str
    seed: int
    step: int
    seconds: float
    metric: float
    egress_bytes: int
    commit: str
    machine: str
    figures: str = ""

    @property
    def run(self) -> Run:
        """The run that it belongs to."""
        return Run(self.experiment, self.arm, self.seed)


Curves = dict[Run, list[Row]]


def read_rows(path: Path) -> Curves:
    """Return the rows of each run in order; none where there is no file yet."""
    found: Curves = defaultdict(list)
    if path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            for fields in csv.DictReader(file):
                row = _parse(fields)
                found[row.run].append(row)
    return dict(found)


def append_run(path: Path, rows: Iterable[Row]) -> None:
    """Add the rows of a finished run by a single write."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if not path.exists():
        writer.writerow(Row._fields)
    writer.writerows(rows)
    with path.open("a", encoding="utf-8", newline="") as file:
        file.write(text.getvalue())


def rows_of(
    run: Run, points: Iterable[tuple[Point, int]], figures: Mapping[str, Any]
) -> list[Row]:
    """Return the rows of a run, given its points with the bytes read by then."""
    where = commit_name(), machine_name()
    rows = [
        Row(*run, point.step, round(point.seconds, 3), round(point.value, 4), nbytes, *where)
        for point, nbytes in points
    ]
    return [*rows[:-1], rows[-1]._replace(figures=json.dumps(dict(figures)))]


def final_metric(rows: list[Row]) -> float:
    """Return the mean of the last evaluations."""
    last = rows[-LAST_POINTS:]
    return sum(row.metric for row in last) / len(last)


def final_metrics(curves: Curves, experiment: str) -> dict[str, dict[int, float]]:
    """Return the final metric of every run of an experiment by arm and seed."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for run, rows in curves.items():
        if run.experiment == experiment:
            found[run.arm][run.seed] = final_metric(rows)
    return dict(found)


def figures_of(rows: list[Row]) -> dict[str, Any]:
    """Return the other figures of a run."""
    figures: dict[str, Any] = json.loads(rows[-1].figures or "{}")
    return figures


@cache
def commit_name() -> str:
    """Return the commit of the working tree; a plus sign marks uncommitted changes."""
    changed = _git(
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--",
        "growcache",
        "benchmarks/accuracy/*.py",
    )
    return _git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def machine_name() -> str:
    about = machine()
    return f"{about['cores']} cores, {about['cpu']}"


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=HERE, check=True, capture_output=True, text=True
    ).stdout.strip()


def _parse(fields: Mapping[str, str]) -> Row:
    return Row(
        experiment=fields["experiment"],
        arm=fields["arm"],
        seed=int(fields["seed"]),
        step=int(fields["step"]),
        seconds=float(fields["seconds"]),
        metric=float(fields["metric"]),
        egress_bytes=int(fields["egress_bytes"]),
        commit=fields["commit"],
        machine=fields["machine"],
        figures=fields["figures"],
    )
