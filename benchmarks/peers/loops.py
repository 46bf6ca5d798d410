"""One round of a contestant: a new loader, its first batch, a lead-in, then what is timed.

The lead-in ends with the first epoch (or after `Limits.lead_seconds`): until then threads
and worker processes start, caches are looked through, and each batch is proven. Then batches
are taken for `SETTLE_SECONDS` as they are when timed, because a proof takes them so slowly
that a loader is far ahead, and memory is touched for the first time in which batches come
without a proof. Labels of timed batches are proven, too, but afterwards.

MB/s, waits and their percentiles leave out the first batch of each epoch, which is the gap,
a figure of its own. That favours whoever reads ahead in the gap, or delivers several batches
at once, of which it waits for the first. So both are there with the gaps, too (`sustained`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.noise import Array
from benchmarks.peers.cases import Case
from benchmarks.peers.cost import Ticker, cpu_seconds, spin, ticks_alone
from benchmarks.peers.proof import Batch, digest, repeated, summed

Source = Iterable[Any]  # each iteration is an epoch
Make = Callable[[], AbstractContextManager[Source]]
LOOPS = ("idle", "steps", "gil")
SETTLE_SECONDS = 0.25
LEAST_BATCHES = 16  # are timed; of fewer, those that were read ahead would be too many


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a round lasts.

    Attributes:
        seconds: are timed, at least `LEAST_BATCHES`; epoch follows epoch until then.
        lead_seconds: end the lead-in before its epoch is over; None waits for that.
    """

    seconds: float
    lead_seconds: float | None


def arrays(batch: Any) -> Batch:
    """Return a batch as NumPy arrays over the same memory."""
    return tuple(part.numpy() if hasattr(part, "numpy") else part for part in batch)


