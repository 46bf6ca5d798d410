"""`python -m benchmarks.slow_link`: see the package."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import benchmarks.slow_link as about
from benchmarks.measure import parser, report, verdict, write_config
from benchmarks.peers.environments import made
from benchmarks.servers import free_port
from benchmarks.slow_link.link import STORE_ADDRESS, Link, slow_link
from benchmarks.slow_link.loop import BATCH, SAMPLE_BYTES, SHAPE, STEP_SECONDS
from benchmarks.slow_link.phases import Phase, row
from benchmarks.slow_link.samples import COUNT, KEY, KEYS, SECRET, sample
from growcache.cache.status import read_status

ROOT = Path(__file__).parent.parent.parent
PINS = Path(__file__).parent / "environments"
BUCKET = "far"
LINK = 10_000_000
DISK_BYTES = 256_000_000
START_SECONDS = 120.0
GOAL_PERCENT = 1.0
ENVIRONMENTS = {
    "growcache": "own",
    "dataloader": "own",
    "mosaicml": "mosaicml",
    "litdata": "libraries",
    "insitubatch": "insitubatch",
}
FORMATS = {"mosaicml": "mds", "litdata": "litdata", "insitubatch": "zarr"}


class NothingDeliveredError(Exception):
    """A loader gave no batch in time; the message ends with its log."""


class Bench:
    """The store, the link and the folders of a run."""

    def __init__(self, link: Link, endpoint: str, folder: Path, scale: float) -> None:
        self.link, self.endpoint, self.folder, self.scale = link, endpoint, folder, scale

    def phase(self, name: str, over: Callable[[], bool]) -> Phase:
        """Wait until it is over."""
        began, sent = time.monotonic(), self.link.sent_bytes()
        while not over():
            time.sleep(0.1)
        return Phase(name, began, time.monotonic(), self.link.sent_bytes() - sent)

    def lasting(self, name: str, seconds: float) -> Phase:
        """Wait so long."""
        end = time.monotonic() + seconds * self.scale
        return self.phase(name, lambda: time.monotonic() >= end)

    def without_link(self) -> Phase:
        """Break the link for a minute."""
        self.link.set_up(up=False)
        try:
            return self.lasting("link down", 60)
        finally:
            self.link.set_up(up=True)

    @contextmanager
    def child(self, command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Run a program at the trainer's end of the link."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        inside = self.link.inside(self.link.trainer, command)
        with log.open("wb") as sink:
            process = subprocess.Popen(
                inside, stdout=sink, stderr=sink, env=environment, start_new_session=True
            )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    @contextmanager
    def loop(self, arm: str, python: Path) -> Iterator[Path]:
        """Run a loader's loop; yields its file once the first batch has come."""
        places = {
            "endpoint": self.endpoint,
            "bucket": BUCKET,
            "folder": str(self.folder / arm),
            "disk_bytes": DISK_BYTES,
        }
        file, log = self.folder / f"{arm}.txt", self.folder / f"{arm}.log"
        words = ["-m", "benchmarks.slow_link.loop", "run", arm, json.dumps(places), str(file)]
        (self.folder / arm).mkdir(exist_ok=True)
        with self.child([str(python), *words], log) as process:
            self._wait_for_batch(file, process, log)
            yield file

    @staticmethod
    def _wait_for_batch(file: Path, process: subprocess.Popen[bytes], log: Path) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not (file.exists() and file.stat().st_size):
            if process.poll() is not None or time.monotonic() > deadline:
                raise NothingDeliveredError(f"{file.stem}:\n{log.read_text()[-2000:]}")
            time.sleep(0.05)


