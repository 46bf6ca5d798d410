"""The figures of one run of growcache, and of one turn of a loop by hand: for benchmarks/formats.py.

Speed and cost of growcache come from the middle of its run, because a run of days is mostly middle:
from the shard that completes 30 % of the samples to the one that completes 90 %. The index holds
the time at which each shard became visible. The start and the end are in the other figures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from benchmarks.formats_samples import Case
from benchmarks.measure import Child, write_config
from benchmarks.servers import Server
from growcache.cache.index.reader import read_index

BUCKET = "formats"
WORKERS, READS = 2, 16  # samplers, and reads in flight of each
SHARD = 128  # samples, so that shards come often
FIRST, LAST = 0.3, 0.9  # of the samples: what is between is measured
_POLL_SECONDS = 0.05
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Pass:
    """Growcache's way through all samples.

    Attributes:
        samples: that were drawn.
        speed: samples per second, in the middle.
        cpu: seconds per sample, of all its processes, in the middle.
        start: seconds from the start of the process to the first shard.
        seconds: from its start to its end.
        all_cpu: seconds per sample, with the start and the end.
    """

    samples: int
    speed: float
    cpu: float
    start: float
    seconds: float
    all_cpu: float


@dataclass(frozen=True, slots=True)
class Turn:
    """Some seconds of a loop by hand.

    Attributes:
        samples: that were taken.
        seconds: that it took.
        cpu: seconds of its process.
        opening: seconds before, where it was the first one: what is opened, or downloaded.
        opening_cpu: seconds of its process meanwhile.
    """

    samples: int
    seconds: float
    cpu: float
    opening: float
    opening_cpu: float


def write_case(server: Server, case: Case, scratch: Path) -> Path:
    """Write the configuration of a run and return it. The cache is next to it."""
    config = scratch / "config.yaml"
    write_config(
        config,
        source={
            "url": f"s3://{BUCKET}/{case.folder}/{case.objects}",
            "format": case.format,
            "options": case.options,
            "storage_options": server.storage_options,
        },
        sampling={
            "workers": WORKERS,
            "concurrency": READS,
            "shard_samples": SHARD,
            **case.sampling,
        },
        cache={"path": str(scratch / "cache"), "max_bytes": "4GB", "min_uses": 0},
    )
    return config


def first_look(server: Server, case: Case, scratch: Path) -> None:
    """Do what comes before the first sample, and draw a first few."""
    config = str(write_case(server, case, scratch))
    Child.growcache("run", config, "--samples", "1", log=scratch / "run.log").wait()


def draw_all(server: Server, case: Case, scratch: Path) -> Pass:
    """Draw each sample once."""
    config = str(write_case(server, case, scratch))
    began = time.time()
    child = Child.growcache("run", config, "--until-full", log=scratch / "run.log")
    with _metered(child.process.pid) as spent:
        run = child.wait()
    times, counts = _commits(scratch / "cache")
    first, last = np.searchsorted(counts, [FIRST * counts[-1], LAST * counts[-1]]).tolist()
    between = counts[last] - counts[first]
    moments, cpu = zip(*spent, strict=True)
    at_first, at_last = np.interp([times[first], times[last]], moments, cpu).tolist()
    return Pass(
        samples=counts[-1],
        speed=between / (times[last] - times[first]),
        cpu=(at_last - at_first) / between,
        start=times[0] - began,
        seconds=run.wall_seconds,
        all_cpu=run.cpu_seconds / counts[-1],
    )


def _commits(cache: Path) -> tuple[list[float], list[int]]:
    """Return when each group of shards became visible, and how many samples there were then."""
    shards = sorted(read_index(cache).shards, key=lambda shard: (shard.seq, shard.number))
    times: list[float] = []
    counts: list[int] = []
    for _, group in groupby(shards, key=lambda shard: shard.group):
        rows = list(group)
        times.append(max(row.drawn_at for row in rows))
        counts.append((counts[-1] if counts else 0) + sum(row.samples for row in rows))
    return times, counts


@contextmanager
def _metered(pid: int) -> Iterator[list[tuple[float, float]]]:
    """Note the CPU time of a process and its descendants, again and again."""
    noted: list[tuple[float, float]] = []
    ended = threading.Event()

    def note() -> None:
        while not ended.wait(_POLL_SECONDS):
            noted.append((time.time(), _cpu_seconds(pid)))

    thread = threading.Thread(target=note)
    thread.start()
    try:
        yield noted
    finally:
        ended.set()
        thread.join()


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, of those it waited for, and of its living children."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
        tasks = Path(f"/proc/{pid}/task").glob("*/children")
        children = " ".join(task.read_text(encoding="ascii") for task in tasks)
    except OSError:
        return 0.0
    ticks = sum(int(word) for word in text.rpartition(")")[2].split()[11:15])
    return ticks / _TICKS + sum(_cpu_seconds(int(child)) for child in children.split())


class ByHand:
    """The loop's process.

    Args:
        server: as it is reached.
        case: what is read.
        objects: how many there are.
        samples: of each.
    """

    def __init__(self, server: Server, case: Case, objects: int, samples: int) -> None:
        command = [sys.executable, "-m", "benchmarks.by_hand", "--endpoint", server.endpoint]
        command += ["--case", case.name, "--samples", str(samples)]
        keys = [f"{BUCKET}/{case.key(number)}" for number in range(objects)]
        self._process = subprocess.Popen(
            [*command, *keys], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def turn(self, threads: int, seconds: float) -> Turn:
        """Let it run for this many seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{threads} {seconds}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            sys.exit(f"the loop by hand ended with {self._process.wait()}")
        return Turn(**json.loads(answer))

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def upload(server: Server, case: Case, made: Path, number: int) -> None:
    """Put what was made, a file or a folder, where the case has its objects."""
    store, key = server.bucket(BUCKET), case.key(number)
    if made.is_file():
        store.put(key, made.read_bytes(), use_multipart=False)
        return
    for file in sorted(made.rglob("*")):
        if file.is_file():
            store.put(f"{key}/{file.relative_to(made)}", file.read_bytes())
