"""A trainer over many epochs of a cache that grows, fills and evicts: what it keeps must not grow.

A writer in a process of its own commits shards and evicts old ones, as in `epoch_switch`; the
loop here goes through epoch after epoch, growing ones and then ones of a fixed length, with a
new checkpoint now and then. Looked at after the fiftieth epoch and then ten times more: the
memory that this process has for itself (anonymous pages, and page tables), and its open
files, maps of memory, threads and child processes. Maps of shards are as many as the
snapshot has shards, so they count without those.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.epoch_switch import BATCH, KINDS, LIVE, writer
from benchmarks.measure import parser, report, verdict
from growcache.torch import EpochLoader

SETTLED = 50  # epochs, after which nothing may grow
LOOKS = 20
GOAL_SHARE = 0.02


def look(root: Path) -> dict[str, int]:
    """Return what this process has now."""
    gc.collect()
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    found = dict(line.split(":", 1) for line in status.splitlines())
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8")
    return {
        "own bytes": sum(int(found[name].split()[0]) * 1024 for name in ("RssAnon", "VmPTE")),
        "files": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "maps": sum(str(root) not in line for line in maps),
        "threads": int(found["Threads"]),
        "children": len(children.split()),
    }


def epochs(loader: EpochLoader, count: int) -> Iterator[int]:
    """Go through epochs; yields the number of each that is over."""
    for number in range(count):
        for batch in loader:
            batch["x"].view(-1)[-1].item()
        if number % 10 == 0:
            json.dumps(loader.state_dict())
            str(loader.report)
        yield number


def soak(root: Path, kind: str, length: int | None, count: int) -> list[dict[str, int]]:
    """Return what was there at every look."""
    found = []
    samples = LIVE[0] * KINDS[kind].samples
    settled = min(SETTLED, count // 4)
    every = max(1, (count - settled) // LOOKS)
    with EpochLoader(
        root, batch_size=BATCH, min_samples=samples, samples_per_epoch=length
    ) as loader:
        for number in epochs(loader, count):
            if number >= settled and (number - settled) % every == 0:
                found.append(look(root) | {"epoch": number})
    return found


def line(
    case: str, before: dict[str, int], found: list[dict[str, int]], after: dict[str, int]
) -> dict[str, Any]:
    """Return what a table says of one case; the first fifth of the looks against the last.

    Args:
        case: its name.
        before: there was a loader.
        found: in the course of its epochs.
        after: it was closed.
    """
    few = max(1, len(found) // 5)
    first, last = (
        statistics.median(one["own bytes"] for one in part)
        for part in (found[:few], found[-few:])
    )
    row: dict[str, Any] = {
        "case": case,
        "epochs": found[-1]["epoch"] + 1,
        "MB at first": round(first / 1e6, 1),
        "MB in the end": round(last / 1e6, 1),
        "goal": verdict(round(last / first - 1, 4), GOAL_SHARE, at_most=True),
    }
    for name in ("files", "maps", "threads", "children"):
        counts = [one[name] for one in found]
        row[name] = (
            f"{before[name]} · {max(counts[:few])} · {max(counts[-few:])} · {after[name]}"
        )
    return row


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--epochs", type=int, help="of each case (default 1,000)")
    arguments.add_argument(
        "--interval", type=float, default=0.05, help="seconds between shards"
    )
    given = arguments.parse_args()
    count = given.epochs or (40 if given.quick else 1000)
    rows = []
    with tempfile.TemporaryDirectory(dir=given.directory, prefix="soak-") as place:
        for kind in KINDS:
            root = Path(place) / kind
            fixed = LIVE[0] * KINDS[kind].samples * 3 // 2
            with writer(root, kind, given.interval):
                for name, length in (("growing", None), ("fixed", fixed)):
                    before = look(root)
                    found = soak(root, kind, length, count)
                    rows.append(line(f"{kind} {name}", before, found, look(root)))
    report(
        "What a trainer keeps over many epochs (before · at first, most · in the end, most · closed)",
        rows,
        given.json,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
