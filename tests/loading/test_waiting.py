"""Readers wait for samples, are woken by them, and say what they wait for."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from growcache.cache.files import CacheLayout
from growcache.cache.index.reader import IndexView
from growcache.cache.index.schema import CacheTotals
from growcache.cache.status import write_status
from growcache.cache.status_model import Status
from growcache.errors import CacheError, CacheMissingError, ConfigError
from growcache.loading import bound_check, waiting
from growcache.loading.waiting import samples_wanted, wait_for_samples
from growcache.numpy import EpochLoader


def later(action: Callable[[], Any], seconds: float = 0.2) -> threading.Timer:
    timer = threading.Timer(seconds, action)
    timer.start()
    return timer


@pytest.mark.parametrize(
    ("complete", "population", "wanted"),
    [
        (False, None, 1000),
        (False, 70.4, 70),
        (False, 0.3, 1),
        (True, None, 40),
        (False, 9e9, 1000),
    ],
)
def test_what_is_waited_for_is_capped(
    complete: bool, population: float | None, wanted: int
) -> None:
    view = IndexView(
        totals=CacheTotals(samples=40), complete=complete, population_samples=population
    )
    assert samples_wanted(view, 1000) == wanted


def test_enough_returns_at_once(cache: Any, caplog: pytest.LogCaptureFixture) -> None:
    cache.add(0, 1)
    assert wait_for_samples(cache.root, 20).totals.samples == 20
    assert not caplog.records


def test_a_cache_that_loses_its_schema_first_is_being_removed(cache: Any) -> None:
    cache.add(0, 1)
    CacheLayout(cache.root).identity.unlink()
    removal = later(lambda: cache.root.rename(cache.root.with_name("gone")))
    with pytest.raises(CacheMissingError, match="was removed while it was read"):
        wait_for_samples(cache.root, 20, known=True)
    removal.join()


def test_a_schema_that_stays_away_is_an_error(
    cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "VANISHING_SECONDS", 0.1)
    cache.add(0, 1)
    CacheLayout(cache.root).identity.unlink()
    loader = EpochLoader(cache.root, batch_size=4, min_samples=8, gather="thread")
    with (
        loader,
        pytest.raises(CacheMissingError, match=r"identity\.json is missing; repair it"),
    ):
        next(iter(loader))


def test_new_samples_wake_the_reader(cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "POLL_SECONDS", 30.0)
    cache.add(0)
    done = threading.Event()

    def reader() -> None:
        wait_for_samples(cache.root, 20)
        done.set()

    thread = threading.Thread(target=reader)
    thread.start()
    assert not done.wait(0.3)
    cache.add(1)
    assert done.wait(300)
    thread.join()


def test_a_cache_that_does_not_exist_yet(
    make_cache: Any, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    done = threading.Event()

    def reader() -> None:
        wait_for_samples(tmp_path / "cache", 10)
        done.set()

    thread = threading.Thread(target=reader)
    with caplog.at_level(logging.WARNING):
        thread.start()
        assert not done.wait(0.3)
        filler = make_cache()
        assert not done.wait(0.3)
        filler.add(0)
        assert done.wait(300)
        thread.join()
    (record,) = caplog.records
    assert f"waiting for a cache at {tmp_path / 'cache'}" in record.getMessage()
    assert "growcache run" in record.getMessage()


def test_the_message_counts(cache: Any, caplog: pytest.LogCaptureFixture) -> None:
    cache.add(0)
    with caplog.at_level(logging.WARNING):
        wait_for_samples(cache.root, 30, stopped=iter([False, True]).__next__)
    assert "waiting for 30 samples" in caplog.text
    assert "which has 10 so far" in caplog.text


def test_fixed_waits_for_completion(cache: Any) -> None:
    cache.add(0)
    stops = iter([False, True])
    assert not wait_for_samples(cache.root, 1, complete=True, stopped=stops.__next__).complete
    cache.complete()
    assert wait_for_samples(cache.root, 1000, complete=True).complete


def test_complete_without_a_sample_is_an_error(cache: Any) -> None:
    cache.complete()
    with pytest.raises(CacheError, match="no sample"):
        wait_for_samples(cache.root, 1)


def test_more_than_the_bound_can_hold_is_refused(cache: Any) -> None:
    cache.add(0)
    cache.population(500)
    write_status(cache.root, Status(max_bytes=1000))
    with pytest.raises(ConfigError, match="max_bytes is 1,000"):
        wait_for_samples(cache.root, 500)


def test_the_error_that_ended_a_service_is_said_to_a_loader_that_waits_already(
    cache: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cache.add(0)
    write_status(cache.root, running_status(waiting_for="samplers to start"))

    def looks() -> Iterator[bool]:
        yield False
        write_status(cache.root, Status(ended_by="cache.max_bytes: give at least 2 MB"))
        cache.close()
        yield False
        yield True

    wait_for_samples(cache.root, 30, stopped=looks().__next__)
    first, second = caplog.messages
    assert "which has 10 so far; its service waits for samplers to start" in first
    assert "its service ended with an error: cache.max_bytes: give at least 2 MB" in second


@pytest.mark.parametrize("state", ["full", "waiting"])
def test_a_full_cache_of_less_than_is_waited_for_is_refused(
    cache: Any, state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bound_check, "STAYS_FULL_SECONDS", 0.1)
    cache.add(0)
    write_status(cache.root, running_status(state=state, waiting_reason="readers", samples=10))
    with pytest.raises(ConfigError, match=r"full with 10 samples, fewer than the 30 of"):
        wait_for_samples(cache.root, 30)


def running_status(**values: Any) -> Status:
    """What a service in this process said last."""
    fields: dict[str, Any] = {
        "state": "waiting",
        "pid": os.getpid(),
        "host": socket.gethostname(),
    }
    return Status(**fields | values, updated_at=time.time())


def test_a_wait_ends_when_it_is_told(cache: Any) -> None:
    wake, stop = threading.Event(), threading.Event()

    def end() -> None:
        stop.set()
        wake.set()

    for left in reversed(range(5)):  # a machine with other work may keep one of them waiting
        stop.clear()
        timer = later(end)
        began = time.monotonic()
        wait_for_samples(cache.root, 10, wake=wake, stopped=stop.is_set)
        timer.join()
        if time.monotonic() - began < 0.9:  # less than a poll
            return
        assert left


def test_a_look_does_not_wake_itself(cache: Any) -> None:
    """To look opens and closes files of the very directory that is watched."""
    cache.add(0)
    stop, looks = threading.Event(), 0

    def stopped() -> bool:
        nonlocal looks
        looks += 1
        return stop.is_set()

    timer = later(stop.set, 0.7)
    wait_for_samples(cache.root, 1000, stopped=stopped)
    timer.join()
    assert looks < 10  # less and less often; each look's own events would make hundreds
