"""Epoch after epoch a loader keeps nothing: no object, descriptor, map, thread or process.

A short run that counts; the long ones measure (`test_soak`, `benchmarks/soak.py`).
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

import growcache
from growcache.cache import lease_views
from growcache.cache.index.reader import read_index
from growcache.loading.loader import Loader
from growcache.loading.options import Gather
from growcache.loading.report import DeliveryCounts, PassFacts
from growcache.numpy import EpochLoader
from tests.filled import Filled

# The facts about a shard are in several tables, each with a key of its own: until these come
# and go, what they hold grows for some epochs. Fewer looks took that for a leak.
WARM, EVERY, LOOKS = 8, 3, 12
OURS = tracemalloc.Filter(True, str(Path(growcache.__file__).parent / "*"))
REST_SECONDS, RESTS = 0.01, 100
EQUAL_RESTS = 4  # a busy machine may not let a thread run at all between two looks

# Bytes by the line that asked for them.
Lines = Counter[str]


def counted(root: Path) -> Counter[str]:
    """What this process has, with its gather process; maps without those of shards."""
    found = Counter[str]()
    for pid in [os.getpid(), *(child.pid for child in psutil.Process().children())]:
        place = Path("/proc") / str(pid)
        with suppress(FileNotFoundError):
            lines = (place / "maps").read_text(encoding="utf-8").splitlines()
            files = [line.split(maxsplit=5)[5] for line in lines if len(line.split()) > 5]
            found["maps"] += sum(str(root) not in file for file in files)
            found["files"] += sum(1 for _ in (place / "fd").iterdir())
            found["threads"] += sum(1 for _ in (place / "task").iterdir())
            found["processes"] += 1
    return found


def at_rest(root: Path) -> Counter[str]:
    """The same, once the loader has made all that it may make ahead."""
    before, equal = counted(root), 0
    for _ in range(RESTS):
        time.sleep(REST_SECONDS)
        now = counted(root)
        equal = equal + 1 if now == before else 0
        if equal == EQUAL_RESTS:
            break
        before = now
    return before


def held() -> Lines:
    """The bytes that each line of growcache's holds, but for what is in caches with a bound."""
    sys._clear_type_cache()  # it holds names, those of unpickled attributes among them
    lease_views.parse_header.cache_clear()
    gc.collect()
    traces = tracemalloc.take_snapshot().filter_traces([OURS]).statistics("lineno")
    return Lines({str(line.traceback): line.size for line in traces})


def grown(looks: Sequence[Lines]) -> dict[str, list[int]]:
    """The lines that held more at each look than at any before, with what they held.

    What goes up and down, as buffers and maps of what is made ahead do, is no leak.
    """
    lines = {line: [look[line] for look in looks] for line in looks[-1]}
    return {line: found for line, found in lines.items() if _rises(found)}


def _rises(found: Sequence[int]) -> bool:
    return all(after > before for before, after in pairwise(found))


def refuse_leaks(loader: Loader, root: Path, then: Callable[[], None]) -> None:
    """Go through epochs; none of them leaves anything behind."""

    def epochs(count: int) -> None:
        for _ in range(count):
            assert sum(1 for _ in loader)
            str(loader.report)
            loader.state_dict()
            then()

    counts, lines = [], []
    tracemalloc.start()
    try:
        epochs(WARM)
        for _ in range(LOOKS):
            epochs(EVERY)
            counts.append(at_rest(root))
            lines.append(held())
    finally:
        tracemalloc.stop()
    assert grown(lines) == {}
    for kind in counts[0]:
        found = [count[kind] for count in counts]
        assert min(found[-3:]) <= max(found[:3]), (kind, found)


@pytest.fixture
def cache(make_cache: Callable[..., Filled]) -> Filled:
    made = make_cache()
    made.add(*range(6))
    return made


@pytest.fixture
def changes(cache: Filled) -> Callable[[], None]:
    """Has the oldest shard replaced by a new one."""

    def change() -> None:
        live = sorted(row.number for row in read_index(cache.root).shards)
        cache.add(live[-1] + 1)
        cache.retire(live[0])
        cache.poll()

    return change


def nothing() -> None:
    """Leave the cache as it is."""


SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gather", "length"),
    [
        ("thread", None),
        pytest.param("thread", 70, marks=SLOW),
        pytest.param("process", None, marks=SLOW),
        pytest.param("process", 70, marks=SLOW),
    ],
)
def test_over_a_cache_that_changes(
    cache: Filled, changes: Callable[[], None], gather: Gather, length: int | None
) -> None:
    with EpochLoader(
        cache.root,
        batch_size=7,
        min_samples=1,
        gather=gather,
        samples_per_epoch=length,
    ) as loader:
        refuse_leaks(loader, cache.root, changes)


@pytest.mark.slow
@pytest.mark.parametrize("gather", [pytest.param("thread", marks=SLOW), "process"])
def test_over_a_fixed_cache(cache: Filled, gather: Gather) -> None:
    cache.complete()
    with EpochLoader(cache.root, batch_size=7, fixed=True, gather=gather) as loader:
        refuse_leaks(loader, cache.root, nothing)


@SLOW
@pytest.mark.parametrize("what", ["facts", "files", "threads"])
def test_a_leak_is_found(cache: Filled, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    kept: list[Any] = []
    leaks: dict[str, Callable[[], Any]] = {
        "files": lambda: os.open(cache.root, os.O_RDONLY),
        "threads": lambda: threading.Thread(target=over.wait, daemon=True).start(),
    }
    over, begin_pass = threading.Event(), DeliveryCounts.begin_pass

    def leaking(
        tally: DeliveryCounts, number: int, facts: PassFacts, *, again: bool = False
    ) -> None:
        begin_pass(tally, number, facts, again=again)
        kept.append(leaks[what]() if what in leaks else facts)

    cache.complete()
    monkeypatch.setattr(DeliveryCounts, "begin_pass", leaking)
    options: dict[str, Any] = {"batch_size": 7, "fixed": True, "gather": "thread"}
    found = pytest.raises(AssertionError, match="index/reader.py" if what == "facts" else what)
    try:
        with EpochLoader(cache.root, **options) as loader, found:
            refuse_leaks(loader, cache.root, nothing)
    finally:
        over.set()
        for each in kept:
            if isinstance(each, int):
                os.close(each)
