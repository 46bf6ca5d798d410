"""The parts of an experiment, and how it makes its runs: seed by seed, each in a separate folder."""

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


class Place(NamedTuple):
    """The inputs of an arm: data, an empty folder, the seed, and the samples per step."""

    task: Task
    folder: Path
    seed: int
    batch_size: int


class Variant(NamedTuple):
    """A task, given the seed, and how models are trained on it."""

    task: Callable[[int], Task]
    recipe: Recipe


class Feed(Protocol):
    """The batches that a run trains on, and their figures."""

    def batches(self) -> Iterator[Batch]:
        """Yield batches without end."""

    def egress_bytes(self) -> int:
        """Return the bytes read from the store so far."""

    def figures(self) -> dict[str, float]:
        """Return other figures of the run so far, such as the reuse."""


Arm = Callable[[Place], AbstractContextManager[Feed]]


class Delivery(NamedTuple):
    """The batches of an arm for a seed, and the runs that are trained on them."""

    seed: int
    task: Callable[[int], Task]
    arm: Arm
    runs: Mapping[Run, Recipe]


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

    def deliveries(self, seeds: Iterable[int]) -> Iterator[Delivery]:
        """Yield what has to be delivered, seed by seed, so that a stop leaves whole pairs."""
        recipes: dict[Callable[[int], Task], dict[str, Recipe]] = {}
        for title, (task, recipe) in self.variants.items():
            recipes.setdefault(task, {})[title] = recipe
        for seed, (task, by_title), (name, arm) in itertools.product(
            seeds, recipes.items(), self.arms.items()
        ):
            runs = {Run(title, name, seed): recipe for title, recipe in by_title.items()}
            yield Delivery(seed, task, arm, runs)


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
    for delivery in experiment.deliveries(seeds):
        runs = {
            run: shortened(recipe) if quick else recipe
            for run, recipe in delivery.runs.items()
            if run not in done and chosen(f"{run.experiment}, {run.arm}")
        }
        if runs:
            train_runs(delivery._replace(runs=runs), results)


def shortened(recipe: Recipe) -> Recipe:
    return replace(recipe, steps=QUICK_STEPS, evaluate_every=QUICK_STEPS // 4)


def train_runs(delivery: Delivery, results: Path) -> None:
    """Train the runs of a delivery side by side, on the same batches, and append their rows."""
    began = time.monotonic()
    seed, task = delivery.seed, delivery.task(delivery.seed)
    recipes = list(delivery.runs.values())
    with tempfile.TemporaryDirectory(prefix="accuracy-") as folder:
        place = Place(task, Path(folder), seed, recipes[0].batch_size)
        with delivery.arm(place) as feed:
            copies = itertools.tee(feed.batches(), len(recipes))
            curves = [
                train(recipe, batches, task.test, seed)
                for recipe, batches in zip(recipes, copies, strict=True)
            ]
            found = [(points, feed.egress_bytes()) for points in zip(*curves, strict=True)]
            figures = feed.figures()
    words = ", ".join(f"{name} {figure:.4g}" for name, figure in figures.items())
    took = time.monotonic() - began
    for number, run in enumerate(delivery.runs):
        points = [(each[number], egress) for each, egress in found]
        append_run(results, rows_of(run, points, figures))
        value = points[-1][0].value
        print(f"{run.experiment}, {run.arm}, seed {run.seed}: {value:.4g}, {words}", flush=True)
    print(f"  in {took:.0f} s", flush=True)
