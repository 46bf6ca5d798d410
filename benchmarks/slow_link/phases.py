"""The waits of a loop, read from its file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.slow_link.loop import STEP_SECONDS


@dataclass(frozen=True, slots=True)
class Phase:
    """A span of the monotonic clock, and what the store sent meanwhile."""

    name: str
    began: float
    ended: float
    sent_bytes: int


def waits_in(file: Path, began: float, ended: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the waits that end in a span, clipped to it, and how many samples each brought.

    A wait that is not over has no line yet; it began a step after the last batch.
    """
    lines = np.loadtxt(file, ndmin=2)
    asked, waited, samples = lines[:, 0], lines[:, 1], lines[:, 2]
    last = asked[-1] + waited[-1] + STEP_SECONDS
    if last < ended:
        asked, samples = np.append(asked, last), np.append(samples, 0)
        waited = np.append(waited, ended - last)
    ends = asked + waited
    inside = (ends > began) & (asked < ended)
    clipped = np.minimum(ends, ended) - np.maximum(asked, began)
    return clipped[inside], samples[inside]


def row(loader: str, phase: Phase, file: Path, link: float) -> dict[str, Any]:
    """Return the table's row of a phase; link: its bytes per second."""
    waits, samples = waits_in(file, phase.began, phase.ended)
    seconds = phase.ended - phase.began
    return {
        "loader": loader,
        "phase": phase.name,
        "seconds": round(seconds, 1),
        "waiting %": 100 * float(waits.sum()) / seconds,
        "mean wait ms": 1e3 * float(waits.mean()) if len(waits) else None,
        "p99 wait ms": 1e3 * float(np.quantile(waits, 0.99)) if len(waits) else None,
        "longest s": float(waits.max(initial=0)),
        "samples/s": float(samples.sum()) / seconds,
        "link used %": 100 * phase.sent_bytes / seconds / link,
    }
