"""Plan against run: `growcache plan` predicts, then a real service and a real loader do it.

Twelve configurations: three links, two bounds of the cache, two speeds of training. The store is nginx behind
a proxy (tests/servers/slowlink.py) that lets through the link's bytes per second and answers each request 50 ms late. The plan
measures the link itself. The loop is `growcache.numpy.EpochLoader`, paced to its samples per second. A figure is met within 15 % of
the median of the rounds, or within a second, or within a point of a share.

Some of them run side by side, because slow links leave the processors idle; but only one is planned or started at a time.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Child, machine, parser, report, write_config
from benchmarks.noise import random_samples
from benchmarks.servers import Server, make_bucket, running_server
from growcache.cache.status import read_status
from growcache.cache.status_model import Status
from growcache.errors import GrowcacheError
from tests.servers.slowlink import SlowLink, slowlink

LINKS = (1_000_000, 2_000_000, 4_000_000)  # bytes per second
BOUNDS = (24_000_000, 48_000_000)
LOOPS = (60, 240)  # samples per second
OBJECTS, SHAPE = 2000, (16, 1024)  # float32: 64 KiB each
LATENCY_SECONDS = 0.05
SECONDS = 60.0  # of a run, from the start of the service
# Fewer and larger shards than such small caches would have, which commit some hundred times less often than large ones.
SHARD_SAMPLES = 8
MIN_SAMPLES, BATCH = 160, 8
ROUNDS, SIDE_BY_SIDE = 3, 4
STARTING_SECONDS = 20.0  # that a start takes at most, before the next one begins all the same
MOST_OFF, MOST_SECONDS, MOST_SHARE = 0.15, 1.0, 0.01
BEGIN, END = "<!-- plan: written by benchmarks/plan.py -->", "<!-- plan: end -->"

FIGURES: Mapping[str, str] = {
    "first_batch_seconds": "first batch, s",
    "full_seconds": "full, s",
    "coverage": "coverage",
    "reuse": "reuse",
    "exposed_wait_share": "exposed wait",
    "egress_bytes": "egress, MB",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration."""

    link: int
    bound: int
    loop: int

    @property
    def name(self) -> str:
        """The row's first cell."""
        return f"{self.link / 1e6:g} MB/s, {self.bound / 1e6:g} MB, {self.loop}/s"


def write_objects(server: Server, bucket: str) -> None:
    """Write a sample per object."""
    assert server.folder is not None
    make_bucket(server, bucket)
    for number in range(OBJECTS):
        rng = np.random.default_rng([number, 29])
        np.save(server.folder / bucket / f"{number:05d}.npy", random_samples(rng, "<f4", SHAPE))


# ------------------------------------------------------------------------ a plan and a run


