"""A trainer over many epochs of a cache that grows, fills and evicts: what it keeps must not grow.

A writer in a process of its own commits shards and evicts old ones, as in `epoch_switch`; the
loop here goes through epoch after epoch, growing ones or ones of a fixed length, with a new
checkpoint now and then. Each case has a trainer of its own, because what an earlier one left to
the allocator would be taken for a part of the next.

Counted is the trainer with its gather process, where it has one: the memory that the two have
for themselves (anonymous and shared pages, and page tables), open files, maps of files,
threads and processes. Maps of shards are as many as the snapshot has shards, so it counts
without those. Anonymous ones the kernel merges and splits as they come; what is in them is
counted as memory.

The memory of a loader is bounded, but reaches its bound only if the loop lets it. The loader makes
a buffer for batches when all others are in use, up to twelve per field, and then reuses them. A
loop that takes batches as fast as they come may need the eighth only after hundreds of epochs. A
first look before that would take it for a leak. So before the first look the cache has its full
size. The loop has also paused, holding batches of two blocks, until the loader had made all that
it may make ahead. From then on nothing may grow. Looks are taken between epochs, when the loader
is at rest.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.epoch_switch import BATCH, KINDS, LIVE, wait_filled, writer
from benchmarks.measure import parser, report, verdict
from growcache.cache.index.reader import read_index
from growcache.loading.blocks import batches_per_block
from growcache.loading.buffers import THREAD_BLOCK_BYTES
from growcache.torch import EpochLoader

EARLY = 3  # epochs of a first loader, with which all modules are imported
SETTLED = 50  # epochs at least, while the cache fills
LOOKS = 20
REST_SECONDS = 0.1
RESTS = 100  # at most, until nothing changes any more
HELD_BLOCKS = 2
STILL = 12  # blocks at each of which the loop stands still
GOAL_SHARE = 0.02
COUNTED = ("files", "maps", "threads", "processes")
CASES = [
    (kind, length, gather)
    for gather in ("thread", "process")
    for kind in KINDS
    for length in ("growing", "fixed")
]


def look(root: Path) -> dict[str, int]:
    """Return what this process has now, together with its gather process."""
    gc.collect()
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8")
    gathers = [pid for pid in children.split() if "gather" in _command(pid)]  # not the writer
    found = _of_one(root, "self")
    shared = found.pop("shared")  # with the other, so it counts once
    for pid in gathers:
        other = _of_one(root, pid)
        found = {name: value + other[name] for name, value in found.items()}
    return found | {"bytes": found["bytes"] + shared, "processes": 1 + len(gathers)}


def _command(pid: str) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").split("\0")


def _of_one(root: Path, pid: str) -> dict[str, int]:
    place = Path("/proc") / pid
    lines = (place / "status").read_text(encoding="utf-8").splitlines()
    status = dict(line.split(":", 1) for line in lines)
    memory = {name: int(status[name].split()[0]) * 1024 for name in ("RssAnon", "VmPTE")}
    maps = (place / "maps").read_text(encoding="utf-8").splitlines()
    return {
        "bytes": sum(memory.values()),
        "shared": int(status["RssShmem"].split()[0]) * 1024,
        "files": sum(1 for _ in (place / "fd").iterdir()),
        "maps": sum(len(line.split()) > 5 and str(root) not in line for line in maps),
        "threads": int(status["Threads"]),
    }


def look_at_rest(root: Path) -> dict[str, int]:
    """Return what this process has once the loader has made all that it may make."""
    before: dict[str, int] = {}
    for _ in range(RESTS):
        now = look(root)
        if [now[name] for name in COUNTED] == [before.get(name) for name in COUNTED]:
            break
        before = now
        time.sleep(REST_SECONDS)
    return now


def epochs(loader: EpochLoader, count: int) -> Iterator[int]:
    """Go through epochs; yields the number of each that is over."""
    for number in range(count):
        for batch in loader:
            batch["x"].view(-1)[-1].item()
        if number % 10 == 0:
            json.dumps(loader.state_dict())
            str(loader.report)
        yield number


def settle(loader: EpochLoader, root: Path, kind: str, least: int) -> None:
    """Go through epochs until the cache is full, and the loader keeps all that it will."""
    done = 0
    while done < least or len(read_index(root).shards) < LIVE[1]:
        done += sum(1 for _ in epochs(loader, 1))
    dtype, shape, _ = KINDS[kind]
    sample_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    block, taken = batches_per_block(sample_bytes, BATCH, THREAD_BLOCK_BYTES), 0
    held: deque[Any] = deque(maxlen=HELD_BLOCKS)
    while taken < STILL * block:
        for batch in loader:
            taken += 1
            if taken % block == 0:
                held.append(batch)
                time.sleep(REST_SECONDS)


def soak(root: Path, case: tuple[str, str, str], given: Namespace) -> dict[str, Any]:
    """Return what a table says of one case; to be called once in a process."""
    kind, length, gather = case
    samples = LIVE[0] * KINDS[kind].samples
    options: dict[str, Any] = {"batch_size": BATCH, "min_samples": samples, "gather": gather}
    if length == "fixed":
        options["samples_per_epoch"] = samples * 3 // 2
    every = max(1, given.epochs // LOOKS)
    with writer(root, kind, given.interval):
        wait_filled(root, LIVE[0])
        with EpochLoader(root, **options) as loader:
            deque(epochs(loader, EARLY), maxlen=0)
        before = look_at_rest(root)
        with EpochLoader(root, **options) as loader:
            settle(loader, root, kind, min(SETTLED, given.epochs))
            found = [look_at_rest(root)]
            for number in epochs(loader, given.epochs):
                if (number + 1) % every == 0:
                    found.append(look_at_rest(root))
            shards = read_index(root).shards[-1].number + 1
        after = look_at_rest(root)
    about = {"case": " ".join(case), "epochs": given.epochs, "shards seen": shards}
    return about | line(before, found, after)


def line(
    before: dict[str, int], found: list[dict[str, int]], after: dict[str, int]
) -> dict[str, Any]:
    """Return what was seen: the first fifth of the looks against the last.

    Args:
        before: there was a loader.
        found: in the course of its epochs.
        after: it was closed.
    """
    few = max(1, len(found) // 5)
    first, last = (
        statistics.median(one["bytes"] for one in part) for part in (found[:few], found[-few:])
    )
    row: dict[str, Any] = {
        "MB at first": round(first / 1e6, 1),
        "MB in the end": round(last / 1e6, 1),
        "growth": round(last / first - 1, 4),
        "goal": verdict(last / first - 1, GOAL_SHARE, at_most=True),
    }
    more = 0
    for name in COUNTED:
        at_first, at_last = (
            max(one[name] for one in part) for part in (found[:few], found[-few:])
        )
        row[name] = f"{before[name]} · {at_first} · {at_last} · {after[name]}"
        more += max(0, at_last - at_first) + max(0, after[name] - before[name])
    return row | {"more": verdict(more, 0, at_most=True)}


def in_a_process(case: tuple[str, str, str], given: Namespace) -> dict[str, Any]:
    """Return the line of a case, of a trainer of its own."""
    with tempfile.TemporaryDirectory(dir=given.directory, prefix="soak-") as place:
        command = [sys.executable, "-m", "benchmarks.soak", "--trainer", place, *case]
        figures = ["--epochs", str(given.epochs), "--interval", str(given.interval)]
        run = subprocess.run([*command, *figures], stdout=subprocess.PIPE, check=True)
    row: dict[str, Any] = json.loads(run.stdout)
    return row


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--epochs", type=int, help="of each case (default 1,000)")
    arguments.add_argument(
        "--interval", type=float, default=0.05, help="seconds between shards"
    )
    arguments.add_argument("--only", default="", help="cases, such as 256KiB-growing,3KiB")
    arguments.add_argument("--trainer", nargs=4, help="be the trainer of a case (internal)")
    given = arguments.parse_args()
    given.epochs = given.epochs or (40 if given.quick else 1000)
    if given.trainer is not None:
        place, kind, length, gather = given.trainer
        print(json.dumps(soak(Path(place) / kind, (kind, length, gather), given)))
        return 0
    wanted = given.only.split(",")
    cases = [case for case in CASES if any("-".join(case).startswith(name) for name in wanted)]
    rows = [in_a_process(case, given) for case in cases]
    report(
        "What a trainer keeps over many epochs (before · at first, most · in the end, most · closed)",
        rows,
        given.json,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
