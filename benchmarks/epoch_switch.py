"""The gap between the last batch of an epoch and the first of the next, while the cache grows.

The loop measures how long the loader takes to hand over a batch: within an epoch, and across
the switch to a new one, with its snapshot, plan and maps. It holds each batch for a step of a
given length, asleep as one that waits for a GPU is; without a step it takes one batch after
the other, so that what it waits for is the gather, within epochs as between them. All the
while a writer in a process of its own commits shards and evicts old ones, more slowly at
first, so that the cache grows, and every epoch finds another one.

Epochs are all that is cached, or (`fixed`) of a length that fits no pass. Samples are of
256 KiB, or of 3 KiB.

How far the machine itself can keep such a goal says an empty loop, which makes the same steps
beside the same writer before there is a loader: by how much its sleeps end late. The same is
told of the steps beside the loader. For a loop without steps there are others, beside that writer,
too: a plain copy of the rows of one batch; a snapshot that is taken and closed, which an epoch
cannot begin without; and the least that a loader of fresh epochs can be: a thread takes the next
snapshot while the loop copies the batches of this epoch itself, or while another thread copies
them, of which two wait, so that the loop has time for steps. Those have no order to plan, no shard
to map or to check, and one array to copy from.
"""

from __future__ import annotations

import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.measure import parser, report, verdict
from benchmarks.synthetic_cache import SyntheticCache, random_samples
from growcache.cache.index.reader import read_index
from growcache.errors import CacheMissingError
from growcache.loading.snapshot import Snapshot
from growcache.torch import EpochLoader

BATCH = 32
LIVE = (24, 96)  # shards, at first and in the end
GROWN_AFTER = 400  # shards, at which it stops to grow and goes on to change
GOAL_MS = 1.0
EMPTY_STEPS = 2  # of the empty loop, for each switch
SWITCHES = "epoch to epoch"


class Kind(NamedTuple):
    """Samples of one size, in shards of about 4 MB."""

    dtype: str
    shape: tuple[int, ...]
    samples: int


KINDS = {"256KiB": Kind("<f4", (64, 1024), 16), "3KiB": Kind("|u1", (32, 32, 3), 64)}
CASES = [
    (kind, length, stepping)
    for kind in KINDS
    for length in ("growing", "fixed")
    for stepping in ("sleeping", "idle")
]


def live_shards(written: int) -> int:
    """Return how many shards the cache keeps once so many were written.

    >>> [live_shards(n) for n in (0, 200, 400, 900)]
    [24, 60, 96, 96]
    """
    least, most = LIVE
    return least + (most - least) * min(written, GROWN_AFTER) // GROWN_AFTER


def write(root: Path, kind: Kind, interval: float) -> None:
    """Commit shards until standard input ends, each after ``interval`` seconds."""
    import select

    rng = np.random.default_rng(1)
    with SyntheticCache(root, kind.dtype, kind.shape, max_bytes=20_000_000_000) as cache:
        first, number = 0, 0
        while not select.select([sys.stdin], [], [], interval if number >= LIVE[0] else 0)[0]:
            shard = random_samples(rng, kind.dtype, (kind.samples, *kind.shape))
            cache.add_arrays(number, shard)
            number += 1
            while number - first > live_shards(number):
                cache.cache.retire([first])
                first += 1
            cache.cache.poll_leases(time.monotonic())
            cache.cache.maintain()


@contextmanager
def writer(root: Path, kind: str, interval: float) -> Iterator[None]:
    command = [sys.executable, "-m", "benchmarks.epoch_switch", "--write", str(root), kind]
    child = subprocess.Popen([*command, "--interval", str(interval)], stdin=subprocess.PIPE)
    try:
        yield
    finally:
        assert child.stdin is not None
        child.stdin.close()
        child.wait(30)


class Gaps(NamedTuple):
    """What a loop saw, in milliseconds.

    Attributes:
        within: from asking for a batch to having it, within epochs.
        across: the same, across the switch to another epoch.
        late: by how much steps took longer than they were to.
    """

    within: list[float]
    across: list[float]
    late: list[float]


def asleep(step: float) -> float:
    """Make a step; return by how many milliseconds it took too long."""
    began = time.perf_counter()
    time.sleep(step)
    return (time.perf_counter() - began - step) * 1e3


class Copier:
    """Copies random rows of one array, a batch at a time, into eight buffers in turns."""

    def __init__(self, kind: Kind) -> None:
        self._rng = np.random.default_rng(2)
        shape = (LIVE[0] * kind.samples, *kind.shape)
        self._source = random_samples(self._rng, kind.dtype, shape)
        self._buffers = [np.zeros((BATCH, *kind.shape), kind.dtype) for _ in range(8)]

    def copy(self, turn: int) -> float:
        """Copy a batch; return milliseconds."""
        rows = self._rng.integers(len(self._source), size=BATCH)
        began = time.perf_counter()
        np.take(self._source, rows, axis=0, out=self._buffers[turn % 8], mode="clip")
        return (time.perf_counter() - began) * 1e3


def copies(kind: Kind, times: int) -> list[float]:
    """Copy so many batches; return milliseconds."""
    copier = Copier(kind)
    return [copier.copy(turn) for turn in range(times)]


