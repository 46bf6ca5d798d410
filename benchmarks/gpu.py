"""Batches on a GPU: how many bytes arrive in a second, and how long a step waits for them.

`bus` copies page-locked batches that are ready, one after the other, which no loader can
outrun; `ordinary` does so from memory that is not page-locked. `in memory` is the loader
without a device: it gathers during a loop that copies nothing. The others are the
loader with ``device="cuda"``, its batches gathered in a thread or in a process.

A step computes matrix products on the device for as long as the table says, looks at the
batch, and ends when the device has: against the same step with one batch that stays there.
All live through all rounds, which are interleaved. Where there is no GPU this says so.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.busy_step import fill, forever
from benchmarks.loading import BATCH, FULL, QUICK, Case
from benchmarks.measure import median, parser, report
from growcache.loading.options import Gather
from growcache.torch import EpochLoader

DEVICE = "cuda"
STEP_MS = {"256 KiB": 5.0, "3 KiB": 0.5}
ROTATED = 8  # batches that are copied round and round
TOGETHER = 16  # copies between two looks at the clock
PRODUCT = 1024  # rows and columns of the matrices
SETTLE_SECONDS, ROUND_SECONDS = 3.0, 3.0


@dataclass(slots=True)
class Found:
    """The measurements of one way of loading, one per round.

    Attributes:
        rate: GB that arrived in a second.
        waits: ms that a step waited.
        ratios: of a step, and of the one whose batch is there.
    """

    rate: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)


def copied(case: Case, *, locked: bool, seconds: float) -> float:
    """Return the GB in a second of copies alone."""
    batch = torch.empty(BATCH, case.sample_bytes, dtype=torch.uint8)
    batches = [batch.random_() for _ in range(ROTATED)]
    batches = [one.pin_memory() if locked else one.clone() for one in batches]
    there = torch.empty_like(batch, device=DEVICE)

    def some() -> int:
        for one in itertools.islice(itertools.cycle(batches), TOGETHER):
            there.copy_(one, non_blocking=True)
        return TOGETHER * batch.nbytes

    return rate_of(some, seconds)


def rate_of(some: Callable[[], int], seconds: float) -> float:
    """Return the GB in a second of what is called again and again, and says how much it was."""
    some()
    torch.cuda.synchronize()
    began, moved = time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        moved += some()
    torch.cuda.synchronize()
    return moved / (time.perf_counter() - began) / 1e9


def taken(batches: Iterator[Any]) -> int:
    """Take some batches, and return their bytes."""
    return sum(batch["x"].nbytes for batch in itertools.islice(batches, TOGETHER))


class Step:
    """A step of about ``milliseconds`` on the device."""

    def __init__(self, milliseconds: float) -> None:
        self._left = torch.rand(PRODUCT, PRODUCT, device=DEVICE)
        self._products = 0
        tries = 50
        began = self._timed(tries)
        self._products = max(1, round(tries * milliseconds / min(began, self._timed(tries))))

    def _timed(self, products: int) -> float:
        """Return the milliseconds of a number of products."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        self._compute(products)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) * 1e3

    def _compute(self, products: int) -> None:
        for _ in range(products):
            torch.mm(self._left, self._left)

    def __call__(self, batch: dict[str, Any]) -> None:
        """Compute, and look at the batch."""
        self._compute(self._products)
        batch["x"][-1].view(-1)[-1].item()  # waits for the device


def stepped(batches: Iterator[Any], step: Step, seconds: float) -> tuple[float, float]:
    """Return the mean ms of a step, and of the wait for its batch."""
    clock, waits, whole = time.perf_counter, list[float](), list[float]()
    end = clock() + seconds
    while (began := clock()) < end:
        batch = next(batches)
        waits.append(clock() - began)
        step(batch)
        whole.append(clock() - began)
    return fmean(whole) * 1e3, fmean(waits) * 1e3


def measure(case: Case, directory: Path, rounds: int, scale: float) -> list[dict[str, Any]]:
    """Return the lines of the table."""
    fill(case, directory)
    gathers: tuple[Gather, ...] = ("thread", "process")
    ways: dict[str, tuple[Gather, str | None]] = {
        "in memory": ("thread", None),
        **{gather: (gather, DEVICE) for gather in gathers},
    }
    found = {way: Found() for way in ("bus", "ordinary", *ways)}
    seconds, step = ROUND_SECONDS * scale, Step(STEP_MS[case.name])
    with ExitStack() as stack:
        batches: dict[str, Iterator[Any]] = {}
        for way, (gather, device) in ways.items():
            loader = EpochLoader(
                directory, batch_size=BATCH, min_samples=BATCH, gather=gather, device=device
            )
            batches[way] = forever(stack.enter_context(loader))
            rate_of(lambda way=way: taken(batches[way]), SETTLE_SECONDS * scale)  # type: ignore[misc]
        resident = itertools.repeat(next(batches["thread"]))
        for _ in range(rounds):
            found["bus"].rate.append(copied(case, locked=True, seconds=seconds / 3))
            found["ordinary"].rate.append(copied(case, locked=False, seconds=seconds / 3))
            bare, _ = stepped(resident, step, seconds)
            for way, of_way in batches.items():
                found[way].rate.append(rate_of(lambda of=of_way: taken(of), seconds))  # type: ignore[misc]
                if ways[way][1] is not None:
                    whole, wait = stepped(of_way, step, seconds)
                    found[way].waits.append(wait)
                    found[way].ratios.append(whole / bare)
    return [line(case, way, one, found["bus"]) for way, one in found.items()]


def line(case: Case, way: str, found: Found, bus: Found) -> dict[str, Any]:
    """Return a line of the table."""
    shares = [one / limit for one, limit in zip(found.rate, bus.rate, strict=True)]
    made = {
        "samples of": case.name,
        "way": way,
        "GB/s": median(found.rate),
        "of the bus": median(shares),
    }
    if found.waits:
        made["step ms"] = STEP_MS[case.name]
        made["wait ms"] = median(found.waits)
        made["step / resident"] = median(found.ratios)
    return made


def main() -> int:
    given = parser(__doc__).parse_args()
    if not torch.cuda.is_available():
        print("torch finds no GPU here, so there is nothing to measure")
        return 0
    rows: list[dict[str, Any]] = []
    for case in QUICK if given.quick else FULL:
        with tempfile.TemporaryDirectory(dir=given.directory, prefix="gpu-") as place:
            rounds, scale = (2, 0.1) if given.quick else (5, 1.0)
            rows += measure(case, Path(place), given.rounds or rounds, scale)
    name = torch.cuda.get_device_name()
    report(f"Batches of {BATCH} on {name}, torch {torch.__version__}", rows, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
