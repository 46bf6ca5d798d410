"""The wait for a batch in a loop whose steps are pure Python, by thread, process and auto.

The main thread takes a batch, accesses one element of it, and computes in pure Python for the
length of a step. Three times are measured: the wait for each batch; the access (four of
torch's operations, which show whether the memory is really there); and the whole step, compared
with the same step without a loader. The wait alone says little, because a loader that holds
the interpreter's lock slows the step down without causing a wait. The loaders stay open
through all rounds, which are interleaved. Each loader first runs for some seconds in which
`auto` makes its choice.

``GIL left``: how far a second thread counts in Python while the main thread takes batches and
sleeps for the length of a step, as a share of how far it counts while the main thread only
sleeps.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.loading import BATCH, FULL, QUICK, Case
from benchmarks.measure import median, parser, report, verdict
from benchmarks.synthetic_cache import SyntheticCache, random_samples
from growcache.loading.options import Gather
from growcache.torch import EpochLoader

MODES: tuple[Gather, ...] = ("thread", "process", "auto")
STEP_SECONDS = {"256 KiB": 5e-3, "3 KiB": 0.5e-3}
GOAL_WAIT_MS = {"256 KiB": 0.4, "3 KiB": 0.02}
SETTLE_SECONDS = 8.0  # before the first round: auto decides, and processes start
ROUND_SECONDS = 2.0


@dataclass(slots=True)
class Steps:
    """The times of each step of a round, in seconds."""

    waits: list[float]
    looks: list[float]
    whole: list[float]


def forever(loader: EpochLoader) -> Iterator[Any]:
    """Yield batches, epoch after epoch."""
    while True:
        yield from loader


def turns_of(seconds: float) -> int:
    """Return how many turns `busy` makes in `seconds`, by the best of ten tries."""
    turns = 100_000
    took = min(_timed(busy, turns) for _ in range(10))
    return max(1, round(turns * seconds / took))


def _timed(function: Callable[[int], object], argument: int) -> float:
    began = time.perf_counter()
    function(argument)
    return time.perf_counter() - began


def busy(turns: int) -> int:
    """Compute in Python without any operation that releases the interpreter's lock."""
    x = 0
    for i in range(turns):
        x = (x + i) & 0xFFFF
    return x


def steps(batches: Iterator[Any] | None, step: Callable[[], object], seconds: float) -> Steps:
    """Take batches and make steps for `seconds`; without batches, make the steps alone."""
    found, clock = Steps([], [], []), time.perf_counter
    end = clock() + seconds
    batch = None
    while (began := clock()) < end:
        if batches is not None:
            batch = next(batches)
        got = clock()
        if batch is not None:
            batch["x"][-1].view(-1)[-1].item()
        looked = clock()
        step()
        found.waits.append(got - began)
        found.looks.append(looked - got)
        found.whole.append(clock() - began)
    return found


def counted(batches: Iterator[Any] | None, step_seconds: float, seconds: float) -> int:
    """Return how far a second thread counts while this one takes batches and sleeps."""
    stop, count = threading.Event(), [0]

    def ticks() -> None:
        while not stop.is_set():
            count[0] += 1

    thread = threading.Thread(target=ticks)
    thread.start()
    steps(batches, lambda: time.sleep(step_seconds), seconds)
    stop.set()
    thread.join()
    return count[0]


def fill(case: Case, directory: Path) -> None:
    """Write the cache."""
    rng = np.random.default_rng(0)
    with SyntheticCache(directory, case.dtype, case.shape) as cache:
        for number in range(case.shards):
            cache.add_arrays(
                number, random_samples(rng, case.dtype, (case.samples, *case.shape))
            )


def measure(
    case: Case, directory: Path, rounds: int, modes: list[Gather], scale: float
) -> Iterator[dict[str, Any]]:
    """Yield a row of the table per mode."""
    fill(case, directory)
    step_seconds = STEP_SECONDS[case.name]
    turns, seconds = turns_of(step_seconds), ROUND_SECONDS * scale
    with ExitStack() as stack:
        loaders = {
            mode: stack.enter_context(
                EpochLoader(directory, batch_size=BATCH, min_samples=BATCH, gather=mode)
            )
            for mode in modes
        }
        batches = {mode: forever(loader) for mode, loader in loaders.items()}
        for mode in modes:
            steps(batches[mode], lambda: busy(turns), SETTLE_SECONDS * max(scale, 0.5))
        taken: dict[Gather, list[Steps]] = {mode: [] for mode in modes}
        ratios: dict[Gather, list[float]] = {mode: [] for mode in modes}
        left: dict[Gather, list[float]] = {mode: [] for mode in modes}
        for _ in range(rounds):
            bare = fmean(steps(None, lambda: busy(turns), seconds).whole)
            alone = counted(None, step_seconds, seconds / 4)
            for mode in modes:
                one = steps(batches[mode], lambda: busy(turns), seconds)
                taken[mode].append(one)
                ratios[mode].append(fmean(one.whole) / bare)
                left[mode].append(counted(batches[mode], step_seconds, seconds / 4) / alone)
        for mode in modes:
            waits = [wait * 1e3 for one in taken[mode] for wait in one.waits]
            # Batches of small samples arrive in blocks, so only the mean includes that wait.
            mean = median([fmean(one.waits) * 1e3 for one in taken[mode]])
            yield {
                "samples of": case.name,
                "step ms": step_seconds * 1e3,
                "gather": mode,
                "used": loaders[mode].report.gather,
                "mean wait ms": mean,
                "median wait ms": median(waits),
                "look ms": median([fmean(one.looks) * 1e3 for one in taken[mode]]),
                "step / bare": median(ratios[mode]),
                "GIL left": median(left[mode]),
                "wait goal": verdict(mean, GOAL_WAIT_MS[case.name], at_most=True)
                if mode != "thread"
                else "",
            }


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--only", nargs="*", choices=MODES, help="modes to run")
    given = arguments.parse_args()
    rows: list[dict[str, Any]] = []
    for case in QUICK if given.quick else FULL:
        with tempfile.TemporaryDirectory(dir=given.directory, prefix="busy-") as place:
            rounds, scale = (2, 0.2) if given.quick else (5, 1.0)
            modes = given.only or list(MODES)
            rows += measure(case, Path(place), given.rounds or rounds, modes, scale)
    report(f"Batches of {BATCH} while a step runs pure Python", rows, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
