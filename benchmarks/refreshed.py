"""The share of a full cache that is new in each epoch, with and without retiring ahead.

`growcache run` draws from local files, faster than readers read, into a small cache that
is full. Readers, each a process and a job of its own, go through epoch after epoch with a
pause after each batch, so that an epoch lasts about as long as requested. The figure is
the share of an epoch's shards that were not in the reader's previous snapshot: the mean
over epochs and readers. Without retiring ahead, which the service is deprived of in a
process of this benchmark, only shards may go that no reader holds at that moment.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from benchmarks.measure import Child, machine, parser, report, write_config
from growcache.cache.index.reader import read_index
from growcache.errors import CacheError
from growcache.loading.snapshot import Snapshot

MAX_BYTES = 64_000_000
SHARD_SAMPLES, SHAPE = 48, (4096,)  # of 16 KiB; about 70 shards fill the cache
OBJECTS, ROWS = 64, 256  # four times what the cache holds
BATCH = 48
LEFT_OUT = 2  # epochs: in the first all is new, in the second the readers get into step
LIMIT_SECONDS = 600.0
CASES = (("torch", 1), ("torch", 4), ("torch", 8), ("tensorflow", 1))
GOALS = {("torch", 8): 0.29, ("tensorflow", 1): 0.20}
BEGIN, END = "<!-- refreshed: written by benchmarks/refreshed.py -->", "<!-- refreshed: end -->"


class Refreshed(NamedTuple):
    """The figures of the readers of one service.

    Attributes:
        framework: of the readers.
        readers: how many.
        ahead: whether shards were retired ahead.
        share: of a snapshot's shards that were not in the one before, the mean: they come
            in bursts, when readers let go, so that the median may be 0.
        low: the tenth percentile of it, and
        high: the ninetieth.
        epochs: of all readers, that it was taken of.
        epoch_seconds: how long they lasted, the median.
        shards: of a snapshot, the median.
        turnovers: of the cache, during all of it.
    """

    framework: str
    readers: int
    ahead: bool
    share: float
    low: float
    high: float
    epochs: int
    epoch_seconds: float
    shards: int
    turnovers: float


def be_service(config: str) -> int:
    """Be `growcache run` without rule 21 of the protocol."""
    from growcache.cli.cli import main as growcache

    with mock.patch(
        "growcache.cache.eviction_policy.choose_early_retirements", return_value=()
    ):
        return growcache(["run", config])


def be_reader(framework: str, root: str, job: str, epochs: int, seconds: float) -> None:
    """Read a number of epochs; print what was new in each and how long it took."""
    taken: list[frozenset[int]] = []
    take = Snapshot.take

    def recorded(path: Any, **options: Any) -> Snapshot:
        snapshot = take(path, **options)
        taken.append(frozenset(row.number for row in snapshot.shards))
        return snapshot

    with mock.patch.object(Snapshot, "take", recorded):
        durations = _read(_loader(framework, root, job), epochs, seconds)
    pairs = list(pairwise(taken))[LEFT_OUT - 1 : epochs - 1]
    shares = [len(now - before) / len(now) for before, now in pairs]
    shards = [len(now) for _, now in pairs]
    print(json.dumps({"shares": shares, "shards": shards, "seconds": durations[LEFT_OUT:]}))


def _loader(framework: str, root: str, job: str) -> Iterable[Any]:
    options: dict[str, Any] = {"batch_size": BATCH, "min_samples": 4 * BATCH, "job": job}
    if framework == "tensorflow":
        from growcache.tensorflow import dataset

        made: Iterable[Any] = dataset(root, **options)
        return made
    from growcache.torch import EpochLoader

    return EpochLoader(root, **options)


def _read(loader: Iterable[Any], epochs: int, seconds: float) -> list[float]:
    durations = []
    batches = SHARD_SAMPLES * 64 // BATCH  # an epoch's, about
    for _ in range(epochs):
        began = time.perf_counter()
        for _ in loader:
            time.sleep(seconds / batches)
        durations.append(time.perf_counter() - began)
    return durations


def run(
    place: Path, framework: str, readers: int, *, ahead: bool, epochs: int, seconds: float
) -> Refreshed:
    """Return what a number of readers see of one service."""
    root = place / "cache"
    source = {"url": f"{place.parent}/objects/*.npy", "options": {"axis": 0}}
    sampling = {"workers": 2, "shard_samples": SHARD_SAMPLES}
    config = place / "c.yaml"
    write_config(config, source, sampling, {"path": str(root), "max_bytes": MAX_BYTES})
    if ahead:
        service = Child.growcache("run", str(config), log=place / "run.log")
    else:
        command = [sys.executable, "-m", "benchmarks.refreshed", "--serve", str(config)]
        service = Child(command, place / "run.log")
    try:
        before = _full(root, service)
        children = [_reader(place, framework, n, root, epochs, seconds) for n in range(readers)]
        for child in children:
            child.wait(LIMIT_SECONDS)
        after = read_index(root).totals
    finally:
        service.process.send_signal(signal.SIGINT)
        service.wait(2 * LIMIT_SECONDS)  # since its start
    found = [json.loads(child.log.read_text().splitlines()[-1]) for child in children]
    shares = [share for one in found for share in one["shares"]]
    low, high = np.percentile(shares, [10, 90])
    return Refreshed(
        framework,
        readers,
        ahead,
        round(statistics.fmean(shares), 4),
        round(float(low), 4),
        round(float(high), 4),
        len(shares),
        round(statistics.median(s for one in found for s in one["seconds"]), 2),
        round(statistics.median(s for one in found for s in one["shards"])),
        round((after.evicted_samples - before.evicted_samples) / after.samples, 1),
    )


def _full(root: Path, service: Child) -> Any:
    """Return what is counted, once the cache is full."""
    while True:
        service.check(LIMIT_SECONDS)
        time.sleep(0.2)
        try:
            totals = read_index(root).totals
        except CacheError:
            continue
        if totals.bytes > 0.8 * MAX_BYTES:
            return totals


def _reader(
    place: Path, framework: str, number: int, root: Path, epochs: int, seconds: float
) -> Child:
    command = [sys.executable, "-m", "benchmarks.refreshed", "--read", framework, str(root)]
    command += [f"job{number}", str(epochs), str(seconds)]
    return Child(command, place / f"reader{number}.log")


def make_objects(folder: Path) -> None:
    """Write the source: arrays whose rows are samples."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(OBJECTS):
        np.save(folder / f"{number:03}.npy", rng.random((ROWS, *SHAPE), np.float32))