class Place:
    """A folder with a configuration, behind a slow link."""

    def __init__(self, case: Case, link: SlowLink, server: Server, folder: Path) -> None:
        self.case, self.link, self.folder = case, link, folder
        self.config, self.cache = folder / "growcache.yaml", folder / "cache"
        options = {**server.storage_options, "endpoint_url": link.endpoint}
        write_config(
            self.config,
            {"url": "s3://far/*.npy", "storage_options": options},
            {"shard_samples": SHARD_SAMPLES},
            {"path": str(self.cache), "max_bytes": case.bound},
        )

    def planned(self, seconds: float) -> dict[str, float | None]:
        """Return what `growcache plan` says."""
        command = [sys.executable, "-m", "growcache", "plan", str(self.config), "--json"]
        command += ["--consume", str(self.case.loop), "--min-samples", str(MIN_SAMPLES)]
        command += ["--horizon", str(seconds)]
        done = subprocess.run(command, capture_output=True, check=True)
        found = json.loads(done.stdout)
        (self.folder / "plan.json").write_bytes(done.stdout)
        values = {name: found[name]["value"] for name in FIGURES if name in found}
        egress = found["egress_bytes_per_hour"]["value"]
        return {**values, "egress_bytes": egress * seconds / 3600}

    def ran(self, seconds: float, started: Callable[[], object]) -> dict[str, float | None]:
        """Run a service and a loop; return what came of them. ``started`` is called once shards come."""
        shutil.rmtree(self.cache, ignore_errors=True)
        log = self.folder / "loop.txt"
        log.unlink(missing_ok=True)
        command = [sys.executable, "-m", "benchmarks.plan", "--loop", str(self.cache)]
        loop = Child([*command, str(self.case.loop), str(log)], self.folder / "loop.log")
        time.sleep(2)  # its imports are no part of what a plan predicts
        sent = self.link.counts().bytes
        began = time.monotonic()
        service = Child.growcache("run", str(self.config), log=self.folder / "service.log")
        full_at = self._watch(began, seconds, service, started)
        status, ended = read_status(self.cache), time.monotonic()
        sent = self.link.counts().bytes - sent
        loop.process.terminate()
        loop.process.wait()
        service.process.send_signal(signal.SIGINT)
        service.wait(3 * seconds)
        return {
            "full_seconds": full_at,
            "coverage": status.coverage,
            "reuse": status.delivered / max(1, status.drawn),
            "egress_bytes": float(sent),
            **self._waits(log, began, ended),
        }

    def _watch(
        self, began: float, seconds: float, service: Child, started: Callable[[], object]
    ) -> float | None:
        """Wait to the end; return when the cache was full."""
        full_at, is_started = None, False
        while (now := time.monotonic() - began) < seconds:
            service.check(2 * seconds)
            status = self._status()
            if not is_started and (status.drawn or now > STARTING_SECONDS):
                is_started = True
                started()
            if full_at is None and status.full:
                full_at = now
            time.sleep(0.05)
        return full_at

    def _status(self) -> Status:
        with suppress(GrowcacheError, OSError, ValueError):
            return read_status(self.cache)
        return Status()

    @staticmethod
    def _waits(log: Path, began: float, ended: float) -> dict[str, float | None]:
        """Return when the first batch came, and the share of the time after it that the loop waited."""
        lines = np.loadtxt(log, ndmin=2)
        if not lines.size:
            return {"first_batch_seconds": None, "exposed_wait_share": None}
        first = lines[0, 0]
        waited = float(lines[1:, 1][lines[1:, 0] < ended].sum())
        return {
            "first_batch_seconds": first - began,
            "exposed_wait_share": waited / max(1e-9, ended - first),
        }


def be_loop(cache: str, rate: float, log: str) -> None:
    """Take batches at a pace; write when each came, and how long the loop waited for it."""
    from growcache.numpy import EpochLoader

    with (
        EpochLoader(cache, batch_size=BATCH, min_samples=MIN_SAMPLES) as loader,
        Path(log).open("w", buffering=1, encoding="utf-8") as out,
    ):
        due = 0.0
        for batch in _forever(loader):
            asked, waited = batch
            out.write(f"{asked + waited:.6f} {waited:.6f}\n")
            due = max(due or asked + waited, asked + waited - 0.5) + BATCH / rate
            time.sleep(max(0.0, due - time.monotonic()))


def _forever(loader: Any) -> Iterator[tuple[float, float]]:
    """Yield when the loop asked for each batch, and how long it waited."""
    asked = time.monotonic()
    while True:
        for _ in loader:
            yield asked, time.monotonic() - asked
            asked = time.monotonic()


# ------------------------------------------------------------------------ comparison


def is_met(name: str, planned: float | None, measured: float | None) -> bool:
    if planned is None or measured is None:
        return planned is measured
    off = abs(planned - measured)
    if name.endswith("_seconds") and off <= MOST_SECONDS:
        return True
    if name in ("coverage", "exposed_wait_share") and off <= MOST_SHARE:
        return True
    return off <= MOST_OFF * abs(measured)


def _median(found: Sequence[float | None]) -> float | None:
    known = [value for value in found if value is not None]
    return statistics.median(known) if 2 * len(known) > len(found) else None


@dataclass(frozen=True, slots=True)
class Compared:
    """The medians of one configuration."""

    case: Case
    planned: Mapping[str, float | None]
    measured: Mapping[str, float | None]

    def missed(self) -> list[str]:
        """Return the figures that differ by too much."""
        return [n for n in FIGURES if not is_met(n, self.planned[n], self.measured[n])]

    def cells(self) -> dict[str, str]:
        """Return the row of the table."""
        return {
            label: f"{_text(name, self.planned[name])} / {_text(name, self.measured[name])}"
            + (" **missed**" if name in self.missed() else "")
            for name, label in FIGURES.items()
        }