def growcache(bench: Bench, arm: str, python: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of growcache."""
    cache, config = bench.folder / "growcache/cache", bench.folder / "growcache.yaml"
    source = {
        "url": f"s3://{BUCKET}/npy/*.npy",
        "storage_options": {"endpoint_url": bench.endpoint, "key": KEY, "secret": SECRET},
    }
    write_config(config, source, {}, {"path": str(cache), "max_bytes": DISK_BYTES})
    service = [str(python), "-m", "growcache", "run", str(config)]
    with (
        bench.child(service, bench.folder / "service.log") as running,
        bench.loop(arm, python) as file,
    ):
        phases = [
            bench.phase("cache grows", lambda: read_status(cache).evicted_samples > 0),
            bench.lasting("cache turns over", 60),
            bench.without_link(),
            bench.lasting("link is back", 20),
        ]
        running.send_signal(signal.SIGINT)
        running.wait()
        phases.append(bench.lasting("service stopped", 20))
    for phase in phases:
        found = row(arm, phase, file, LINK)
        yield {**found, "goal": verdict(found["waiting %"], GOAL_PERCENT, at_most=True)}


def rival(bench: Bench, arm: str, python: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of another loader."""
    with bench.loop(arm, python) as file:
        phases = [
            bench.lasting("link is up", 60),
            bench.without_link(),
            bench.lasting("link is back", 20),
        ]
    for phase in phases:
        yield row(arm, phase, file, LINK)


def interpreter(environment: str, folder: Path) -> Path:
    """Return the Python of an environment, which is made where it is not there yet."""
    own = (PINS / f"{environment}.txt").exists()
    return made(environment, folder, PINS) if own else made(environment, folder)


def write_objects(bucket: Path) -> None:
    """Write a sample per object."""
    for number, key in enumerate(KEYS):
        path = bucket / key
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, np.frombuffer(sample(number), "<f4").reshape(SHAPE))


def write(arm: str, python: Path, bucket: Path) -> None:
    """Write a loader's own format of the same samples."""
    command = ["-m", "benchmarks.slow_link.loop", "write", arm, str(bucket / FORMATS[arm])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([str(python), *command], check=True, env=environment)


@contextmanager
def store(link: Link, folder: Path) -> Iterator[str]:
    """Run nginx at the far end of the link; yields its endpoint."""
    scratch, port = folder / "nginx", free_port()
    scratch.mkdir()
    options = ["--folder", folder / "objects", "--scratch", scratch, "--port", port]
    options += ["--listing-port", free_port(), "--address", STORE_ADDRESS]
    command = [sys.executable, "-m", "benchmarks.nginx_s3", *map(str, options)]
    with (folder / "nginx.log").open("wb") as log:
        server = subprocess.Popen(
            link.inside(link.store, command), stdout=log, stderr=log, cwd=ROOT
        )
    try:
        time.sleep(1)
        yield f"http://{STORE_ADDRESS}:{port}"
    finally:
        server.terminate()
        server.wait()


def main() -> int:
    arguments = parser(about.__doc__)
    arguments.add_argument("--only", nargs="*", choices=ENVIRONMENTS, help="loaders to run")
    arguments.add_argument(
        "--environments", type=Path, help="where the other loaders are installed"
    )
    given = arguments.parse_args()
    arms = given.only or list(ENVIRONMENTS)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=given.directory, prefix="slow-link-") as place:
        folder = Path(place)
        installed = given.environments or folder / "environments"
        pythons = {arm: interpreter(ENVIRONMENTS[arm], installed) for arm in arms}
        write_objects(folder / "objects" / BUCKET)
        for arm in set(arms) & set(FORMATS):
            write(arm, pythons[arm], folder / "objects" / BUCKET)
        with slow_link(LINK) as link, store(link, folder) as endpoint:
            bench = Bench(link, endpoint, folder, 0.2 if given.quick else 1.0)
            for arm in arms:
                measure = growcache if arm == "growcache" else rival
                try:
                    rows += measure(bench, arm, pythons[arm])
                except NothingDeliveredError as error:
                    print(error, file=sys.stderr)
                    rows.append({"loader": arm, "phase": "delivered nothing"})
                shutil.rmtree(folder / arm, ignore_errors=True)
    consumed = BATCH * SAMPLE_BYTES / STEP_SECONDS / 1e6
    title = f"A loop of {consumed:.0f} MB/s beside a link of {LINK / 1e6:.0f}"
    report(f"{title}, {COUNT * SAMPLE_BYTES / 1e9:.1f} GB", rows, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