class Walk:
    """A loader's batches, epoch after epoch.

    Attributes:
        waited: seconds for the latest batch; a first one includes the end of the epoch before.
        first: whether it was the first of its epoch.
        epochs: how many began.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._batches: Iterator[Any] | None = None
        self.waited = 0.0
        self.first = False
        self.epochs = 0

    def step(self) -> Any:
        """Return the next batch."""
        began = time.perf_counter()
        self.first = self._batches is None
        while True:
            if self._batches is None:
                self._batches = iter(self._source)
                self.epochs += 1
            batch = next(self._batches, None)
            if batch is not None:
                self.waited = time.perf_counter() - began
                return batch
            if self.first:
                raise RuntimeError("an epoch without a batch")
            self.first, self._batches = True, None


@dataclass(slots=True)
class Record:
    """A record of the batches of the timed part."""

    epochs: list[int] = field(default_factory=list)
    received: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    firsts: list[bool] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    labels: list[Array] = field(default_factory=list)
    elements: list[Any] = field(default_factory=list)
    work: int = 0

    def add(self, walk: Walk, batch: Any) -> None:
        """Look at one element of a batch, and keep its labels."""
        self.received.append(time.perf_counter())
        found = arrays(batch)
        self.elements.append(found[0].reshape(-1)[-1])
        self.labels.append(found[-1].copy())
        self.nbytes.append(found[0].nbytes)
        self.waits.append(walk.waited)
        self.firsts.append(walk.first)
        self.epochs.append(walk.epochs)


def one_round(make: Make, case: Case, loop: str, limits: Limits) -> dict[str, Any]:
    """Return the figures of a round; seconds, bytes and samples.

    Raises:
        RuntimeError: what was delivered is not what was written.
    """
    alone = ticks_alone() if loop == "gil" else 0.0
    pace = pace_alone() if loop == "steps" else 0.0
    began = time.perf_counter()
    with make() as source:
        walk = Walk(source)
        batch = walk.step()
        result: dict[str, Any] = {"first_seconds": time.perf_counter() - began}
        result |= lead_in(walk, batch, case, limits.lead_seconds)
        del batch
        settle(walk)
        if loop == "gil":
            result |= ticked(walk, case, limits.seconds, alone)
        else:
            result |= timed(walk, case, limits.seconds, loop == "steps")
    if loop == "steps":  # before or after: at one of them the machine was others' least
        result |= stalls(case, result.pop("work"), max(pace, pace_alone()))
    return result


def pace_alone() -> float:
    """Return the work per second of an undisturbed step: the best of some tries."""
    return max(spin(0.02) for _ in range(8)) / 0.02


def lead_in(walk: Walk, batch: Any, case: Case, most: float | None) -> dict[str, Any]:
    """Take the rest of the first epoch, and prove it."""
    began, digests, labels = time.perf_counter(), [], []
    while walk.epochs == 1:
        found = arrays(batch)
        digests.append(digest(found))
        labels.append(found[-1].copy())
        if most is not None and time.perf_counter() - began > most:
            prove(case, labels, whole=False)
            return {"proven": None, "digest": None}
        batch = walk.step()
    prove(case, labels, whole=True)
    return {"digest": summed(digests), "lead_gap_seconds": walk.waited}


def settle(walk: Walk) -> None:
    """Take batches for a while without looking at them."""
    began = time.perf_counter()
    while time.perf_counter() - began < SETTLE_SECONDS:
        walk.step()


def prove(case: Case, labels: list[Array], *, whole: bool) -> None:
    wrong = repeated(case, np.concatenate(labels), whole=whole)
    if wrong is not None:
        raise RuntimeError(f"an epoch delivered {wrong}")


def timed(walk: Walk, case: Case, seconds: float, steps: bool) -> dict[str, Any]:
    """Take batches for this many seconds; return their figures and their cost."""
    record, cpu, began = Record(), cpu_seconds(), time.perf_counter()
    start, opened = began, walk.epochs
    while time.perf_counter() - began < seconds or len(record.waits) < LEAST_BATCHES:
        batch = walk.step()  # the one before lives until now, as in any loop over batches
        record.add(walk, batch)
        if steps:
            record.work += spin(case.step_seconds)
    cpu = cpu_seconds() - cpu
    prove_record(case, record, opened)
    work = {"work": record.work / len(record.waits)} if steps else {}
    return figures(case, record, start, cpu) | work


def ticked(walk: Walk, case: Case, seconds: float, alone: float) -> dict[str, Any]:
    """Take batches while a thread ticks, and return the ticks that it got."""
    record, opened = Record(), walk.epochs
    with Ticker() as ticker:
        before, began = ticker.ticks, time.perf_counter()
        while time.perf_counter() - began < seconds:
            batch = walk.step()
            record.add(walk, batch)
        took = time.perf_counter() - began
        share = (ticker.ticks - before) / took / alone
    prove_record(case, record, opened)
    return {"gil_share": share, "gil_bytes_per_second": sum(record.nbytes) / took}


def prove_record(case: Case, record: Record, opened: int) -> None:
    """Prove the labels of each epoch; the first and the last may have been cut."""
    last = record.epochs[-1]
    for epoch in range(opened, last + 1):
        labels = [y for e, y in zip(record.epochs, record.labels, strict=True) if e == epoch]
        if labels:
            prove(case, labels, whole=opened < epoch < last)


def figures(case: Case, record: Record, start: float, cpu: float) -> dict[str, Any]:
    """Return speed, waits and gaps."""
    stamps = np.array([start, *record.received])
    first, nbytes = np.array(record.firsts), np.array(record.nbytes)
    waits, counts = np.array(record.waits), np.array([len(y) for y in record.labels])
    inner = ~first
    busy = np.diff(stamps)[inner].sum()
    result: dict[str, Any] = {
        "batches": len(waits),
        "bytes": int(nbytes.sum()),
        "cpu_seconds": cpu,
        "gap_seconds": waits[first].tolist(),
        "sustained_bytes_per_second": nbytes.sum() / np.diff(stamps).sum(),
        "sustained_wait_seconds": waits.mean(),
    }
    if inner.any():
        result |= {
            "bytes_per_second": nbytes[inner].sum() / busy,
            "samples_per_second": counts[inner].sum() / busy,
            "wait_seconds": waits[inner].mean(),
            "wait_p99_seconds": np.percentile(waits[inner], 99),
        }
    return {
        key: value.item() if hasattr(value, "item") else value for key, value in result.items()
    }


def stalls(case: Case, work: float, pace: float) -> dict[str, Any]:
    """Return how much longer a step took than alone, because the loader held the GIL or the core.

    Args:
        case: how long a step is.
        work: done in one, on the average.
        pace: work per second of an undisturbed one.
    """
    return {"stall_seconds": case.step_seconds - work / pace}
