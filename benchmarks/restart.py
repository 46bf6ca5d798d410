"""Seconds from the start of `growcache run` to its first draw, after its predecessor was killed.

A service that draws from a local disk, full and evicting, is ended by SIGKILL at a random
moment and started again, in a small cache and in one of 3,000 shards with 750,000 samples,
over a listing of 100,000 objects. `written` is when the first sampler begins to
write a group of the new service, `draw` when a shard is committed that was not there before.
The time of `growcache --help` is given with it: the interpreter and the imports.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.measure import Child, median, parser, report, verdict, write_config
from growcache.cache.index.reader import IndexView, read_index
from growcache.errors import CacheMissingError

POLL_SECONDS = 0.002
LIMIT_SECONDS = 600
GOAL_SECONDS = 2.0
ROWS = 8  # samples of an object
LONGEST_LIFE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Size:
    """The size of the source and of the cache of a restarted service.

    Attributes:
        objects: in the listing.
        shard_samples: in each.
        max_bytes: the bound that gives the number of shards.
    """

    objects: int
    shard_samples: int
    max_bytes: int


SIZES = {
    "small": Size(500, 50, 4_000_000),
    "large": Size(100_000, 250, 280_000_000),
}
QUICK = {"small": SIZES["small"]}


def make_source(folder: Path, objects: int) -> str:
    """Write objects of eight samples of 256 bytes; return the URL of all."""
    values = np.random.default_rng(0).random((ROWS, 64), np.float32)
    for number in range(objects):
        place = folder / f"{number // 1000:03d}"
        place.mkdir(parents=True, exist_ok=True)
        values.flat[0] = number
        np.save(place / f"{number:06d}.npy", values)
    return f"{folder}/*/*.npy"


class Service:
    """A config, and the lives of its service.

    Args:
        scratch: for all its files.
        size: of source and cache.
    """

    def __init__(self, scratch: Path, size: Size) -> None:
        self.cache, self._scratch = scratch / "cache", scratch
        self._config = scratch / "config.yaml"
        write_config(
            self._config,
            source={
                "url": make_source(scratch / "objects", size.objects),
                "format": "npy",
                "options": {"axis": 0},
            },
            sampling={
                "workers": 2,
                "samples_per_object": ROWS,
                "shard_samples": size.shard_samples,
                "order": "replacement",
            },
            cache={"path": str(self.cache), "max_bytes": size.max_bytes, "min_uses": 0},
        )

    def start(self) -> Child:
        """Start it."""
        return Child.growcache("run", str(self._config), log=self._scratch / "run.log")

    def view(self) -> IndexView:
        """Return what a reader finds now."""
        try:
            return read_index(self.cache)
        except CacheMissingError:
            return IndexView()

    def fill(self) -> None:
        """Run it until it evicts."""
        child = self.start()
        while not self.view().totals.evicted_shards:
            child.check(LIMIT_SECONDS)
            time.sleep(0.2)
        kill(child)

    def first_draw(self, child: Child) -> tuple[float, float]:
        """Return the seconds until a group of this life is written, and until one is there."""
        shards, incoming = self.cache / "shards", self.cache / "incoming"
        before, seen = self.view().totals.drawn, set(incoming.iterdir())
        written = changed = 0.0
        while True:
            if not written and set(incoming.iterdir()) - seen:
                written = child.seconds
            if (now := shards.stat().st_mtime) != changed:
                changed = now
                if self.view().totals.drawn > before:
                    return written or child.seconds, child.seconds
                changed = 0.0 if written else now  # the row comes after the rename
            child.check(LIMIT_SECONDS)
            time.sleep(POLL_SECONDS)


def kill(child: Child) -> None:
    """SIGKILL."""
    child.process.kill()
    child.process.wait()


def import_seconds() -> float:
    """Return what the command line takes to say what it can do."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "growcache", "run", "--help"], capture_output=True)
    return time.perf_counter() - began


def measure(service: Service, rounds: int) -> list[tuple[float, float, float]]:
    """Kill and start it once per round; return (imports, written, draw) of each start."""
    child, found = service.start(), []
    service.first_draw(child)
    for _ in range(rounds):
        time.sleep(random.uniform(0, LONGEST_LIFE_SECONDS))
        kill(child)
        imports = import_seconds()
        child = service.start()
        found.append((imports, *service.first_draw(child)))
    kill(child)
    return found


def row(name: str, service: Service, found: Sequence[tuple[float, ...]]) -> dict[str, object]:
    """Return the figures of one size."""
    view = service.view()
    imports, written, draw = zip(*found, strict=True)
    return {
        "cache": name,
        "shards": view.totals.shards,
        "samples": view.totals.samples,
        "kills": len(found),
        "imports": median(imports),
        "written": median(written),
        "draw": median(draw),
        "worst": round(max(draw), 2),
        "goal": verdict(max(draw), GOAL_SECONDS, at_most=True),
    }


def main() -> None:
    arguments = parser(__doc__)
    given = arguments.parse_args()
    rounds = given.rounds or (3 if given.quick else 100)
    rows = []
    for name, size in (QUICK if given.quick else SIZES).items():
        with tempfile.TemporaryDirectory(dir=given.directory) as scratch:
            service = Service(Path(scratch), size)
            service.fill()
            rows.append(row(name, service, measure(service, rounds)))
    report("Seconds from start to first draw after SIGKILL", rows, given.json)


if __name__ == "__main__":
    main()
