"""`sampling.engine: ray` against the local engine, against Ray Data, and while its processes are killed.

A cluster of a head and two nodes of one CPU each runs on this machine, and nginx serves the objects, of 64 windows
of 64 KiB each. `throughput` fills a cache by a whole `growcache run`, by two local samplers and by two actors in turns:
MB/s from the first shard to the last, CPU of all processes (the service's, Ray's, those of the actors), and the seconds that
a group spends in each stage. `ray-data` delivers five epochs of shuffled batches to a loop without steps: by Ray Data
in three ways, and by growcache's loader from a cache that two actors fill meanwhile. `kills` kills actors, the writer and
whole nodes while a cache is filled, and compares it with one that a local sampler filled.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.measure import parser, report
from benchmarks.ray_data import measure_ray_data
from benchmarks.ray_kills import measure_kills
from benchmarks.ray_page import write_part
from benchmarks.ray_speed import measure_throughput

TITLES = {
    "throughput": "Filling a cache",
    "ray-data": "Five epochs of shuffled batches",
    "kills": "A cache that is filled while processes are killed",
}
OBJECTS = {"throughput": 256, "ray-data": 128, "kills": 320}
QUICK_OBJECTS = {"throughput": 48, "ray-data": 32, "kills": 24}
ROUNDS = {"throughput": 3, "ray-data": 2, "kills": 1}
KILLS, QUICK_KILLS = 200, 8


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--part", nargs="+", choices=TITLES, default=list(TITLES))
    arguments.add_argument("--kills", type=int, help="how many of them")
    arguments.add_argument("--seed", type=int, default=0, help="of the kills")
    arguments.add_argument("--page", type=Path, help="also write the tables of this page")
    given = arguments.parse_args()
    kills = given.kills or (QUICK_KILLS if given.quick else KILLS)
    for part in given.part:
        rounds = given.rounds or (1 if given.quick else ROUNDS[part])
        objects = (QUICK_OBJECTS if given.quick else OBJECTS)[part]
        rows: list[dict[str, Any]]
        if part == "throughput":
            rows = measure_throughput(objects, rounds, given.directory)
        elif part == "ray-data":
            rows = measure_ray_data(objects, rounds, given.directory)
        else:
            rows = [measure_kills(objects, kills, given.seed, given.directory)]
        report(TITLES[part], rows, _json_of(given.json, part, given.part))
        if given.page is not None:
            write_part(given.page, part, rows, rounds)
    return 0


def _json_of(path: Path | None, part: str, parts: list[str]) -> Path | None:
    """Return the file of a part: of several, each has one."""
    return path.with_stem(f"{path.stem}-{part}") if path and len(parts) > 1 else path


if __name__ == "__main__":
    sys.exit(main())
