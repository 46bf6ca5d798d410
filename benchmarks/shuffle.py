"""How well windows of a number of shards shuffle a pass, and what the window costs.

Quality is that of the real plan, over a cache of which every shard is a random mixture, with
samples of objects in visits of four, dealt over groups of four shards. Six figures compare it with
a permutation of all samples: the correlation of position and age; how often
two consecutive samples are of one shard; how many pairs of one object meet in a batch, and
how many pairs of a batch meet again in a batch of the next pass, both as multiples of what
chance does; χ² of the ages in a batch, per degree of freedom; the largest difference between
the distributions of the distance in a pass between neighbours of a shard.

Speed is that of the loader over one pass, with the window so set, in this run: warm from the
page cache, and cold, all shards dropped from it before each pass.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import numpy.typing as npt

from benchmarks.measure import machine, parser, report
from benchmarks.synthetic_cache import SyntheticCache, random_samples
from growcache.loading import plan
from growcache.loading.plan import cut_windows, locate_samples, shard_order
from growcache.torch import EpochLoader

Integers = npt.NDArray[np.int64]
WINDOWS = (1, 2, 4, 8, 16, 64)  # shards
SHARDS, SAMPLES = 256, 256  # of the cache whose order is looked at
BATCH = 64
VISIT, GROUP = 4, 4  # samples of an object in a visit, and shards that they are dealt over
DECILES = 10
SEED = 0
SPEED_SHARDS, SHARD_BYTES = 16, 64_000_000
SIZES = {"256 KiB": ("<f4", (64, 1024)), "3 KiB": ("|u1", (32, 32, 3))}
BEGIN, END = "<!-- shuffle: written by benchmarks/shuffle.py -->", "<!-- shuffle: end -->"


class Quality(NamedTuple):
    """Figures of an order; see the top of this file."""

    correlation: float
    same_shard: float
    same_object: float
    met_again: float
    chi_squared: float
    distance: float


def order_of(window_shards: int | None, pass_number: int) -> Integers:
    """Return the samples in the order of a pass, numbered by age; None: any permutation."""
    total = SHARDS * SAMPLES
    if window_shards is None:
        return np.random.default_rng(pass_number).permutation(total)
    with mock.patch.object(plan, "MIN_WINDOW_SHARDS", 1):
        order = shard_order(
            [(n, SAMPLES) for n in range(SHARDS)], seed=SEED, pass_number=pass_number
        )
        windows = cut_windows(
            order,
            seed=SEED,
            pass_number=pass_number,
            target_samples=window_shards * SAMPLES,
        )
    parts = []
    for window in windows:
        places, rows = locate_samples(window.order(), window.starts())
        parts.append(np.asarray(window.numbers)[places] * SAMPLES + rows)
    return np.concatenate(parts)


def objects() -> Integers:
    """Return the object of each sample: each visit is dealt over the shards of a group."""
    shard, row = np.divmod(np.arange(SHARDS * SAMPLES), SAMPLES)
    return (shard // GROUP) * SAMPLES * GROUP // VISIT + row


def pairs(labels: Integers) -> float:
    """Return how many pairs of alike labels meet in a batch, on average; [batches, BATCH]."""
    ordered = np.sort(labels, axis=1)
    met = 0.0
    for lag in range(1, BATCH):
        alike = (ordered[:, lag:] == ordered[:, :-lag]).sum()
        if not alike:
            break
        met += float(alike)
    return met / len(labels)


def quality(window_shards: int | None) -> Quality:
    """Return the figures of a window of that number of shards; None: a permutation of all."""
    order, following = order_of(window_shards, 0), order_of(window_shards, 1)
    total, batches = len(order), len(order) // BATCH
    batched = order[: batches * BATCH].reshape(batches, BATCH)
    shard = order // SAMPLES
    position = np.empty(total, np.int64)
    position[order] = np.arange(total)
    later = np.empty(total, np.int64)
    later[following] = np.arange(total)
    chance = BATCH * (BATCH - 1) / 2 / (total - 1)
    counts = np.apply_along_axis(
        lambda ages: np.bincount(ages, minlength=DECILES), 1, batched * DECILES // total
    )
    expected = BATCH / DECILES
    apart = np.abs(np.diff(position.reshape(SHARDS, SAMPLES), axis=1)).ravel() / total
    quantiles = np.sort(apart)
    uniform = 2 * quantiles - quantiles**2  # two places of a permutation
    steps = np.arange(1, len(quantiles) + 1) / len(quantiles)
    return Quality(
        correlation=float(np.corrcoef(order, np.arange(total))[0, 1]),
        same_shard=float((shard[1:] == shard[:-1]).mean()),
        same_object=pairs(objects()[batched]) / (chance * (VISIT - 1)),
        met_again=pairs(later[batched] // BATCH) / (chance * (BATCH - 1)),
        chi_squared=float(((counts - expected) ** 2 / expected).sum(1).mean() / (DECILES - 1)),
        distance=float(np.abs(steps - uniform).max()),
    )


def make(root: Path, dtype: str, shape: tuple[int, ...], shards: int) -> None:
    """Write the cache of which batches are taken."""
    rng = np.random.default_rng(0)
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    with SyntheticCache(root, dtype, shape) as cache:
        for number in range(shards):
            samples = SHARD_BYTES // nbytes
            cache.add_arrays(number, random_samples(rng, dtype, (samples, *shape)))
        cache.complete()


def drop(root: Path) -> None:
    """Have the page cache forget all shards."""
    for path in (root / "shards").glob("*.tfrecord"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def one_pass(root: Path, window_shards: int, *, cold: bool) -> tuple[float, float]:
    """Return samples per second, and milliseconds to the first batch, of a pass anew."""
    limits = mock.patch.multiple(
        plan,
        WINDOW_SHARDS=min(window_shards, plan.MIN_WINDOW_SHARDS),
        WINDOW_BYTES=window_shards * SHARD_BYTES,
        WINDOW_SAMPLES=1 << 40,
    )
    with limits, EpochLoader(root, batch_size=BATCH) as loader:
        if not cold:
            for _ in loader:
                pass
        else:
            drop(root)
        began, samples, first = time.perf_counter(), 0, 0.0
        for batch in loader:
            first = first or time.perf_counter() - began
            samples += len(batch["x"])
            batch["x"].view(-1)[-1].item()
        return samples / (time.perf_counter() - began), first * 1e3


def speeds(
    place: Path, windows: tuple[int, ...], rounds: int, shards: int
) -> dict[int, dict[str, float]]:
    """Return per window the medians of all speeds, measured in turns."""
    found: dict[int, dict[str, list[float]]] = {w: {} for w in windows}
    for name, (dtype, shape) in SIZES.items():
        root = place / name.replace(" ", "")
        make(root, dtype, shape, shards)
        for _ in range(rounds):
            for window in windows:
                for cold in (False, True):
                    rate, first = one_pass(root, window, cold=cold)
                    state = "cold" if cold else "warm"
                    found[window].setdefault(f"{name} {state}, samples/s", []).append(rate)
                    if cold:
                        found[window].setdefault(f"{name} cold, first ms", []).append(first)
    return {
        window: {name: float(f"{statistics.median(v):.3g}") for name, v in one.items()}
        for window, one in found.items()
    }


def rows_of(speed: dict[int, dict[str, float]]) -> Iterator[dict[str, Any]]:
    """Yield a line per window, and one of a permutation of all."""
    for window in (*WINDOWS, None):
        figures = quality(window)
        yield {
            "shards": "all" if window is None else window,
            "correlation": round(figures.correlation, 4),
            "same shard": round(figures.same_shard, 4),
            "same object": round(figures.same_object, 2),
            "met again": round(figures.met_again, 2),
            "chi²/df": round(figures.chi_squared, 3),
            "distance": round(figures.distance, 3),
        } | (speed.get(window, {}) if window is not None else {})


def section(rows: list[dict[str, Any]], *, timed: bool) -> str:
    """Return the text for the documentation."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "| " + " | ".join("---" for _ in names) + " |"]
    lines += ["| " + " | ".join(_cell(row, name) for name in names) + " |" for row in rows]
    about = machine()
    said = (
        f"{SHARDS} shards of {SAMPLES} samples, batches of {BATCH}, objects of {VISIT} samples "
        f"dealt over {GROUP} shards; the last line is a permutation of all."
    )
    if timed:
        said += (
            f" Speed: {SPEED_SHARDS} shards of 64 MB, batches of {BATCH}, on {about['cores']} "
            f"cores ({about['cpu']})."
        )
    return "\n".join([*lines, "", said])


def _cell(row: dict[str, Any], name: str) -> str:
    """Return a figure as the page has it; those of speed are rounded already."""
    value = row.get(name, "")
    return f"{value:,.0f}" if value and name.endswith(("samples/s", "ms")) else f"{value}"


def write_section(page: Path, text: str) -> None:
    """Put the text between the markers of a page."""
    before = page.read_text(encoding="utf-8")
    head, _, rest = before.partition(BEGIN)
    _, _, tail = rest.partition(END)
    page.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}", encoding="utf-8")


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--page", type=Path, help="also write the section of this page")
    arguments.add_argument("--order-only", action="store_true", help="measure no speed")
    given = arguments.parse_args()
    rounds = given.rounds or (1 if given.quick else 3)
    windows = (1, 4) if given.quick else (1, 4, 16)
    speed: dict[int, dict[str, float]] = {}
    if not given.order_only:
        with tempfile.TemporaryDirectory(dir=given.directory, prefix="shuffle-") as place:
            speed = speeds(Path(place), windows, rounds, 4 if given.quick else SPEED_SHARDS)
    rows = list(rows_of(speed))
    report("Shuffling by windows of several shards", rows, given.json)
    if given.page is not None:
        write_section(given.page, section(rows, timed=bool(speed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
