"""A trainer that has ended in any way stops neither the service nor the other readers."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.accidents.commands import (
    edit_config,
    growcache,
    rows_of,
    running,
    status,
    wait_for_status,
    write_config,
    write_objects,
)
from tests.accidents.trainers import loading, trainer

READ = "for _ in range(2): next(batches)"
STATE = "state = loader.state_dict()"
READY = "say('ready')"
SAMPLE_BYTES, SHARD_SAMPLES = 16384, 8
PACE = "10MB"  # otherwise the service, which draws without end, takes a whole core


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dead")
    url = write_objects(folder / "in", count=24, rows=16, columns=SAMPLE_BYTES // 4)
    return write_config(
        folder / "cache.yaml",
        rows_of(url),
        sampling={"shard_samples": SHARD_SAMPLES, "max_bytes_per_second": PACE},
        cache={"max_bytes": "4MB", "min_uses": 0},
    )


@pytest.fixture(scope="module")
def cache(config: Path) -> Iterator[Path]:
    """A cache at its bound, with a service that draws without end."""
    path = config.with_suffix("")
    with running(config):
        wait_for_status(path, lambda found: found["evicted_samples"] > 0)
        yield path


@pytest.fixture(autouse=True)
def _released(cache: Path) -> None:
    """Release the leases of the previous test."""
    if status(cache)["leases"]:
        growcache("release", cache)
        wait_for_status(cache, lambda found: not found["leases"])


def is_turned_over(cache: Path) -> dict[str, Any]:
    """Wait until the cache has turned over, which proves that nothing is held back."""
    before = status(cache)
    return wait_for_status(
        cache, lambda found: found["drawn"] > before["drawn"] + before["samples"]
    )


@pytest.mark.parametrize(
    ("gather", "number"),
    [
        ("thread", signal.SIGKILL),
        pytest.param("process", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_trainer_that_gave_no_state_keeps_nothing(
    cache: Path, gather: str, number: signal.Signals
) -> None:
    with trainer(cache, loading(job="train", gather=gather), READ) as loop:
        loop.ask(READY)
        wait_for_status(cache, lambda found: found["leases"])
        assert loop.end(number) == -number
    wait_for_status(cache, lambda found: not found["leases"])
    is_turned_over(cache)


def test_what_was_used_makes_room_at_once_when_its_reader_is_killed(tmp_path: Path) -> None:
    """With the default `min_uses`: the first epoch used every shard, the second one holds them."""
    url = write_objects(tmp_path / "in", count=60, rows=16, columns=4096)
    config = write_config(
        tmp_path / "cache.yaml",
        rows_of(url),
        sampling={"shard_samples": 8},
        cache={"max_bytes": "4MB"},
    )
    cache = config.with_suffix("")
    with running(config):
        wait_for_status(cache, lambda found: found["state"] == "full")
        codes = (loading(job="train"), "for _ in batches: pass", "batches = iter(loader)", READ)
        with trainer(cache, *codes) as loop:
            loop.ask(READY)
            before = wait_for_status(cache, lambda found: found["state"] != "running")["drawn"]
            loop.end(signal.SIGKILL)
        wait_for_status(cache, lambda found: found["drawn"] > before)


@pytest.mark.parametrize("gather", [pytest.param("thread", marks=pytest.mark.slow), "process"])
def test_sigterm_lets_go_as_ctrl_c_does_also_of_what_a_state_may_want(
    cache: Path, gather: str
) -> None:
    with trainer(cache, loading(job="train", gather=gather), READ, STATE) as loop:
        loop.ask(READY)
        assert loop.end(signal.SIGTERM) == -signal.SIGTERM
    assert status(cache)["leases"] == []


@pytest.mark.slow
def test_what_a_state_may_want_is_a_fifth_of_the_bound_and_let_go_by_a_command(
    cache: Path,
) -> None:
    for job in ("one", "other"):
        with trainer(cache, loading(job=job), READ, STATE) as loop:
            loop.ask(READY)
            loop.end(signal.SIGKILL)
    found = is_turned_over(cache)
    kept = {lease["job"]: lease for lease in found["leases"]}
    assert not any(lease["open"] for lease in kept.values())
    shards = max(lease["shards"] for lease in kept.values())
    assert 0 < shards * SAMPLE_BYTES * SHARD_SAMPLES <= found["max_bytes"] / 5
    assert all(0 < lease["seconds_left"] <= 600 for lease in kept.values())
    shown = "".join(growcache("status", cache).stdout.replace("│", "").split())
    assert f"keptforadeadreader:{kept['other']['shards']}shards,jobother" in shown
    assert f"releasethemwith:growcacherelease{cache}" in shown

    unknown = growcache("release", cache, "--job", "unknown")
    assert (unknown.returncode, unknown.stderr) == (0, "")
    assert "Nothing to release" in unknown.stdout
    released = growcache("release", cache, "--job", "other")
    assert (released.returncode, released.stderr) == (0, "")
    assert "1 dead reader of job other" in released.stdout
    found = wait_for_status(
        cache, lambda now: "other" not in [lease["job"] for lease in now["leases"]]
    )
    assert growcache("release", cache).returncode == 0
    wait_for_status(cache, lambda now: not now["leases"])


@pytest.mark.slow
def test_what_is_kept_does_not_hold_up_a_lowered_bound(tmp_path: Path) -> None:
    """Another reader holds the whole cache, so nothing can be evicted at once."""
    url = write_objects(tmp_path / "in", count=24, rows=16, columns=SAMPLE_BYTES // 4)
    config = write_config(
        tmp_path / "cache.yaml",
        rows_of(url),
        sampling={"shard_samples": SHARD_SAMPLES, "max_bytes_per_second": PACE},
        cache={"max_bytes": "4MB", "min_uses": 0},
    )
    cache = config.with_suffix("")
    with running(config):
        wait_for_status(cache, lambda found: found["evicted_samples"] > 0)
        with trainer(cache, loading(job="dead"), READ, STATE) as loop:
            loop.ask(READY)
            loop.end(signal.SIGKILL)
    edit_config(config, cache__max_bytes="3.4MB")
    with trainer(cache, loading(job="alive"), READ) as loop:
        loop.ask(READY)
        loop.tell("while True:\n    for _ in loader: pass")
        with running(config):
            wait_for_status(cache, lambda found: found["max_bytes"] == 3_400_000)
            is_turned_over(cache)


DYING = """
import os
from growcache.numpy import EpochLoader

