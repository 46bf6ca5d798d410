"""Two hundred epochs over a cache that changes: a trainer keeps no more than after fifty."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from growcache.cache.index.reader import read_index
from growcache.numpy import EpochLoader

SETTLED, EPOCHS, EVERY = 50, 201, 50
GROWTH = 1.1  # five times the goal of benchmarks/soak.py


def kept() -> dict[str, int]:
    """What this process has: bytes of its own, open files, maps, threads."""
    gc.collect()
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    lines = dict(line.split(":", 1) for line in status.splitlines())
    return {
        "bytes": int(lines["RssAnon"].split()[0]) * 1024,
        "files": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "maps": len(Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()),
        "threads": int(lines["Threads"]),
    }


@pytest.mark.slow
@pytest.mark.parametrize("length", [None, 1200], ids=["growing", "fixed"])
def test_hundreds_of_epochs_keep_nothing(make_cache: Any, length: int | None) -> None:
    cache = make_cache(shape=(32, 32))
    cache.add(*range(8), samples=100)
    # SQLite keeps the descriptor of a closed reader, once, while this process has the writer.
    read_index(cache.root)
    with EpochLoader(cache.root, batch_size=50, min_samples=50, gather="thread") as first:
        next(iter(first))  # starts threads that all loaders of a process share, and that stay
    before, looks = kept(), []
    # In a thread, for to change to a process in mid-pass takes a service that polls the leases.
    with EpochLoader(
        cache.root, batch_size=50, min_samples=800, samples_per_epoch=length, gather="thread"
    ) as loader:
        for epoch in range(EPOCHS):
            # A shard may go between the two looks of a snapshot.
            assert sum(len(batch["id"]) for batch in loader) >= 700
            cache.add(8 + epoch, samples=100)
            cache.retire(epoch)
            cache.poll()
            if epoch >= SETTLED and epoch % EVERY == 0:
                looks.append(kept())
    after = kept()
    assert looks[-1]["bytes"] <= GROWTH * looks[0]["bytes"]
    for name in ("files", "threads"):
        assert after[name] <= before[name]
        assert max(look[name] for look in looks[1:]) <= looks[0][name] + 2  # a lease, a watch
    assert (
        max(look["maps"] for look in looks[1:]) <= looks[0]["maps"] + 16
    )  # shards of a snapshot
