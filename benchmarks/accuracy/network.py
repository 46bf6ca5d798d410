"""G5, the network's share: what each loader delivers while its link is slow, and while it is broken for a minute.

The loop, the samples and the loaders are those of `to_target`, with a link that brings a tenth of what the loop consumes.
After 60 s nothing passes in either direction for 60 s, as if all packets were lost. Results are sums of each second.
`python -m benchmarks.accuracy.network`.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

import benchmarks.accuracy.network as about
from benchmarks.accuracy.far_runs import Far, Loader, far_store
from benchmarks.accuracy.paced.loop import Plan, Step
from benchmarks.accuracy.results import HERE, commit_name, machine_name
from benchmarks.accuracy.to_target import (
    ARMS,
    CACHE_SHARE,
    LINKS,
    RIVALS,
    STEP_SECONDS,
    convert,
)
from tests.servers.slowlink import SlowLink

RESULTS = HERE / "network.csv"
LINK = LINKS["a tenth"]
CUT, BACK, END = 60.0, 120.0, 180.0  # seconds since the loader was opened
LOADERS = {name: loader for name, loader in (ARMS | RIVALS).items() if name != "frozen"}


class Second(NamedTuple):
    """A loader's figures for one second.

    Attributes:
        arm: name of the loader.
        second: since it was opened.
        delivered: samples.
        distinct: those of them that had not been delivered before.
        waited: seconds that the loop waited for a batch.
        sent_bytes: of the link.
        commit: of growcache.
        machine: that ran it.
    """

    arm: str
    second: int
    delivered: int
    distinct: int
    waited: float
    sent_bytes: int
    commit: str
    machine: str


@dataclass
class Cutter:
    """Cuts a link and joins it again; the clock starts at the first call."""

    scale: float
    began: float | None = None

    def __call__(self, link: SlowLink) -> None:
        """Set the link as it has to be by now."""
        self.began = self.began or time.monotonic()
        since = (time.monotonic() - self.began) / self.scale
        link.set(cut=CUT <= since < BACK)


def seconds_of(arm: str, steps: list[Step], sent: list[int]) -> Iterator[Second]:
    """Yield each second of a run; a wait counts in the seconds that it lasted."""
    count = len(sent)
    delivered, distinct = np.zeros(count, int), np.zeros(count, int)
    waited = np.zeros(count)
    edges = np.arange(count + 1)
    ends = [step.asked + step.waited for step in steps]
    for step, end in zip(steps, ends, strict=True):
        if end < count:
            delivered[int(end)] += step.samples
            distinct[int(end)] += step.new
    open_end = ends[-1] + STEP_SECONDS if ends else 0.0
    waits = [
        *((step.asked, end) for step, end in zip(steps, ends, strict=True)),
        (open_end, count),
    ]
    for start, end in waits:
        inside = np.minimum(edges[1:], end) - np.maximum(edges[:-1], start)
        waited += np.maximum(0.0, inside)
    where = commit_name(), machine_name()
    for second in range(count):
        yield Second(
            arm,
            second,
            int(delivered[second]),
            int(distinct[second]),
            round(float(waited[second]), 3),
            sent[second],
            *where,
        )


def measure(far: Far, arm: str, loader: Loader, plan: Plan, scale: float) -> list[Second]:
    """Run a loader; one that fails or hangs has delivered nothing from then on."""
    bound = round(CACHE_SHARE * far.data_bytes)
    ran = far.run(loader, plan, 0, LINK, bound, meanwhile=Cutter(scale))
    if ran.record is None:
        print(f"{arm} did not come to its end:\n{ran.log}", flush=True)
    began = ran.record.began if ran.record else ran.cost.sent[0][0]
    marks = [ran.cost.bytes_at(began + second) for second in range(round(END * scale) + 1)]
    return list(seconds_of(arm, ran.steps, np.diff(marks).tolist()))


def read_seconds(path: Path = RESULTS) -> dict[str, list[Second]]:
    """Return the results by loader, in the order of `LOADERS`."""
    found: dict[str, list[Second]] = {arm: [] for arm in LOADERS}
    if path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                one = Second(
                    row["arm"],
                    int(row["second"]),
                    int(row["delivered"]),
                    int(row["distinct"]),
                    float(row["waited"]),
                    int(row["sent_bytes"]),
                    row["commit"],
                    row["machine"],
                )
                found[one.arm].append(one)
    return {arm: seconds for arm, seconds in found.items() if seconds}


def append(path: Path, rows: list[Second]) -> None:
    """Add the seconds of a finished run."""
    new = not path.exists()
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([Second._fields] if new else [])
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=about.__doc__)
    parser.add_argument("--quick", action="store_true", help="18 s of each, which are not kept")
    parser.add_argument("--only", nargs="*", choices=LOADERS, help="loaders to run")
    parser.add_argument("--jobs", type=int, default=3, help="runs side by side")
    parser.add_argument("--environments", type=Path, help="where other loaders are installed")
    given = parser.parse_args()
    scale = 0.1 if given.quick else 1.0
    done = {} if given.quick else read_seconds()
    wanted = {arm: LOADERS[arm] for arm in given.only or LOADERS if arm not in done}
    steps = round(END * scale / STEP_SECONDS)
    plan = Plan(steps, END * scale, STEP_SECONDS, steps, "")
    writing = threading.Lock()
    with tempfile.TemporaryDirectory(prefix="accuracy-") as scratch:
        results = Path(scratch) / "quick.csv" if given.quick else RESULTS
        with far_store(given.environments or Path(scratch) / "environments") as far:
            convert(far, list(wanted.values()))
            plan = replace(plan, test=str(far.test))

            def attempt(item: tuple[str, Loader]) -> None:
                rows = measure(far, *item, plan, scale)
                delivered = sum(row.delivered for row in rows)
                waited = sum(row.waited for row in rows)
                with writing:
                    append(results, rows)
                    print(
                        f"{item[0]}: {delivered:,} samples, waited {waited:.1f} s", flush=True
                    )

            with ThreadPoolExecutor(given.jobs) as pool:
                list(pool.map(attempt, wanted.items()))


if __name__ == "__main__":
    main()