def section(rows: list[Refreshed]) -> str:
    """Return the text for the documentation."""
    about = machine()
    lines = [
        "| readers | with retiring ahead | without | epoch | turnovers |",
        "| --- | --- | --- | --- | --- |",
    ]
    for framework, readers in dict.fromkeys((row.framework, row.readers) for row in rows):
        both = {r.ahead: r for r in rows if (r.framework, r.readers) == (framework, readers)}
        cells = [_percent(both.get(True)), _percent(both.get(False))]
        one = both.get(True) or both[False]
        turned = " · ".join(
            f"{both[ahead].turnovers:g}" for ahead in (True, False) if ahead in both
        )
        name = "PyTorch" if framework == "torch" else "TensorFlow"
        lines.append(
            f"| {readers} of {name} | {' | '.join(cells)} | {one.epoch_seconds:g} s | {turned} |"
        )
    shards = round(statistics.median(row.shards for row in rows))
    return "\n".join(
        [
            *lines,
            "",
            "Each cell: new shards as a share of a snapshot's shards "
            f"(about {shards}), the mean over all epochs and readers (10th to 90th percentile). "
            "Turnovers of the cache: with · without retiring ahead. `min_uses` is 1. "
            f"On {about['cores']} cores ({about['cpu']}), load {about['load_before']} from "
            "other programs and this one.",
        ]
    )


def _percent(row: Refreshed | None) -> str:
    if row is None:
        return ""
    return f"{row.share:.1%} ({row.low:.1%} to {row.high:.1%})"


def write_section(page: Path, text: str) -> None:
    """Put the text between the markers of a page, which are made below its heading."""
    before = page.read_text(encoding="utf-8")
    if BEGIN not in before:
        heading = "## Refreshed share\n"
        before = before.replace(heading, f"{heading}\n{BEGIN}\n{END}\n", 1)
    head, _, rest = before.partition(BEGIN)
    _, _, tail = rest.partition(END)
    page.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}", encoding="utf-8")


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--epochs", type=int, default=14, help="of each reader")
    arguments.add_argument("--epoch-seconds", type=float, default=2.0, help="of pauses in each")
    arguments.add_argument("--page", type=Path, help="also write the section of this page")
    arguments.add_argument("--only", help="one case, such as torch:4")
    arguments.add_argument("--serve", metavar="CONFIG", help="be the service (internal)")
    arguments.add_argument("--read", nargs=5, help="be a reader (internal)")
    given = arguments.parse_args()
    if given.serve is not None:
        return be_service(given.serve)
    if given.read is not None:
        framework, root, job, epochs, seconds = given.read
        be_reader(framework, root, job, int(epochs), float(seconds))
        return 0
    epochs = 6 if given.quick else given.epochs
    cases = [case for case in CASES if given.only in (None, f"{case[0]}:{case[1]}")]
    rows = []
    with tempfile.TemporaryDirectory(dir=given.directory, prefix="refreshed-") as folder:
        make_objects(Path(folder) / "objects")
        for n, (framework, readers) in enumerate(cases[:1] if given.quick else cases):
            for ahead in (True, False):
                place = Path(folder) / f"{n}-{ahead}"
                place.mkdir()
                length = given.epoch_seconds
                rows.append(
                    run(place, framework, readers, ahead=ahead, epochs=epochs, seconds=length)
                )
                print(rows[-1], flush=True)
    shown = [
        {**row._asdict(), "goal": GOALS.get(row[:2]) if row.ahead else None} for row in rows
    ]
    report("Share of a full cache that is new in each epoch", shown, given.json)
    if given.page is not None:
        write_section(given.page, section(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
