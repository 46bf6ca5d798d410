"""A training process is warned once per event that its service brings no new samples."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.cache.files import CacheLayout
from growcache.cache.status import ServicePulse, write_status
from growcache.cache.status_model import Status
from growcache.loading import service_watch
from growcache.loading.report import ReaderCounters
from growcache.loading.service_watch import (
    ABSENT_SECONDS,
    STOPPED_SECONDS,
    WAITING_SECONDS,
    ServiceWatch,
    ServiceWatches,
)
from growcache.numpy import EpochLoader
from tests.filled import Filled
from tests.loading.conftest import full_of

GONE = ServicePulse(runs=False)
RUNS = ServicePulse(runs=True, state="running", drawn=1)
WAITS = ServicePulse(runs=True, state="waiting", waiting_for="credentials", drawn=1)
SILENT = ServicePulse(runs=True, state="running", drawn=1, silence="the service to answer")


def events(*looks: tuple[float, ServicePulse]) -> list[tuple[float, str]]:
    watch = ServiceWatch()
    return [(at, event) for at, pulse in looks if (event := watch.look(pulse, at))]


def every(pulse: ServicePulse, start: int, stop: int) -> list[tuple[float, ServicePulse]]:
    return [(float(at), pulse) for at in range(start, stop, 2)]


def test_a_service_that_stops_is_reported_each_time() -> None:
    looks = every(RUNS, 0, 10) + every(GONE, 10, 200) + every(RUNS, 200, 210)
    found = events(*looks, *every(GONE, 210, 300))
    assert found == [(12.0, "stopped"), (212.0, "stopped")]


def test_a_restart_is_no_event() -> None:
    assert events((0, RUNS), (STOPPED_SECONDS - 1, GONE), (STOPPED_SECONDS + 9, RUNS)) == []


def test_a_cache_that_never_had_a_service_is_reported_once() -> None:
    assert events(*every(GONE, 0, 500)) == [(ABSENT_SECONDS, "absent")]


def test_a_silence_is_reported_once_until_the_service_answers() -> None:
    looks = every(SILENT, 0, 20) + every(RUNS, 20, 30) + every(SILENT, 30, 50)
    assert events(*looks) == [(0.0, "silent"), (30.0, "silent")]


def test_a_wait_counts_from_the_last_new_sample() -> None:
    drawn = ServicePulse(runs=True, state="waiting", waiting_for="room", drawn=2)
    looks = every(WAITS, 0, 40) + every(drawn, 40, 300)
    assert events(*looks) == [(40 + WAITING_SECONDS, "waiting")]


@pytest.mark.parametrize("state", ["running", "full", "complete", "shrinking"])
def test_other_states_are_no_wait(state: str) -> None:
    assert events(*every(ServicePulse(runs=True, state=state, drawn=1), 0, 500)) == []


@given(st.lists(st.sampled_from([GONE, RUNS, WAITS, SILENT]), max_size=200))
def test_no_event_is_reported_twice_without_a_change(pulses: list[ServicePulse]) -> None:
    watch, reported = ServiceWatch(), ""
    before: ServicePulse | None = None
    for at, pulse in enumerate(pulses):
        event = watch.look(pulse, 30.0 * at)
        if event and pulse == before:
            assert event != reported
        if event or pulse != before:
            reported = event or ""
        before = pulse


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> ServiceWatches:
    for name in ("LOOK_SECONDS", "STOPPED_SECONDS", "ABSENT_SECONDS"):
        monkeypatch.setattr(service_watch, name, 0.0)
    return ServiceWatches()


def filled_without_service(root: Path, *, complete: bool = False) -> Path:
    with Filled(root, full_of((4,))) as filled:
        filled.add(0, 1, 2, 3)
        if complete:
            filled.complete()
    return root


def test_the_words_say_what_to_do(
    tmp_path: Path, watches: ServiceWatches, caplog: pytest.LogCaptureFixture
) -> None:
    root = filled_without_service(tmp_path / "cache")
    watches.look({root, tmp_path / "none"})
    watches.look({root})
    (said,) = caplog.messages
    assert "epochs repeat the 40 samples that are cached" in said
    assert "growcache run CONFIG" in said


def test_a_complete_cache_needs_no_service(
    tmp_path: Path, watches: ServiceWatches, caplog: pytest.LogCaptureFixture
) -> None:
    watches.look({filled_without_service(tmp_path / "cache", complete=True)})
    assert caplog.messages == []


def test_a_waiting_service_is_named_with_its_reason(
    tmp_path: Path,
    watches: ServiceWatches,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service_watch, "WAITING_SECONDS", 0.0)
    with Filled(tmp_path / "cache", full_of((4,))) as filled:  # which holds the lock
        filled.add(0)
        waiting = Status("waiting", "free space", pid=os.getpid(), updated_at=time.time())
        write_status(filled.root, waiting)
        watches.look({filled.root})
        watches.look({filled.root})
    (said,) = caplog.messages
    assert "for free space; until then epochs repeat the 10 samples" in said


def test_the_thread_that_counts_looks(
    tmp_path: Path, watches: ServiceWatches, caplog: pytest.LogCaptureFixture
) -> None:
    root = filled_without_service(tmp_path / "cache")
    deadline = time.monotonic() + 300
    with EpochLoader(root, batch_size=2, min_samples=1) as loader:
        while not caplog.messages and time.monotonic() < deadline:
            for _ in loader:
                time.sleep(0.001)
    assert [f"no service has run on the cache {root}" in one for one in caplog.messages] == [
        True
    ]


def test_progress_is_seen_once(tmp_path: Path) -> None:
    counters = ReaderCounters(CacheLayout(tmp_path), tmp_path)
    assert not counters.has_progressed()
    counters.receive(8)
    assert [counters.has_progressed(), counters.has_progressed()] == [True, False]