def _text(name: str, value: float | None) -> str:
    if value is None:
        return "never"
    if name in ("coverage", "exposed_wait_share"):
        return f"{100 * value:.1f} %"
    return f"{value / 1e6:.1f}" if name == "egress_bytes" else f"{value:.3g}"


def compare(
    server: Server, directory: Path, cases: Sequence[Case], rounds: int, seconds: float
) -> tuple[list[Compared], list[float]]:
    """Return the medians, and the machine's load at the end of each run."""
    planned: dict[Case, list[dict[str, float | None]]] = {case: [] for case in cases}
    ran: dict[Case, list[dict[str, float | None]]] = {case: [] for case in cases}
    one_at_a_time, loads = threading.Lock(), list[float]()

    def work(case: Case) -> None:
        with (
            tempfile.TemporaryDirectory(dir=directory, prefix="plan-") as folder,
            slowlink(
                server.endpoint,
                bytes_per_second=case.link,
                latency_seconds=LATENCY_SECONDS,
            ) as link,
        ):
            place = Place(case, link, server, Path(folder))
            one_at_a_time.acquire()
            with ExitStack() as held:
                held.callback(one_at_a_time.release)
                plan = place.planned(seconds)
                run = place.ran(seconds, held.pop_all().close)
            planned[case].append(plan)
            ran[case].append(run)
            loads.append(os.getloadavg()[0])
            now, words = time.strftime("%H:%M:%S"), _difference(plan, run)
            print(f"{now} load {loads[-1]:.1f}, {case.name}: {words}", flush=True)

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        list(pool.map(work, [case for _ in range(rounds) for case in cases]))
    found = [
        Compared(
            case,
            *(
                {n: _median([one[n] for one in of[case]]) for n in FIGURES}
                for of in (planned, ran)
            ),
        )
        for case in cases
    ]
    return found, loads


def _difference(plan: Mapping[str, float | None], run: Mapping[str, float | None]) -> str:
    return ", ".join(
        f"{label} {_text(name, plan[name])}/{_text(name, run[name])}"
        for name, label in FIGURES.items()
    )


def section(
    found: Sequence[Compared], loads: Sequence[float], rounds: int, seconds: float
) -> str:
    about, labels = machine(), list(FIGURES.values())
    cells = sum(len(FIGURES) - len(one.missed()) for one in found)
    rows = [
        "| " + " | ".join([one.case.name, *(one.cells()[label] for label in labels)]) + " |"
        for one in found
    ]
    return "\n".join(
        [
            f"Planned / measured, {seconds:g} s after the start of the service, medians of {rounds}; "
            f"{cells} of {len(found) * len(FIGURES)} figures are within {MOST_OFF:.0%}, a second or a point of a "
            f"share. On {about['cores']} cores with a load of {min(loads):.1f} to {max(loads):.1f}.",
            "",
            "| link, bound, training | " + " | ".join(labels) + " |",
            "| --- |" + " --: |" * len(labels),
            *rows,
        ]
    )


def write_section(page: Path, text: str) -> None:
    """Put the text between the markers of a page."""
    head, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    page.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}", encoding="utf-8")


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--page", type=Path, help="also write the table of this page")
    arguments.add_argument(
        "--case",
        action="append",
        nargs=3,
        type=float,
        metavar=("MB/s", "MB", "SAMPLES/s"),
        help="only this row; may be given several times",
    )
    arguments.add_argument("--loop", nargs=3, help="be a training loop (internal)")
    given = arguments.parse_args()
    if given.loop is not None:
        be_loop(given.loop[0], float(given.loop[1]), given.loop[2])
        return 0
    rounds = given.rounds or (1 if given.quick else ROUNDS)
    cases = [Case(*one) for one in product(LINKS, BOUNDS, LOOPS)]
    if given.case:
        cases = [
            Case(round(link * 1e6), round(bound * 1e6), round(loop))
            for link, bound, loop in given.case
        ]
    elif given.quick:
        cases = [case for case in cases if case.bound == BOUNDS[0] and case.loop == LOOPS[0]]
    with running_server("nginx") as server:
        write_objects(server, "far")
        found, loads = compare(server, given.directory, cases, rounds, SECONDS)
    rows = [{"case": one.case.name, **one.cells()} for one in found]
    report("Plan / run", rows, given.json)
    if given.page is not None:
        write_section(given.page, section(found, loads, rounds, SECONDS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
