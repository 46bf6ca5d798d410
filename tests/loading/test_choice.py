"""``gather="auto"`` decides by what was measured, and what it delivers does not depend on that."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.loading import gather, stages
from growcache.loading.channel import Stage
from growcache.loading.epochs import Consumer
from growcache.loading.options import Gather
from growcache.loading.stages import GatherChooser, LoopTimes, keeps_process, wants_process
from growcache.numpy import EpochLoader
from tests.conftest import loading_threads
from tests.filled import Filled
from tests.forked import fork
from tests.loading.loaders import as_bytes
from tests.loading.test_process import gatherers

shares = st.floats(0, 1)


@st.composite
def measured(draw: st.DrawFn) -> LoopTimes:
    seconds, making = draw(st.floats(1, 100)), draw(st.floats(1e-3, 100))
    batches, computed = draw(st.integers(4, 10_000)), making * draw(shares)
    return LoopTimes(seconds, batches, making, computed, seconds * draw(shares))


@given(measured(), st.integers(1, 64))
def test_a_process_is_wanted_where_the_thread_stands_still(
    found: LoopTimes, cores: int
) -> None:
    stalled = found.making_seconds - found.computed_seconds
    of_its_own = stalled / found.making_seconds >= stages.MIN_STALLED_SHARE
    of_the_loops = stalled / found.seconds >= stages.MIN_STALLED_TIME
    wanted = cores > 1 and of_its_own and of_the_loops
    assert wants_process([found] * stages.TRIALS, cores) == wanted


FREE, STALLED = LoopTimes(1.0, 100, 0.3, 0.29), LoopTimes(1.0, 100, 0.3, 0.03)


@given(st.permutations([FREE] * 2 + [STALLED] * 3), st.permutations([FREE] * 3 + [STALLED] * 2))
def test_most_of_the_trials_must_agree(most: list[LoopTimes], few: list[LoopTimes]) -> None:
    assert wants_process(most, 2)
    assert not wants_process(few, 2)
    assert not wants_process([STALLED] * (stages.TRIALS - 1), 2)


@given(measured())
def test_what_computes_all_the_time_or_has_little_to_do_stays(found: LoopTimes) -> None:
    for quiet in (
        LoopTimes(found.seconds, found.batches, 1.0, 0.95),
        LoopTimes(found.seconds, found.batches, 0.01, 0.0),
        LoopTimes(found.seconds, found.batches),
    ):
        assert not wants_process([quiet] * stages.TRIALS, 64)


def loop(computes: float, loses: float) -> LoopTimes:
    """A trial of 100 batches with so much computed and lost for each."""
    return LoopTimes(100 * (computes + loses), 100, loop_seconds=100 * computes)


@given(st.floats(1e-4, 1), shares, shares, st.floats(0.5, 2))
def test_what_loses_less_stays_however_fast_the_machine_is(
    step: float, before: float, after: float, machine: float
) -> None:
    by_thread = loop(step, before * step)
    by_process = loop(step * machine, after * step)
    gain = (before - after) / (1 + before)
    if abs(gain - stages.MIN_GAIN) > 1e-6:
        assert keeps_process([by_thread], [by_process]) == (gain > stages.MIN_GAIN)


def test_two_strange_trials_of_five_decide_nothing() -> None:
    thread, process = loop(0.6, 0.03), loop(0.6, 0.001)
    strange = [loop(0.6, 0.9), loop(0.9, 0.5)]
    assert keeps_process([thread] * 5, [strange[0], process, process, strange[1], process])
    assert not keeps_process([thread] * 5, [strange[0], thread, thread, strange[1], process])
    assert not keeps_process([*strange, process, process, process], [process] * 5)


@given(measured(), measured())
def test_totals_subtract(one: LoopTimes, other: LoopTimes) -> None:
    both = LoopTimes(*(a + b for a, b in zip(astuple(one), astuple(other), strict=True)))
    assert both.since(one).batches == other.batches
    assert both.since(one).batch_seconds == pytest.approx(other.batch_seconds)
    assert both.since(one).loop_seconds == pytest.approx(other.loop_seconds, abs=1e-9)


def test_another_thread_that_takes_the_batches_begins_a_trial_anew(
    eager: pytest.MonkeyPatch,
) -> None:
    """The time that the loop's thread computes is not that of another."""
    eager.setattr(stages, "TRIAL_SECONDS", 1.0)
    chooser, source = GatherChooser("auto", possible=True), Mock(kind="thread")
    eager.setattr(stages, "wants_process", lambda trials, cores: tried.extend(trials))
    tried: list[LoopTimes] = []
    one, other = LoopTimes(0, 0, 0, 0, 100.0), LoopTimes(1.1, 10, 1, 0, 2.0)
    chooser.look(source, one, Mock())
    thread = threading.Thread(target=chooser.look, args=(source, other, Mock()))
    thread.start()
    thread.join()
    assert tried == []
    chooser.look(source, LoopTimes(9, 20, 2, 0, 101.0), Mock())
    chooser.look(source, LoopTimes(11, 40, 3, 0, 102.5), Mock())
    assert tried == [LoopTimes(2, 20, 1, 0, 1.5)]


