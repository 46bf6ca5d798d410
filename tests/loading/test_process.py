"""A gather process delivers what the thread would, and nothing of it is left behind."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from growcache.cache import system
from growcache.cache.lease_views import read_leases
from growcache.errors import CacheError, ConfigError
from growcache.loading import shared_memory
from growcache.loading.buffers import BUFFER_BYTES
from growcache.loading.channel import Demand
from growcache.loading.child_process import (
    ChildProcess,
    Message,
    MessageSocket,
    StopCommand,
    socket_pair,
)
from growcache.loading.gather_process import (
    Acknowledge,
    EndPass,
    GatherSetup,
    ServiceChanged,
    _receive_commands,
)
from growcache.loading.loader import Loader
from growcache.loading.plan import PassPosition
from growcache.loading.shared_memory import SharedSender
from growcache.numpy import EpochLoader
from tests.filled import Filled
from tests.forked import fork
from tests.loading.leftovers import held, memory_files, more_than
from tests.loading.loaders import LOADERS, as_bytes
from tests.ragged import ragged_cache

HERE = Path(__file__)


def gatherers(of: int | None = None) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(of).children(recursive=True):
        with suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
            if "gather" in process.cmdline():
                found.append(process)
    return found


BOTH = pytest.mark.parametrize(
    "function",
    [None, pytest.param(lambda batch: batch, marks=pytest.mark.slow)],
    ids=["read", "relayed"],
)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    gc.collect()
    before = held()
    yield
    gc.collect()
    assert gatherers() == []
    until = time.monotonic() + 10  # what another thread lets go of, a moment later
    while more_than(before) and time.monotonic() < until:
        time.sleep(0.01)
    assert more_than(before) == {}


@pytest.fixture
def large(make_cache: Callable[..., Filled]) -> Filled:
    """An epoch is a block of eight megabytes."""
    cache = make_cache(shape=(130, 128))
    cache.add(*range(12))
    return cache


def loader(cache: Filled, kind: type[Loader] = EpochLoader, **options: Any) -> Loader:
    return kind(
        cache.root, **{"batch_size": 7, "min_samples": 1, "gather": "process", **options}
    )


def stream(cache: Filled, epochs: int = 3, **options: Any) -> list[bytes]:
    with loader(cache, **options) as made:
        return [as_bytes(batch) for _ in range(epochs) for batch in made]


@pytest.mark.parametrize(
    "options",
    [
        {"kind": LOADERS.get("torch", EpochLoader), "drop_last": False},
        {"samples_per_epoch": 50, "fields": ("id",)},
    ],
    ids=["epochs that are passes, torch", "epochs of a given length"],
)
def test_it_delivers_what_the_thread_would(large: Filled, options: dict[str, Any]) -> None:
    assert stream(large, **options) == stream(large, gather="thread", **options)


@pytest.mark.parametrize("function", [None, lambda batch: batch], ids=["read", "cut ahead"])
def test_the_buffers_of_both_processes_are_within_the_budget(
    make_cache: Callable[..., Filled], function: Callable[[Any], Any] | None
) -> None:
    cache = make_cache(shape=(130, 128))
    cache.add(*range(60))
    before = memory_files()
    with loader(
        cache, batch_transform=function, batch_size=280, samples_per_epoch=280 * 24
    ) as made:
        for batch in made:
            nbytes = sum(array.nbytes for array in batch.values())
            time.sleep(0.1)  # both processes do as much ahead as they may
            del batch
        assert (memory_files() - before) * nbytes <= BUFFER_BYTES


@pytest.mark.parametrize(
    "style", ["offsets", *(pytest.param(s, marks=pytest.mark.slow) for s in ("pad", "list"))]
)
def test_ragged_fields_come_as_from_the_thread(tmp_path: Path, style: str) -> None:
    declared = {
        "rows": ["float32", None, 9000],
        "name": "str",
        "raw": "bytes",
        "x": ["int16", 3],
    }
    with ragged_cache(tmp_path / "c", declared) as cache:
        cache.add(*range(3))
        assert stream(cache, 2, ragged=style) == stream(cache, 2, ragged=style, gather="thread")


def test_batches_may_be_kept_and_written_to(large: Filled) -> None:
    with loader(large) as made:
        kept = [batch for _ in range(4) for batch in made]
        for batch in kept:
            assert (batch["x"] == batch["id"][:, None, None]).all()
            batch["x"][:] = -1
        for _ in range(2):
            for batch in made:
                assert (batch["x"] == batch["id"][:, None, None]).all()
        assert all((batch["x"] == -1).all() for batch in kept)


@pytest.mark.slow
def test_breaking_off_and_older_iterators(large: Filled) -> None:
    with loader(large, gather="thread") as through:
        expected = [[b["id"].tolist() for b in through] for _ in range(3)]
    with loader(large) as made:
        old = iter(made)
        assert next(old)["id"].tolist() == expected[0][0]
        assert next(iter(made))["id"].tolist() == expected[1][0]
        with pytest.raises(RuntimeError, match="a new iteration began"):
            next(old)
        assert [b["id"].tolist() for b in made] == expected[2]
        assert made.report.gather == "process"


def test_states_pass_between_thread_and_process(large: Filled) -> None:
    expected = stream(large, gather="thread")
    for first, second in [("thread", "process"), ("process", "thread")]:
        with loader(large, gather=first) as made:
            found = [as_bytes(b) for b in itertools.islice(iter(made), 4)]
            state = made.state_dict()
        with loader(large, gather=second) as made:
            made.load_state_dict(state)
            found += [as_bytes(b) for _ in range(3) for b in made]
            assert made.report.passes == 3
        assert found == expected


def test_the_users_batch_transform_runs_in_the_trainer(large: Filled) -> None:
    seen: list[int] = []

    def note(batch: Any) -> Any:
        seen.append(os.getpid())
        return {"id": batch["id"] * 2}

    expected = stream(large, gather="thread", batch_transform=note)
    seen.clear()
    assert stream(large, batch_transform=note) == expected
    assert set(seen) == {os.getpid()}


@pytest.mark.slow
def test_errors_of_the_users_batch_transform_reach_the_loop(large: Filled) -> None:
    def bad(batch: Any) -> Any:
        raise ZeroDivisionError("in the user's code")

    with loader(large, batch_transform=bad) as made:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError, match="user's code"):
                list(made)


def test_a_transform_in_threads_of_the_trainer_cannot_be_elsewhere(large: Filled) -> None:
    with pytest.raises(ConfigError, match="num_workers"):
        loader(large, transform=lambda sample: sample)
    with pytest.raises(ConfigError, match="thread, process, auto"):
        loader(large, gather="fork")


def test_errors_and_warnings_of_the_process_are_the_trainers(
    large: Filled, caplog: pytest.LogCaptureFixture
) -> None:
    large.damage(1)
    with loader(large, drop_last=False) as made, caplog.at_level(logging.WARNING):
        assert sum(len(batch["id"]) for batch in made) == 110
        assert made.report.skipped == 10
    assert "00000001.tfrecord" in caplog.text
    large.complete()
    with loader(large, batch_size=640) as made, pytest.raises(ConfigError, match="drop_last"):
        next(iter(made))


@BOTH
def test_a_process_that_is_killed_is_replaced_where_it_stood(
    large: Filled, caplog: pytest.LogCaptureFixture, function: Any
) -> None:
    expected = stream(large, 6, gather="thread")
    found = []
    with loader(large, batch_transform=function) as made:
        for _ in range(6):  # the epoch behind that of a kill may be there already
            for batch in made:
                found.append(as_bytes(batch))
                if len(found) in (5, 60):
                    gatherers()[0].kill()
        assert made.report.passes == 6
    assert found == expected
    assert caplog.text.count("was killed by SIGKILL; another one continues") == 2


def test_a_death_that_was_seen_ahead_of_the_loop_is_told(
    large: Filled, caplog: pytest.LogCaptureFixture
) -> None:
    """Here by the thread that passes on, before the loop comes to the next epoch."""
    expected = stream(large, gather="thread")
    with loader(large, batch_transform=lambda batch: batch) as made:
        found = []
        for i, batch in enumerate(made):
            found.append(as_bytes(batch))
            if i == 5:
                gatherers()[0].kill()
                while any(t.name == "growcache-loader" for t in threading.enumerate()):
                    time.sleep(0.01)
        found += [as_bytes(batch) for _ in range(2) for batch in made]
    assert found == expected
    assert caplog.text.count("was killed by SIGKILL; another one continues") == 1


def kill_all() -> None:
    for process in gatherers():
        process.kill()


@pytest.mark.slow
def test_one_that_is_killed_as_a_pass_begins_begins_it_again(large: Filled) -> None:
    """At moments around that in which the snapshot is told, and nothing of it delivered."""
    delays = [n / 1000 for n in (10, 12, 14, 16, 18)]
    found, epochs = list[bytes](), 0
    with loader(large) as made:
        for delay in delays:
            timer = threading.Timer(delay, kill_all)
            timer.start()
            found += [as_bytes(batch) for batch in made]
            timer.join()
            epochs += 1
            while not gatherers():  # one kill at a time: what was made before it comes first
                found += [as_bytes(batch) for batch in made]
                epochs += 1
    assert found == stream(large, epochs, gather="thread")


def test_one_that_dies_again_before_its_first_batch_is_an_error(
    large: Filled, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Here by a module that ends whoever imports it, as a machine without memory does."""
    with loader(large) as made:
        (tmp_path / "orjson.py").write_text("import os\nos.abort()\n")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(CacheError, match=r"SIGABRT, again.*gather='thread'"):
            list(made)
        monkeypatch.undo()
        assert sum(1 for _ in made)


