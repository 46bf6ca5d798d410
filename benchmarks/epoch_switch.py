"""The gap between the last batch of an epoch and the first of the next, while the cache grows.

The loop measures how long the loader takes to deliver a batch, within an epoch and across the
switch to the next epoch, which needs a new snapshot, plan and maps. The loop holds each batch
for a step of a given length and sleeps meanwhile, as a loop that waits for a GPU does. Without
steps it takes one batch after another, so that it waits for the gather, within epochs as well
as between them. Meanwhile a writer process commits shards and evicts old ones. At first it
evicts more slowly than it commits, so that the cache grows and every epoch finds another cache.

Epochs deliver everything that is cached or, with `fixed`, a number of samples that no pass is a
multiple of. Samples are 256 KiB or 3 KiB.

The machine's own limits are measured next to the same writer. An empty loop makes the same steps
before there is a loader and records how late its sleeps end; the same is recorded for the steps
with the loader. For loops without steps the limits are: a plain copy of one batch's rows; a
snapshot that is taken and closed, which every epoch needs; and two minimal loaders of fresh
epochs. In both, a thread takes the next snapshot in advance. In the first, the loop copies the
batches itself. In the second, another thread copies them and keeps up to two ready, which leaves
the loop time for steps. Neither plans an order, maps or checks a shard, or copies from more than
one array.
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
LIVE = (24, 96)  # live shards at the start and at the end
GROWN_AFTER = 400  # written shards after which the cache no longer grows but still changes
GOAL_MS = 1.0
EMPTY_STEPS = 2  # steps of the empty loop per switch
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
    """Return how many shards the cache keeps once `written` shards have been committed.

    >>> [live_shards(n) for n in (0, 200, 400, 900)]
    [24, 60, 96, 96]
    """
    least, most = LIVE
    return least + (most - least) * min(written, GROWN_AFTER) // GROWN_AFTER


def write(root: Path, kind: Kind, interval: float) -> None:
    """Commit a shard every ``interval`` seconds until standard input is closed."""
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
    """The times that a loop saw, in milliseconds.

    Attributes:
        within: Wait from the request for a batch to its arrival, within epochs.
        across: The same wait across the switch to the next epoch.
        late: How much longer the steps took than intended.
    """

    within: list[float]
    across: list[float]
    late: list[float]


def asleep(step: float) -> float:
    """Sleep for a step; return by how many milliseconds the sleep ended late."""
    began = time.perf_counter()
    time.sleep(step)
    return (time.perf_counter() - began - step) * 1e3


class Copier:
    """Copies random rows of one array into eight rotating buffers, a batch at a time."""

    def __init__(self, kind: Kind) -> None:
        self._rng = np.random.default_rng(2)
        shape = (LIVE[0] * kind.samples, *kind.shape)
        self._source = random_samples(self._rng, kind.dtype, shape)
        self._buffers = [np.zeros((BATCH, *kind.shape), kind.dtype) for _ in range(8)]

    def copy(self, turn: int) -> float:
        """Copy a batch; return the milliseconds."""
        rows = self._rng.integers(len(self._source), size=BATCH)
        began = time.perf_counter()
        np.take(self._source, rows, axis=0, out=self._buffers[turn % 8], mode="clip")
        return (time.perf_counter() - began) * 1e3


def copies(kind: Kind, times: int) -> list[float]:
    """Copy `times` batches; return the milliseconds of each."""
    copier = Copier(kind)
    return [copier.copy(turn) for turn in range(times)]


def snapshots(root: Path, times: int) -> list[float]:
    """Take and close `times` snapshots; return the milliseconds of each."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        Snapshot.take(root).close()
        found.append((time.perf_counter() - began) * 1e3)
    return found


def coming(root: Path, times: int) -> Iterator[Snapshot]:
    """Yield `times` snapshots; each is taken while the one before is in use. The caller closes them."""
    with ThreadPoolExecutor(1) as executor:
        ahead = executor.submit(Snapshot.take, root)
        for _ in range(times):
            snapshot = ahead.result()
            ahead = executor.submit(Snapshot.take, root)
            yield snapshot
        ahead.result().close()


def by_the_loop(root: Path, kind: Kind, times: int) -> list[float]:
    """Run `times` epochs whose batches the loop copies itself; return the gaps between epochs."""
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
    """Run `times` epochs whose batches a thread copies; return the gaps between epochs."""
    copier, made = Copier(kind), queue.SimpleQueue[bool | None]()
    slots = threading.Semaphore(2)

    def produce() -> None:
        for snapshot in coming(root, times):
            for turn in range(len(snapshot) // BATCH):
                copier.copy(turn)
                slots.acquire()
                made.put(turn == 0)
            snapshot.close()
        made.put(None)

    thread = threading.Thread(target=produce)
    thread.start()
    found, asked = [], time.perf_counter()
    while (first := made.get()) is not None:
        if first:
            found.append((time.perf_counter() - asked) * 1e3)
        slots.release()
        asked = time.perf_counter()
    thread.join()
    return found[1:]


def gaps(loader: EpochLoader, switches: int, step: float) -> Gaps:
    """Run the loop through `switches` switches of epoch."""
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
    """Yield a row for each quantity that was measured."""
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
    """Wait until the writer has written the first `shards` shards, which it writes without pauses."""
    while True:
        try:
            if len(read_index(root).shards) >= shards:
                return
        except CacheMissingError:
            pass
        time.sleep(0.05)


def limits(root: Path, kind: Kind, times: int, step: float) -> dict[str, list[float]]:
    """Return the times that the machine needs without a loader."""
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
    """Yield the rows of one case."""
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