class Trials:
    """A loop beside a chooser, trial after trial; what it starts is there at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started = Mock()
        monkeypatch.setattr("growcache.loading.stages.ChildProcess", self.started)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
        self.chooser = GatherChooser("auto", possible=True)
        self.source: Any = Mock(kind="thread", halted=None)
        self._now = LoopTimes()
        self._look()

    def go_on(self, trial: LoopTimes, seconds: float) -> None:
        """Repeat a trial for so long, and cross over where the chooser wants to."""
        for _ in range(round(seconds / trial.seconds)):
            pairs = zip(astuple(self._now), astuple(trial), strict=True)
            self._now = LoopTimes(*(a + b for a, b in pairs))
            self._look()
            if self.source.halt.called:
                self.source.halted = Mock()
                self._look()
                self.source = self.chooser.crossed() or Mock(kind="thread", halted=None)

    def _look(self) -> None:
        process = Mock(kind="process", halted=None)
        self.chooser.look(self.source, self._now, Mock(return_value=process))


BUSY, HELPED = LoopTimes(0.5, 100, 0.3, 0.03, 0.4), LoopTimes(0.5, 100, 0.0, 0.0, 0.49)


def test_a_process_that_helps_stays_though_others_used_the_machine_when_it_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = Trials(monkeypatch)
    loop.go_on(BUSY, 4.0)
    assert loop.started.call_count == 1
    loop.go_on(BUSY, 4.0)
    loop.go_on(HELPED, 2.5)
    assert (loop.chooser.kind, loop.chooser.settled) == ("process", True)


def test_a_process_that_did_not_help_is_tried_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What others do meanwhile is no reason to stay with the thread for days."""
    loop = Trials(monkeypatch)
    loop.go_on(BUSY, 30.0)
    assert (loop.chooser.kind, loop.source.kind) == ("thread", "thread")
    assert (loop.started.call_count, loop.chooser.settled) == (1, False)
    loop.go_on(BUSY, 20.0)
    assert loop.started.call_count == 2
    loop.go_on(BUSY, 1000.0)
    assert loop.started.call_count == stages.TRIES
    assert (loop.source.kind, loop.chooser.settled) == ("thread", True)


def test_who_halts_before_it_was_looked_at_has_no_process_left_and_is_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop may have the thread's last block before it is said that this is the last one."""
    loop = Trials(monkeypatch)
    source = loop.source
    source.halt.side_effect = lambda: source.halt.reset_mock()  # nothing is said of it in time
    loop.go_on(BUSY, 4.0)
    child = loop.started.return_value
    assert (loop.started.call_count, child.close.called) == (1, False)
    assert loop.chooser.crossed() is None
    assert child.close.called
    source.halt.side_effect = None
    loop.go_on(BUSY, 4.0)
    assert loop.started.call_count == 2
    loop.go_on(HELPED, 10.0)
    assert (loop.chooser.kind, loop.chooser.settled) == ("process", True)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    gc.collect()
    assert gatherers() == []


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """It crosses over as soon as it can."""
    monkeypatch.setattr(stages, "TRIAL_SECONDS", 0.0)
    monkeypatch.setattr(stages, "TRIALS", 2)
    monkeypatch.setattr(stages, "MAX_TRIALS", 2)
    monkeypatch.setattr(stages, "MIN_BATCHES", 1)
    monkeypatch.setattr(stages, "MIN_STALLED_SHARE", -1.0)
    monkeypatch.setattr(stages, "MIN_STALLED_TIME", -1.0)
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
EVERY_DAY = {("passes, large rows", True), ("a given length, small rows", False)}


def test_a_child_that_is_forked_while_the_process_starts_reads_on_its_own(
    make_cache: Callable[..., Filled], eager: pytest.MonkeyPatch
) -> None:
    cache = make_cache(shape=(130, 128))
    cache.add(*range(12))
    with EpochLoader(cache.root, batch_size=7, min_samples=1) as loader:
        while not gatherers():
            next(iter(loader))
        assert loader.report.gather == "thread"
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


@pytest.mark.parametrize(
    ("case", "stays"),
    [
        pytest.param(case, stays, marks=[pytest.mark.slow] * ((case, stays) not in EVERY_DAY))
        for case in CASES
        for stays in (True, False)
    ],
)
def test_crossing_over_changes_nothing_that_is_delivered(
    make_cache: Callable[..., Filled],
    eager: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    case: str,
    stays: bool,
) -> None:
    shape, options = CASES[case]
    eager.setattr(gather, "BLOCK_BATCHES", 2)  # here, not there
    eager.setattr(stages, "keeps_process", lambda by_thread, by_process: stays)
    cache = make_cache(shape=shape)
    cache.add(*range(12))
    changes = ["thread", "process"] + ["thread"] * (not stays)
    with caplog.at_level(logging.INFO):
        found, kinds = read(cache, "auto", after(*changes), **options)
    assert found == read(cache, "thread", as_many(kinds), **options)[0]
    assert "starting a gather process" in caplog.text
    assert ("back to the thread" in caplog.text) != stays


def test_a_loader_that_is_closed_while_it_crosses_leaves_nothing(
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
    """It passes on what the process makes; there is room for a few blocks, and nobody takes them."""
    cache = make_cache()
    cache.add(*range(12))
    crossed, cross = list[bool](), Consumer._cross

    def note(engine: Consumer, *of: Any) -> Stage:
        crossed.append(True)
        return cross(engine, *of)

    eager.setattr(Consumer, "_cross", note)
    loader = EpochLoader(
        cache.root, batch_size=2, min_samples=1, batch_transform=lambda batch: batch
    )
    while not crossed:
        for _ in loader:
            time.sleep(0.003)
            if crossed:
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
    assert caplog.text.count("a thread goes on behind the batch") == 1


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
    kinds = read(cache, "auto", lambda kinds: len(kinds) == 20)[1]
    assert set(kinds) == {"thread"}
    assert caplog.text.count("no gather process can be started, the thread goes on") == 1


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
