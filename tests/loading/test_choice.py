"""``gather="auto"`` decides by what was measured, and what it delivers does not depend on that."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.loading import blocks, gather_process
from growcache.loading.framework import NUMPY, ParallelCopies
from growcache.loading.gather_process import GatherChoice, run_delay_seconds
from growcache.loading.options import Gather
from growcache.loading.producer import GatherClock
from growcache.numpy import EpochLoader
from tests.conftest import loading_threads
from tests.filled import Filled
from tests.forked import fork
from tests.loading.loaders import as_bytes
from tests.loading.test_process import gatherers

WINDOW = gather_process.WINDOW_SECONDS


def block(seconds: float, stalled: float, batches: int = 8) -> Any:
    """A block that took so long to gather, of which the thread stalled for a share."""
    made = Mock(seconds=seconds, stalled_seconds=seconds * stalled)
    made.marks, made.thread = range(batches), 0
    return made


def decisions(*windows: Any) -> list[bool]:
    """What is decided after each window, of one block."""
    choice = GatherChoice()
    assert not choice.wants_process(0.0, block(1.0, 1.0))  # begins the first window
    return [choice.wants_process(n * WINDOW, made) for n, made in enumerate(windows, 1)]


STALLED, FREE = block(0.3 * WINDOW, 0.9), block(0.3 * WINDOW, 0.05)


@given(st.floats(1e-6, 1), st.floats(0, 1))
def test_a_process_is_wanted_where_the_thread_stalls(making: float, stalled: float) -> None:
    found = block(making * WINDOW, stalled)
    share, of_the_loop = stalled, making * stalled
    near = min(
        abs(share - gather_process.MIN_STALLED_SHARE),
        abs(of_the_loop - gather_process.MIN_STALLED_TIME),
    )
    if near > 1e-9:
        wanted = (
            share > gather_process.MIN_STALLED_SHARE
            and of_the_loop > gather_process.MIN_STALLED_TIME
        )
        assert decisions(*[found] * gather_process.VOTES)[-1] == wanted


def test_as_many_windows_in_a_row_must_agree() -> None:
    assert decisions(STALLED, STALLED, STALLED) == [False, False, True]
    assert not any(decisions(STALLED, STALLED, FREE, STALLED, STALLED))


def test_a_window_without_enough_batches_goes_on() -> None:
    few = block(0.3 * WINDOW, 0.9, batches=1)
    assert not any(decisions(*[few] * 11))
    assert decisions(*[few] * 12)[-1]


def test_a_loop_that_pauses_for_long_decides_nothing() -> None:
    choice = GatherChoice()
    assert not any(choice.wants_process(100.0 * n, STALLED) for n in range(10))


def test_a_wait_for_a_processor_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    delays = itertools.count()
    monkeypatch.setattr(
        gather_process, "run_delay_seconds", lambda thread: 0.3 * WINDOW * next(delays)
    )
    assert not any(decisions(*[STALLED] * 9))


def test_the_kernel_tells_for_how_long_a_thread_had_no_processor() -> None:
    """Two threads of the same processor, one of them in another process."""

    def delay() -> float:
        thread, cpu = threading.get_native_id(), min(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpu})
        before, until = run_delay_seconds(thread), time.monotonic() + 0.3
        with subprocess.Popen([sys.executable, "-SEc", BUSY, str(cpu)]) as other:
            while time.monotonic() < until:
                pass
            other.kill()
        return run_delay_seconds(thread) - before

    if not run_delay_seconds(threading.get_native_id()):
        pytest.skip("this kernel does not say")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(delay).result() > 0.02
    assert run_delay_seconds(0) == 0.0


BUSY = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


def stalled_share(gather: Callable[[], object]) -> float:
    clock = GatherClock()
    with clock.timed(ParallelCopies(NUMPY, bool)):
        gather()
    seconds, stalled = clock.restart()
    return stalled / seconds


def test_a_thread_that_neither_runs_nor_reads_a_disk_stalls() -> None:
    assert stalled_share(lambda: time.sleep(0.1)) > 0.9
    assert stalled_share(lambda: sum(range(1_000_000))) < 0.9


def test_a_thread_that_waits_for_a_disk_does_not_stall(tmp_path: Path) -> None:
    file = tmp_path / "cold"
    with file.open("wb") as written:
        written.write(bytes(4_000_000))
        os.fsync(written.fileno())
        os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    pages = np.memmap(file, np.uint8, "r")
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt

    def read_and_wait() -> None:
        pages[::4096].sum()
        time.sleep(0.05)

    share = stalled_share(read_and_wait)
    if resource.getrusage(resource.RUSAGE_THREAD).ru_majflt == before:
        pytest.skip("this file system is memory")
    assert share == 0


def test_a_batch_transform_that_waits_wants_no_process(
    make_cache: Callable[..., Filled], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather_process, "WINDOW_SECONDS", 0.02)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    cache = make_cache()
    cache.add(*range(12))

    def wait(batch: Any) -> Any:
        time.sleep(0.01)
        return batch

    kinds = read(cache, "auto", lambda kinds: len(kinds) == 100, batch_transform=wait)[1]
    assert set(kinds) == {"thread"}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    gc.collect()
    assert gatherers() == []


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """It changes to the process after a few blocks."""
    monkeypatch.setattr(gather_process, "WINDOW_SECONDS", 0.0)
    monkeypatch.setattr(gather_process, "MIN_BATCHES", 1)
    monkeypatch.setattr(gather_process, "MIN_STALLED_SHARE", -1.0)
    monkeypatch.setattr(gather_process, "MIN_STALLED_TIME", -1.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    return monkeypatch


def read(
    cache: Filled, by: Gather, enough: Callable[[list[str]], bool], **options: Any
) -> tuple[list[bytes], list[str]]:
    """Batches, and what each was made by; slow enough that a process can start meanwhile."""
    found, kinds = list[bytes](), list[str]()
    with EpochLoader(cache.root, batch_size=7, min_samples=1, gather=by, **options) as loader:
        while True:
            for batch in loader:
                found.append(as_bytes(batch))
                kinds.append(loader.report.gather)
                if enough(kinds):
                    assert loader.report.passes <= len(found)
                    return found, kinds
                time.sleep(0.003)


def as_many(kinds: list[str]) -> Callable[[list[str]], bool]:
    return lambda others: len(others) == len(kinds)


def after(*changes: str) -> Callable[[list[str]], bool]:
    """Once it has changed so, and delivered some more."""

    def enough(kinds: list[str]) -> bool:
        found = [kind for kind, _ in itertools.groupby(kinds)]
        return found == list(changes) and set(kinds[-20:]) == {changes[-1]}

    return enough


CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "passes, large rows": ((130, 128), {}),
    "a given length, small rows": ((4,), {"samples_per_epoch": 50}),
    "passes, small rows": ((4,), {"drop_last": False}),
}


def test_a_child_that_is_forked_reads_on_its_own(
    make_cache: Callable[..., Filled], eager: pytest.MonkeyPatch
) -> None:
    cache = make_cache(shape=(130, 128))
    cache.add(*range(12))
    with EpochLoader(cache.root, batch_size=7, min_samples=1) as loader:
        while not gatherers():
            for _ in loader:
                pass
        child = fork()
        if child == 0:
            found = 0
            try:
                found = sum(1 for _ in loader)
                loader.close()
            finally:
                os._exit(0 if found == 17 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert sum(1 for _ in loader) == 17


@pytest.mark.parametrize("case", CASES)
def test_the_change_to_a_process_changes_nothing_that_is_delivered(
    make_cache: Callable[..., Filled],
    eager: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    case: str,
) -> None:
    shape, options = CASES[case]
    eager.setattr(blocks, "BLOCK_BATCHES", 2)  # here, not there
    cache = make_cache(shape=shape)
    cache.add(*range(12))
    with caplog.at_level(logging.INFO):
        found, kinds = read(cache, "auto", after("thread", "process"), **options)
    assert found == read(cache, "thread", as_many(kinds), **options)[0]
    assert caplog.text.count("a gather process takes over") == 1


def test_a_loader_that_is_closed_while_it_changes_leaves_nothing(
    make_cache: Callable[..., Filled], eager: pytest.MonkeyPatch
) -> None:
    cache = make_cache()
    cache.add(*range(12))
    for steps in (3, 4, 5, 40):
        with EpochLoader(cache.root, batch_size=2, min_samples=1) as loader:
            batches = iter(loader)
            for _ in range(steps):
                next(batches)
                time.sleep(0.01)
        assert gatherers() == []


@pytest.mark.parametrize("end", ["close", "collect"])
def test_a_thread_that_waits_for_its_turn_to_go_on_ends_with_the_loader(
    make_cache: Callable[..., Filled], eager: pytest.MonkeyPatch, end: str
) -> None:
    """Its thread passes blocks on; there is room for a few, and the loop takes none."""
    cache = make_cache()
    cache.add(*range(12))
    loader = EpochLoader(
        cache.root, batch_size=2, min_samples=1, batch_transform=lambda batch: batch
    )
    while loader.report.gather == "thread":
        for _ in loader:
            time.sleep(0.003)
            if loader.report.gather == "process":
                break
    time.sleep(0.3)
    if end == "close":
        loader.close()
    del loader
    gc.collect()
    assert gatherers() == []
    assert loading_threads() == set()


@pytest.mark.slow
def test_where_the_process_dies_the_thread_goes_on(
    make_cache: Callable[..., Filled],
    eager: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = make_cache(shape=(130, 128))
    cache.add(*range(12))

    def deadly(kinds: list[str]) -> bool:
        if kinds[-1] == "process":
            for process in gatherers():
                process.kill()
        return after("thread", "process", "thread")(kinds)

    found, kinds = read(cache, "auto", deadly)
    assert found == read(cache, "thread", as_many(kinds))[0]
    assert caplog.text.count("a thread continues after the last") == 1


def test_where_no_process_can_be_started_the_thread_goes_on(
    make_cache: Callable[..., Filled],
    eager: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    cache = make_cache()
    cache.add(*range(4))
    gone = tmp_path / "gone"
    gone.mkdir()
    eager.chdir(gone)
    gone.rmdir()
    kinds = read(cache, "auto", lambda kinds: len(kinds) == 100)[1]
    assert set(kinds) == {"thread"}
    assert caplog.text.count("loader cannot start a gather process") == 1


def test_who_cannot_choose_stays_with_the_thread(
    make_cache: Callable[..., Filled], eager: pytest.MonkeyPatch
) -> None:
    cache = make_cache()
    cache.add(*range(4))
    cache.complete()
    for options in ({"fixed": True}, {"transform": lambda sample: sample}):
        kinds = read(cache, "auto", lambda kinds: len(kinds) == 20, **options)[1]
        assert set(kinds) == {"thread"}
        assert gatherers() == []