def snapshots(root: Path, times: int) -> list[float]:
    """Take and close so many snapshots; return milliseconds."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        Snapshot.take(root).close()
        found.append((time.perf_counter() - began) * 1e3)
    return found


def coming(root: Path, times: int) -> Iterator[Snapshot]:
    """Yield so many snapshots, to be closed, each taken while the one before is used."""
    with ThreadPoolExecutor(1) as hand:
        ahead = hand.submit(Snapshot.take, root)
        for _ in range(times):
            snapshot = ahead.result()
            ahead = hand.submit(Snapshot.take, root)
            yield snapshot
        ahead.result().close()


def by_the_loop(root: Path, kind: Kind, times: int) -> list[float]:
    """Go through so many epochs of which the loop copies the batches; return the gaps."""
    copier, found = Copier(kind), []
    asked = time.perf_counter()
    for snapshot in coming(root, times):
        copier.copy(0)
        found.append((time.perf_counter() - asked) * 1e3)
        for turn in range(1, len(snapshot) // BATCH):
            copier.copy(turn)
        snapshot.close()
        asked = time.perf_counter()
    return found[1:]


def by_a_thread(root: Path, kind: Kind, times: int) -> list[float]:
    """Go through so many epochs of which a thread copies the batches; return the gaps."""
    copier, made = Copier(kind), queue.SimpleQueue[bool | None]()
    room = threading.Semaphore(2)

    def produce() -> None:
        for snapshot in coming(root, times):
            for turn in range(len(snapshot) // BATCH):
                copier.copy(turn)
                room.acquire()
                made.put(turn == 0)
            snapshot.close()
        made.put(None)

    thread = threading.Thread(target=produce)
    thread.start()
    found, asked = [], time.perf_counter()
    while (first := made.get()) is not None:
        if first:
            found.append((time.perf_counter() - asked) * 1e3)
        room.release()
        asked = time.perf_counter()
    thread.join()
    return found[1:]


def gaps(loader: EpochLoader, switches: int, step: float) -> Gaps:
    """Go through so many switches."""
    found = Gaps([], [], [])
    asked = time.perf_counter()
    for epoch in range(switches + 1):
        first = True
        for batch in loader:
            waited = (time.perf_counter() - asked) * 1e3
            if not first:
                found.within.append(waited)
            elif epoch:
                found.across.append(waited)
            first = False
            batch["x"].view(-1)[-1].item()
            if step:
                found.late.append(asleep(step))
            asked = time.perf_counter()
    return found


def lines(case: str, found: dict[str, list[float]]) -> Iterator[dict[str, Any]]:
    """Yield a line for each of the things that were measured."""
    for name, values in found.items():
        if not values:
            continue
        p50, p99 = np.percentile(values, [50, 99])
        line: dict[str, Any] = {
            "case": case,
            "measured": name,
            "times": len(values),
            "p50 ms": round(float(p50), 3),
            "p99 ms": round(float(p99), 3),
            "max ms": round(max(values), 3),
        }
        if name == SWITCHES:
            line["goal p99"] = verdict(line["p99 ms"], GOAL_MS, at_most=True)
        yield line


def wait_filled(root: Path, shards: int) -> None:
    """Return when the writer is through with the shards that it writes at once."""
    while True:
        try:
            if len(read_index(root).shards) >= shards:
                return
        except CacheMissingError:
            pass
        time.sleep(0.05)


def limits(root: Path, kind: Kind, times: int, step: float) -> dict[str, list[float]]:
    """Return what the machine takes for it without a loader."""
    if step:
        return {"without a loader": [asleep(step) for _ in range(times)]}
    return {
        "without a loader: copy of a batch": copies(kind, times),
        "without a loader: snapshot": snapshots(root, times),
        "by hand: the loop copies": by_the_loop(root, kind, times),
        "by hand: a thread copies": by_a_thread(root, kind, times),
    }


def measure(
    place: Path, case: tuple[str, str, str], switches: int, step: float, interval: float
) -> Iterator[dict[str, Any]]:
    """Yield the lines of one case."""
    kind, length, stepping = case
    root, samples = place / "-".join(case), LIVE[0] * KINDS[kind].samples
    epoch = None if length == "growing" else samples * 3 // 2 // BATCH * BATCH
    step, name = step if stepping == "sleeping" else 0.0, " ".join(case)
    with writer(root, kind, interval):
        wait_filled(root, LIVE[0])
        alone = limits(root, KINDS[kind], EMPTY_STEPS * switches, step)
        with EpochLoader(
            root, batch_size=BATCH, min_samples=samples, samples_per_epoch=epoch
        ) as loader:
            found = gaps(loader, switches, step)
            done = loader.report
    print(f"{name}: {done.passes} passes, at last over {done.cache_samples} samples")
    p50, p99 = np.percentile(found.across, [50, 99])
    print(f"{name}: {SWITCHES} p50 {p50:.3g} ms, p99 {p99:.3g} ms", flush=True)
    measured = {SWITCHES: found.across, "batch to batch": found.within}
    measured |= {"a step's sleep, late by": found.late}
    yield from lines(name, measured | alone)


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--switches", type=int, help="epochs of each case (default 1,000)")
    arguments.add_argument("--step-ms", type=float, default=5.0, help="length of a step")
    arguments.add_argument("--interval", type=float, default=0.1, help="seconds between shards")
    arguments.add_argument("--only", help="cases, such as 256KiB-growing-sleeping,3KiB")
    arguments.add_argument("--write", nargs=2, help="be the writer (internal)")
    given = arguments.parse_args()
    if given.write is not None:
        root, kind = given.write
        write(Path(root), KINDS[kind], given.interval)
        return 0
    switches = given.switches or (10 if given.quick else 1000)
    wanted = (given.only or "").split(",")
    cases = [case for case in CASES if any("-".join(case).startswith(name) for name in wanted)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=given.directory, prefix="switch-") as place:
        for case in cases[:2] if given.quick else cases:
            rows += measure(Path(place), case, switches, given.step_ms / 1e3, given.interval)
    report(
        f"Gaps seen by a loop with steps of {given.step_ms:g} ms (idle: without), batches of "
        f"{BATCH}, on a cache that grows and changes",
        rows,
        given.json,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