def opened(job):
    loader = EpochLoader(cache, batch_size=8, min_samples=16, job=job)
    batches = iter(loader)
    next(batches)
    return loader, batches, loader.state_dict()

for at in range(24):
    child = os.fork()
    if not child:
        try:
            kept = opened(f"dead {at}")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.slow
def test_leases_of_the_dead_leave_room_for_those_of_the_living(cache: Path) -> None:
    """The dead readers' leases alone would fill the space that leases may take."""
    with trainer(cache, DYING, loading(job="alive"), READ) as loop:
        loop.ask(READY)
    found = wait_for_status(cache, lambda now: not any(one["open"] for one in now["leases"]))
    assert found["leases"][-1]["job"].startswith("dead")  # the latest lease is still kept


@pytest.mark.slow
def test_living_readers_are_not_released(cache: Path) -> None:
    with trainer(cache, loading(job="train"), READ, STATE) as loop:
        loop.ask(READY)
        assert "Nothing to release" in growcache("release", cache).stdout
        assert [lease["open"] for lease in status(cache)["leases"]].count(True)


HANDLER = """
import signal
signal.signal(signal.SIGTERM, lambda *_: say("mine"))
"""


@pytest.mark.parametrize("order", ["before", pytest.param("after", marks=pytest.mark.slow)])
def test_a_handler_of_the_users_is_left_alone(cache: Path, order: str) -> None:
    codes = [HANDLER, loading(job="train"), READ]
    if order == "after":
        codes = [*codes[1:], codes[0]]
    with trainer(cache, *codes) as loop:
        loop.ask(READY)
        loop.process.send_signal(signal.SIGTERM)
        assert loop.ask("import time; time.sleep(0.01)") == ["mine"]
        assert loop.ask("say(len(next(batches)['x']))") == [8]


FRAMEWORK = """
import signal
before = signal.getsignal(signal.SIGTERM)
handlers = [lambda *_: say("mine")]
if before not in (None, signal.SIG_DFL):
    handlers.append(before)
signal.signal(signal.SIGTERM, lambda *args: [handler(*args) for handler in handlers])
"""


def test_a_framework_that_calls_earlier_handlers_too_ends_as_it_would(cache: Path) -> None:
    """Lightning chains handlers in this way, and stops after the batch."""
    with trainer(cache, loading(job="train"), READ, FRAMEWORK) as loop:
        loop.ask(READY)
        loop.process.send_signal(signal.SIGTERM)
        assert loop.ask("import time; time.sleep(0.01)") == ["mine"]
        assert loop.ask("say(len(next(batches)['x']))") == [8]


HANGING = """
import ctypes
library, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)
library.pthread_mutex_init(lock, None)
library.pthread_mutex_lock(lock)
say("hanging")
library.pthread_mutex_lock(lock)
"""


def test_a_trainer_that_hangs_in_c_ends_too(cache: Path) -> None:
    with trainer(cache, loading(job="train"), READ, STATE) as loop:
        loop.ask(HANGING)
        assert loop.end(signal.SIGTERM) == -signal.SIGTERM
    assert status(cache)["leases"] == []


IN_A_THREAD = """
import signal, threading
from growcache.numpy import EpochLoader
def run():
    loader = EpochLoader(cache, batch_size=8, min_samples=16)
    next(iter(loader))
thread = threading.Thread(target=run)
thread.start()
thread.join()
say(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
"""
FORKED = """
import os, signal, time
ready, told = os.pipe()
child = os.fork()
if not child:
    os.write(told, b"x" if signal.set_wakeup_fd(-1) == -1 else b"y")
    time.sleep(60)
    os._exit(1)
say(os.read(ready, 1).decode())
os.kill(child, signal.SIGTERM)
_, ended = os.waitpid(child, 0)
say(os.WTERMSIG(ended))
"""


def test_no_handler_is_set_in_other_threads_and_none_is_left_to_children(cache: Path) -> None:
    with trainer(cache) as loop:
        assert loop.ask(IN_A_THREAD) == [True]
    with trainer(cache, loading(job="train"), READ) as loop:
        assert loop.ask(FORKED) == ["x"]  # the parent is not notified of the child's signals
        assert loop.ask("") == [signal.SIGTERM]
        assert loop.ask("say(len(next(batches)['x']))") == [8]


@pytest.mark.slow
def test_without_a_service_too(tmp_path: Path) -> None:
    url = write_objects(tmp_path / "in", count=10)
    source = rows_of(url)
    config = write_config(tmp_path / "cache.yaml", source)
    cache = config.with_suffix("")
    assert growcache("run", config, "--until-full").returncode == 0
    with trainer(cache, loading(job="train"), READ, STATE) as loop:
        loop.ask(READY)
        loop.end(signal.SIGKILL)
    (lease,) = status(cache)["leases"]
    assert (lease["open"], lease["seconds_left"]) == (False, None)
    assert growcache("release", cache).returncode == 0
    assert status(cache)["leases"] == []
    assert growcache("release", tmp_path / "nowhere").returncode == 2
