"""What an experiment consists of, and how its runs are made: seed by seed, each in a folder of its own."""

from __future__ import annotations

import itertools
import logging
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

from benchmarks.accuracy.metrics import ACCURACY, Metric
from benchmarks.accuracy.results import HERE, Run, append_run, read_rows, rows_of
from benchmarks.accuracy.training import Batch, Recipe, train
from benchmarks.accuracy.wheels import Labelled

QUICK_STEPS = 100


class Task(NamedTuple):
    """The data of a seed, and a cache of about a tenth of its training samples."""

    training: Labelled
    test: Batch
    max_bytes: int
    shard_samples: int


class Place(NamedTuple):
    """What an arm is given: data, an empty folder, the seed, and samples of a step."""

    task: Task
    folder: Path
    seed: int
    batch_size: int


class Variant(NamedTuple):
    """A task, given the seed, and how models are trained on it."""

    task: Callable[[int], Task]
    recipe: Recipe


class Feed(Protocol):
    """What a run trains on."""

    def batches(self) -> Iterator[Batch]:
        """Yield batches without end."""

    def egress_bytes(self) -> int:
        """Return the bytes read from the store so far."""

    def figures(self) -> dict[str, float]:
        """Return other figures of the run so far, such as the reuse."""


Arm = Callable[[Place], AbstractContextManager[Feed]]


@dataclass(frozen=True, slots=True)
class Experiment:
    """Arms that are trained on the same tasks with paired seeds."""

    name: str
    variants: Mapping[str, Variant]
    arms: Mapping[str, Arm]
    seeds: int
    reference: str
    metric: Metric = ACCURACY

    @property
    def results(self) -> Path:
        """The file of its results."""
        return HERE / f"{self.name}.csv"

    def runs(self, seeds: Iterable[int]) -> Iterator[tuple[Run, Variant, Arm]]:
        """Yield all runs, those of a seed together, so that a stop leaves whole pairs."""
        for seed, (title, variant), (name, arm) in itertools.product(
            seeds, self.variants.items(), self.arms.items()
        ):
            yield Run(title, name, seed), variant, arm


def make_runs(
    experiment: Experiment,
    seeds: Iterable[int],
    results: Path,
    chosen: Callable[[str], bool] = lambda name: True,
    *,
    quick: bool = False,
) -> None:
    """Make the runs that the results do not have yet."""
    logging.getLogger("growcache").setLevel(logging.ERROR)  # it warns of reuse and of waits
    done = read_rows(results)
    for run, (task, recipe), arm in experiment.runs(seeds):
        if run in done or not chosen(f"{run.experiment}, {run.arm}"):
            continue
        if quick:
            recipe = replace(recipe, steps=QUICK_STEPS, evaluate_every=QUICK_STEPS // 4)
        began = time.monotonic()
        value, figures = make_run(run, task(run.seed), recipe, arm, results)
        took = time.monotonic() - began
        words = ", ".join(f"{name} {figure:.4g}" for name, figure in figures.items())
        print(
            f"{run.experiment}, {run.arm}, seed {run.seed}: {value:.4g} in {took:.0f} s, {words}",
            flush=True,
        )


def make_run(
    run: Run, task: Task, recipe: Recipe, arm: Arm, results: Path
) -> tuple[float, dict[str, float]]:
    """Train once and append the rows; return the last metric and the other figures."""
    with tempfile.TemporaryDirectory(prefix="accuracy-") as folder:
        place = Place(task, Path(folder), run.seed, recipe.batch_size)
        with arm(place) as feed:
            curve = train(recipe, feed.batches(), task.test, run.seed)
            points = [(point, feed.egress_bytes()) for point in curve]
            figures = feed.figures()
    append_run(results, rows_of(run, points, figures))
    return points[-1][0].value, figures
