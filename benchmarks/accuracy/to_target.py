"""E1: time, egress and disk to a target, over a link that delivers a tenth or a third of what training consumes.

The task is `fragments`. A step takes 40 ms, as on an accelerator, and consumes 64 windows of 4 KiB: 6.6 MB/s. Arms: growcache
with its defaults and a bound of a tenth of the data; the same with `eviction: none`, a frozen subset; all data in
memory; a plain DataLoader that reads the same objects by range; and other streaming loaders, each over its own
format of the samples with the same disk or buffer. Nothing is compressed, in any format.
`python -m benchmarks.accuracy.to_target`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import benchmarks.accuracy.to_target as about
from benchmarks.accuracy.far_runs import Cost, Far, Loader, far_store
from benchmarks.accuracy.fragments import WINDOW
from benchmarks.accuracy.paced.loop import Plan, Record
from benchmarks.accuracy.paced.place import BATCH
from benchmarks.accuracy.results import HERE, Run, append_run, read_rows, rows_of
from benchmarks.accuracy.training import Point

RESULTS = HERE / "to_target.csv"
STEP_SECONDS = 0.04
STEPS, EVALUATIONS = 1_500, 60
LONGER_STEPS = 7_500  # as many as the limit holds
QUICK_STEPS = 150
LIMIT_SECONDS = 300.0
CONSUMED = BATCH * WINDOW / STEP_SECONDS  # bytes per second
CACHE_SHARE = 0.1
SEEDS, RIVAL_SEEDS = 5, 3
LATE_PERCENT = (
    5.0  # of a run's time; beyond it the machine was too busy, and the run is repeated
)

LINKS = {"a tenth": CONSUMED / 10, "a third": CONSUMED / 3}
UNLIMITED = "no link"
FULL = "full"
ARMS = {
    "growcache": Loader("growcache"),
    "frozen": Loader("growcache", options={"eviction": "none"}),
    "DataLoader": Loader("dataloader"),
}
RIVALS = {
    "WebDataset": Loader("webdataset", "streaming", "tar"),
    "Hugging Face datasets": Loader("huggingface", "streaming", "parquet"),
    "LitData": Loader("litdata", "streaming", "litdata"),
    "MosaicML Streaming": Loader("mosaicml", "mosaicml", "mds"),
    "LanceDB": Loader("lance", "lance", "lance"),
    "insitubatch": Loader("insitubatch", "arrays", "zarr"),
    "xbatcher": Loader("xbatcher", "arrays", "zarr"),
}


LONGER = "growcache, as long as streamed"


class Planned(NamedTuple):
    """A run to make."""

    run: Run
    loader: Loader
    link_bytes: float
    steps: int = STEPS


def planned() -> Iterator[Planned]:
    """Yield all runs, those of a seed together; full data needs no link and is run once."""
    for seed in range(SEEDS):
        yield Planned(Run(UNLIMITED, FULL, seed), Loader("full"), 0)
        for link, link_bytes in LINKS.items():
            for arm, loader in ARMS.items():
                yield Planned(Run(link, arm, seed), loader, link_bytes)
        run = Run("a tenth", LONGER, seed)
        yield Planned(run, ARMS["growcache"], LINKS["a tenth"], LONGER_STEPS)
    for seed in range(RIVAL_SEEDS):
        for arm, loader in RIVALS.items():
            yield Planned(Run("a tenth", arm, seed), loader, LINKS["a tenth"])


def make(far: Far, one: Planned, plan: Plan, results: Path, writing: threading.Lock) -> None:
    """Make a run and append its rows; a run of a machine that was too busy is made once more."""
    bound = round(CACHE_SHARE * far.data_bytes)
    steps = min(plan.steps, one.steps)
    plan = replace(plan, steps=steps, evaluate_every=max(1, steps // EVALUATIONS))
    for _ in range(2):
        record, _, cost, log = far.run(one.loader, plan, one.run.seed, one.link_bytes, bound)
        if record is None:
            print(f"{one.run} failed:\n{log}", file=sys.stderr, flush=True)
            return
        found = figures(record, cost) | {"store_bytes": far.converted_bytes(one.loader)}
        rows = rows_of(one.run, points_of(record, cost), found)
        if found["late_percent"] <= LATE_PERCENT:
            break
    with writing:
        append_run(results, rows)
        print(
            f"{', '.join(map(str, one.run))}: {rows[-1].metric:.2f} {json.dumps(found)}",
            flush=True,
        )


def points_of(record: Record, cost: Cost) -> list[tuple[Point, int]]:
    """Return the evaluations of a run, and the bytes that the store had sent by then."""
    return [
        (Point(step, at, value), cost.bytes_at(record.began + at))
        for step, at, value in record.points
    ]


def figures(record: Record, cost: Cost) -> dict[str, float]:
    """Return the other figures of a run."""
    _, waits, samples, fresh = zip(*record.steps, strict=True)
    seconds = record.points[-1][1]
    return {
        "first_batch_seconds": round(waits[0], 2),
        "wait_percent": round(100 * sum(waits) / seconds, 2),
        "late_percent": round(100 * record.late_seconds / seconds, 2),
        "delivered": sum(samples),
        "distinct": sum(fresh),
        "requests": cost.sent[-1][2],
        "disk_bytes": cost.disk_bytes,
        "memory_bytes": cost.memory_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=about.__doc__)
    parser.add_argument("--quick", action="store_true", help="a seed of few steps, not kept")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many, from 0 on")
    parser.add_argument("--arms", default="*", help="a pattern of 'link, arm'")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--environments", type=Path, help="where other loaders are installed")
    given = parser.parse_args()
    plan = Plan(LONGER_STEPS, LIMIT_SECONDS, STEP_SECONDS, 1, "")
    seeds, results = given.seeds, RESULTS
    with tempfile.TemporaryDirectory(prefix="accuracy-") as scratch:
        if given.quick:
            plan = replace(plan, steps=QUICK_STEPS, seconds=60.0)
            seeds, results = 1, Path(scratch) / "quick.csv"
        done = read_rows(results)
        wanted = [
            one
            for one in planned()
            if one.run not in done
            and one.run.seed < seeds
            and fnmatch(f"{one.run.experiment}, {one.run.arm}", given.arms)
        ]
        with far_store(given.environments or Path(scratch) / "environments") as far:
            make_all(far, wanted, replace(plan, test=str(far.test)), results, given.jobs)


def make_all(far: Far, wanted: list[Planned], plan: Plan, results: Path, jobs: int) -> None:
    """Make the runs, `jobs` at a time; a run that fails is named, and left for the next time."""
    convert(far, [one.loader for one in wanted])
    writing = threading.Lock()
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda one: make(far, one, plan, results, writing), wanted))


def convert(far: Far, loaders: list[Loader]) -> None:
    """Write the formats that these loaders need."""
    for loader in {one.module: one for one in loaders if one.format is not None}.values():
        seconds = far.convert(loader)
        print(f"converted for {loader.module} in {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
