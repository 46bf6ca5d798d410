"""Millions of reads, each of them checked, while the cache is turned over again and again.

`growcache run` draws samples of 3 KiB from a user's own format, as fast as that goes, and
evicts as old ones are let go; four readers (two of PyTorch, one of NumPy, one of
TensorFlow) read epoch after epoch without a step in between. The last word of a sample is
a keyed hash of the 383 others (the sum of each times an odd number of its place's own,
modulo 2^64), so every delivered sample is checked by its reader: a changed word, or two
that changed places, cannot pass. The loaders' own checks (``verify: first``: the digest of
a shard when it is first mapped, TensorFlow's CRC32C of each record) come on top.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.measure import Child, machine, parser, report, verdict, write_config
from growcache.cache.index.reader import read_index
from growcache.errors import CacheError

READS = 10_000_000
READERS = ("torch", "torch", "numpy", "tensorflow")
WORDS = 384  # of 64 bits: 3 KiB
OBJECTS, OBJECT_SAMPLES = 500, 64
MAX_BYTES = 48_000_000
BATCH = 256
TURNOVERS, LIMIT_SECONDS = 10.0, 600.0
BEGIN, END = "<!-- turnover: written by benchmarks/turnover.py -->", "<!-- turnover: end -->"

KEY = np.random.default_rng(20).integers(0, 2**62, WORDS - 1, dtype=np.int64) * 2 + 1


def hashes(words: Any) -> Any:
    """Return what the last word of each sample must be: int64 [n]."""
    return np.einsum("ij,j->i", words[:, :-1], KEY)


def read(object: Any, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """The format: samples out of nothing, as many as a visit yields."""
    values = rng.integers(-(2**63), 2**63 - 1, (OBJECT_SAMPLES, WORDS), dtype=np.int64)
    values[:, -1] = hashes(values)
    for row in values:
        yield {"x": row}


class Seen(NamedTuple):
    """The figures of one reader."""

    reader: str
    samples: int
    wrong: int
    epochs: int
    seconds: float


def batches(reader: str, root: str) -> Iterable[Any]:
    """Return what is iterated once per epoch."""
    options: dict[str, Any] = {"batch_size": BATCH, "min_samples": 4 * BATCH, "job": reader}
    if reader == "tensorflow":
        from growcache.tensorflow import dataset

        made: Iterable[Any] = dataset(root, **options)
        return made
    if reader == "torch":
        from growcache.torch import EpochLoader

        return EpochLoader(root, **options)
    from growcache.numpy import EpochLoader as NumpyLoader

    return NumpyLoader(root, **options)


def be_reader(reader: str, root: str, reads: int) -> None:
    """Read and check a number of samples, and print what was seen."""
    epochs = samples = wrong = 0
    loader, began = batches(reader, root), time.perf_counter()
    while samples < reads:
        for batch in loader:
            words = np.asarray(batch["x"])
            wrong += int((hashes(words) != words[:, -1]).sum())
            samples += len(words)
            if samples >= reads:
                break
        epochs += 1
    seen = Seen(reader, samples, wrong, epochs, time.perf_counter() - began)
    print(json.dumps(seen._asdict()), flush=True)


def run(place: Path, reads: int) -> tuple[list[Seen], float, int]:
    """Return what the readers saw, how often the cache was turned over, and its samples."""
    (place / "objects").mkdir()
    for number in range(OBJECTS):
        (place / "objects" / f"{number:04}.bin").write_bytes(b"x")
    root = place / "cache"
    source = {"url": f"{place}/objects/*.bin", "format": "benchmarks.turnover:read"}
    cache = {"path": str(root), "max_bytes": MAX_BYTES, "min_uses": 0, "resume_seconds": 0}
    write_config(place / "c.yaml", source, {"workers": 1, "concurrency": 4}, cache)
    service = Child.growcache("run", str(place / "c.yaml"), log=place / "run.log")
    try:
        readers = [_start(place, n, name, root, reads) for n, name in enumerate(READERS)]
        for reader in readers:
            reader.wait(LIMIT_SECONDS)
        totals = _totals(root)
    finally:
        service.process.send_signal(signal.SIGINT)
        service.wait(LIMIT_SECONDS + 120)  # since its start
    seen = [Seen(**json.loads(r.log.read_text().splitlines()[-1])) for r in readers]
    return seen, totals.evicted_samples / max(1, totals.samples), totals.samples


def _start(place: Path, number: int, name: str, root: Path, reads: int) -> Child:
    command = [sys.executable, "-m", "benchmarks.turnover", "--read", name]
    command += [str(root), str(reads // len(READERS))]
    return Child(command, place / f"reader-{number}.log")


def _totals(root: Path) -> Any:
    while True:
        try:
            return read_index(root).totals
        except CacheError:
            time.sleep(0.1)


def check(place: Path) -> str:
    """Return what ``growcache check`` says at the end."""
    command = [sys.executable, "-m", "growcache", "check", str(place / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr


def section(seen: list[Seen], turned: float, held: int, said: str) -> str:
    """Return the text for the documentation."""
    about = machine()
    samples, wrong = sum(s.samples for s in seen), sum(s.wrong for s in seen)
    epochs = ", ".join(f"{s.reader} {s.epochs:,}" for s in seen)
    return "\n".join(
        [
            f"Four readers received {samples:,} samples of 3 KiB in "
            f"{max(s.seconds for s in seen):,.0f} s, while the cache of about {held:,} samples "
            f"was turned over {turned:.1f} times.",
            "",
            f"- Wrong samples: {wrong}. Errors in readers: none. `growcache check` at the end: "
            f"{said}.",
            f"- Epochs: {epochs}.",
            f"- Machine: {about['cores']} cores, {about['memory_gib']} GiB.",
            "",
            "The last word of each sample is a keyed hash of its 383 others, modulo 2^64. So no "
            "changed word passes, nor a row of another sample.",
        ]
    )


def write_section(page: Path, text: str) -> None:
    """Put the text between the markers of a page, which are made below its heading."""
    before = page.read_text(encoding="utf-8")
    if BEGIN not in before:
        before = before.replace("## Turnover\n", f"## Turnover\n\n{BEGIN}\n{END}\n", 1)
    head, _, rest = before.partition(BEGIN)
    _, _, tail = rest.partition(END)
    page.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}", encoding="utf-8")


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--reads", type=int, help=f"in all (default {READS:,})")
    arguments.add_argument("--page", type=Path, help="also write the section of this page")
    arguments.add_argument("--read", nargs=3, help="be a reader (internal)")
    given = arguments.parse_args()
    if given.read is not None:
        reader, root, reads = given.read
        be_reader(reader, root, int(reads))
        return 0
    reads = given.reads or (400_000 if given.quick else READS)
    with tempfile.TemporaryDirectory(dir=given.directory, prefix="turnover-") as place:
        seen, turned, held = run(Path(place), reads)
        said = check(Path(place))
    rows = [{**s._asdict(), "seconds": round(s.seconds, 1)} for s in seen]
    title = (
        f"{sum(s.samples for s in seen):,} reads of 3 KiB; the cache of {held:,} samples turned "
        f"over {turned:.1f} times, {verdict(turned, TURNOVERS, at_most=False)}; check: {said}"
    )
    report(title, rows, given.json)
    if given.page is not None:
        write_section(given.page, section(seen, turned, held, said))
    return int(any(s.wrong for s in seen))


if __name__ == "__main__":
    sys.exit(main())