def test_what_ends_a_process_before_it_serves_is_told(
    large: Filled, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with loader(large) as made:
        (tmp_path / "orjson.py").write_text("raise RuntimeError('no such thing here')\n")
        monkeypatch.syspath_prepend(tmp_path)
        said = r"ended with 1: RuntimeError: no such thing here \(.*orjson.py:1\), again"
        with pytest.raises(CacheError, match=said):
            list(made)


@pytest.mark.parametrize("function", [None, lambda batch: batch], ids=["read", "relayed"])
def test_memory_that_cannot_be_mapped_is_an_error_in_the_loop(
    large: Filled, monkeypatch: pytest.MonkeyPatch, function: Any
) -> None:
    def refuse(descriptor: int, size: int) -> Any:
        raise CacheError(f"cannot map {size} bytes")

    with loader(large, batch_transform=function) as made:
        with monkeypatch.context() as patch:
            patch.setattr(shared_memory, "map_shared", refuse)
            with pytest.raises(CacheError, match="cannot map"):
                list(made)
        assert sum(1 for _ in made) == 17


def test_a_process_that_hears_no_more_is_replaced(
    large: Filled, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A command that cannot be followed ends it: buffers are returned that were never lent."""
    expected = stream(large, gather="thread")
    nobodys = [([10**6], list[int]())]
    take_back = shared_memory.SharedReceiver.take_back
    monkeypatch.setattr(
        shared_memory.SharedReceiver,
        "take_back",
        lambda self: nobodys.pop() if nobodys else take_back(self),
    )
    assert stream(large) == expected
    assert not nobodys
    assert caplog.text.count("ended with 1: KeyError: 1000000") == 1
    assert caplog.text.count("another one continues") == 1


@BOTH
def test_closing_ends_a_wait_at_once(make_cache: Callable[..., Filled], function: Any) -> None:
    made = loader(make_cache(), min_samples=20, batch_transform=function)
    errors: list[BaseException] = []

    def read() -> None:
        try:
            list(made)
        except RuntimeError as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    while not gatherers():
        time.sleep(0.01)
    time.sleep(0.3)
    began = time.monotonic()
    made.close()
    reader.join(300)
    assert time.monotonic() - began < 60
    assert "closed" in str(errors[0])


def test_a_service_of_the_trainer_that_fails_ends_the_wait(
    make_cache: Callable[..., Filled],
) -> None:
    cache = make_cache()
    cache.add(0)
    cache.close()
    with loader(cache, min_samples=20) as made:
        timer = threading.Timer(0.5, system.service_failed, (cache.root, "the store is gone"))
        timer.start()
        with pytest.raises(CacheError, match="the store is gone"):
            next(iter(made))
        timer.join()
        with pytest.raises(CacheError, match="the store is gone"):
            next(iter(made))  # told before it begins


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the process is told."""
    sent: list[Any] = []
    send = ChildProcess.send

    def sending(child: ChildProcess, command: Any) -> None:
        sent.append(command)
        send(child, command)

    monkeypatch.setattr(ChildProcess, "send", sending)
    return sent


def test_a_service_that_is_started_anew_is_told_as_well(large: Filled, told: list[Any]) -> None:
    with loader(large) as made:
        next(iter(made))
        system.service_failed(large.root, "the store is gone")
        system.service_started(large.root)
        news = [command for command in told if isinstance(command, ServiceChanged)]
        assert news == [ServiceChanged("the store is gone"), ServiceChanged(None)]
    system.service_failed(large.root, "no listener is left")
    system.service_started(large.root)
    assert len([command for command in told if isinstance(command, ServiceChanged)]) == 2


def test_the_process_is_told_of_what_happens_as_it_gets_its_order(
    large: Filled, told: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    send = ChildProcess.send

    def sending(child: ChildProcess, command: Any) -> None:
        if isinstance(command, GatherSetup):
            system.service_failed(large.root, "the store is gone")
        send(child, command)

    monkeypatch.setattr(ChildProcess, "send", sending)
    with loader(large) as made:
        next(iter(made))
    system.service_started(large.root)
    assert [type(command) for command in told[:2]] == [GatherSetup, ServiceChanged]


def test_the_process_forgets_why_an_earlier_service_failed(tmp_path: Path) -> None:
    ours, theirs = map(MessageSocket, socket_pair())
    order = SimpleNamespace(options=SimpleNamespace(root=tmp_path))
    reasons = []
    for reason in ("the store is gone", None):
        for command in (ServiceChanged(reason), StopCommand()):
            ours.send(Message(command))
        _receive_commands(theirs, SharedSender(), Demand(0), order)  # type: ignore[arg-type]
        reasons.append(system.service_end_reason(tmp_path))
    ours.close()
    theirs.close()
    assert reasons == ["the store is gone", None]


@pytest.mark.slow
def test_leases_name_the_trainers_command_and_end_with_the_loader(large: Filled) -> None:
    with loader(large) as made:
        next(iter(made))
        leases = [lease for lease in read_leases(large.root) if lease.open]
        assert {lease.pid for lease in leases} == {gatherers()[0].pid}
        assert all("gather" not in lease.command for lease in leases)
    assert not any(lease.open for lease in read_leases(large.root))


def test_collecting_the_loader_ends_the_process(large: Filled) -> None:
    gc.collect()
    gc.disable()  # it goes with the last reference, not when the collector comes to it
    try:
        made = loader(large)
        next(iter(made))
        assert len(gatherers()) == 1
        del made
        assert gatherers() == []
    finally:
        gc.enable()


def test_a_forked_child_reads_on_its_own(large: Filled) -> None:
    with loader(large) as made:
        batches = iter(made)
        held = next(batches)
        copy = held["x"].copy()
        go = os.pipe()
        child = fork()
        if child == 0:
            os.read(go[0], 1)
            same = bool((held["x"] == copy).all())
            os._exit(0 if same and sum(1 for _ in made) == 17 else 1)
        del held
        rest = sum(1 for _ in batches) + sum(1 for _ in made)
        os.write(go[1], b"1")
        assert os.waitpid(child, 0)[1] == 0
        assert rest == 16 + 17
        for descriptor in go:
            os.close(descriptor)


def test_that_a_pass_is_over_stands_whatever_is_told_of_it_later(tmp_path: Path) -> None:
    ours, theirs = map(MessageSocket, socket_pair())
    order: Any = SimpleNamespace(options=SimpleNamespace(root=tmp_path))
    found = []
    for commands in (
        [EndPass(3), Acknowledge(PassPosition(3, 80), False, [], [])],
        [Acknowledge(PassPosition(4, 7), True, [], [])],
    ):
        for command in (*commands, StopCommand()):
            ours.send(Message(command))
        demand = Demand(0)
        _receive_commands(theirs, SharedSender(), demand, order)
        found.append(demand.delivered)
    ours.close()
    theirs.close()
    assert found == [PassPosition(4, 0), PassPosition(4, 7)]


def test_ranks_of_a_job_share_a_snapshot(large: Filled) -> None:
    def read(rank: int) -> list[int]:
        with loader(large, rank=rank, world_size=2, batch_size=4) as made:
            return [i for _ in range(2) for batch in made for i in batch["id"].tolist()]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(read, range(2))
    assert len(first) == len(second) == 120
    for epoch in range(2):
        part = slice(60 * epoch, 60 * (epoch + 1))
        assert len({*first[part], *second[part]}) == 120


TRAINER = """
import sys, time
from growcache.numpy import EpochLoader

loader = EpochLoader(sys.argv[1], batch_size=7, min_samples=1, gather="process")
batches = iter(loader)
kept = [next(batches) for _ in range(3)]
print("ready", flush=True)
if sys.argv[2] == "wait":
    time.sleep(60)
"""


def trainer(cache: Filled, then: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-c", TRAINER, str(cache.root), then]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=HERE.parents[2], start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_it_ends_with_a_trainer_that_is_killed(large: Filled, how: signal.Signals) -> None:
    process = trainer(large, "wait")
    [child] = gatherers(process.pid)
    os.killpg(process.pid, how)  # as a terminal does
    process.communicate()
    assert process.returncode == -how
    psutil.wait_procs([child], 30)
    assert not child.is_running()
    leases = read_leases(large.root)
    # As the trainer's own: closed, or of a reader that died and may come back.
    assert not any(lease.open for lease in leases)
    assert all(lease.closed == (how == signal.SIGINT) for lease in leases)
    assert leases or how == signal.SIGINT  # those that were closed without a service are gone


@pytest.mark.slow
def test_a_trainer_that_ends_takes_it_along(large: Filled) -> None:
    process = trainer(large, "end")
    began = time.monotonic()
    process.communicate()
    assert process.returncode == 0
    assert time.monotonic() - began < 25
    assert all(lease.closed for lease in read_leases(large.root))


def test_a_loop_that_is_interrupted_while_it_waits_can_go_on(
    make_cache: Callable[..., Filled],
) -> None:
    cache = make_cache()
    cache.add(*range(4))
    options: dict[str, Any] = {"samples_per_epoch": 14, "min_samples": 50}
    with loader(cache, **options) as made:
        main = threading.main_thread().ident
        assert main is not None
        timer = threading.Timer(0.8, signal.pthread_kill, (main, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            next(iter(made))
        timer.join()
        cache.add(5)
        found = [as_bytes(batch) for _ in range(3) for batch in made]
    # What was left of the first epoch is gone, as ever.
    assert found == stream(cache, 4, gather="thread", **options)[2:]
