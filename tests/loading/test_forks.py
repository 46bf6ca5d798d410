"""A forked child may hold batches in shared memory: nothing is filled in there any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from growcache.loading import report
from growcache.loading.buffers import RECYCLE_BYTES, BufferPool
from growcache.loading.channel import EPOCH_IS_OVER
from growcache.loading.consumer import Consumer
from growcache.loading.maps import MapPool, ShardKey
from growcache.loading.options import LoaderOptions
from growcache.loading.shared_memory import SharedSender
from growcache.loading.snapshot import Snapshot
from growcache.numpy import EpochLoader
from tests.filled import Filled
from tests.forked import ended, exits_with, fork
from tests.loading import functions


class Forked:
    """A child that looks once it is told to, and says whether an array is as it was."""

    def __init__(self, held: np.ndarray) -> None:
        before = held.copy()
        self._go = os.pipe()
        self._child = fork()
        if self._child == 0:
            os.read(self._go[0], 1)
            os._exit(0 if (held == before).all() else 1)

    def sees_what_it_saw(self) -> bool:
        os.write(self._go[1], b"1")
        for descriptor in self._go:
            os.close(descriptor)
        return os.waitpid(self._child, 0)[1] == 0


def test_a_pool_of_shared_memory_leaves_alone_what_a_child_may_see() -> None:
    pool = BufferPool(RECYCLE_BYTES, allocate=SharedSender().allocate)
    held = pool.take()
    held[:] = 1
    child = Forked(held)
    del held
    for _ in range(20):
        pool.take()[:] = 2
    assert child.sees_what_it_saw()


def test_buffers_go_round_again_after_a_fork() -> None:
    pool = BufferPool(RECYCLE_BYTES)
    held = pool.take()
    assert Forked(held).sees_what_it_saw()
    del held
    assert len({pool.take().ctypes.data for _ in range(5)}) == 1


def test_in_a_child_buffers_go_round() -> None:
    child = fork()
    if child == 0:
        pool = BufferPool(RECYCLE_BYTES)
        os._exit(len({pool.take().ctypes.data for _ in range(5)}))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_a_child_of_a_child_keeps_its_batches() -> None:
    child = fork()
    if child == 0:
        pool = BufferPool(RECYCLE_BYTES, allocate=SharedSender().allocate)
        held = pool.take()
        held[:] = 1
        inner = Forked(held)
        del held
        pool.take()[:] = 2
        os._exit(not inner.sees_what_it_saw())
    assert os.waitpid(child, 0)[1] == 0


# What is registered first runs last before a fork, and first behind it: there another thread
# may receive a batch, and let go of it.
IN_BETWEEN = """
    import os
    import sys

    act = {"before": lambda: None, "after": lambda: None}
    os.register_at_fork(
        before=lambda: act["before"](), after_in_parent=lambda: act["after"]()
    )

    from growcache.loading.shared_memory import SharedSender
    from growcache.loading.shared_memory import SharedReceiver as Borrowed
    from growcache.loading.buffers import RECYCLE_BYTES, BufferPool
    from growcache.loading.child_process import MessageSocket as Wire, socket_pair as pair

    out, into = map(Wire, pair())
    shared_sender, receiver = SharedSender(out), Borrowed()
    here = BufferPool(RECYCLE_BYTES, allocate=SharedSender().allocate)
    there = BufferPool(RECYCLE_BYTES, allocate=shared_sender.allocate)

    def made_here(value):
        taken = here.take()
        taken[:] = value
        return taken

    def made_there(value):
        shared_sender.returned(*receiver.take_back())
        taken = there.take()
        taken[:] = value
        shared_sender.send(out, taken)
        del taken
        return receiver.receive(into)

    held = []
    read, write = os.pipe()

    def refill():
        held.clear()
        for make in (made_here, made_there):
            make(2)

    def begin():
        refill()
        held.extend([made_here(1), made_there(1)])

    for make in (made_here, made_there):
        make(0)
    act["before"] = begin
    if sys.argv[1] == "meanwhile":
        act["after"] = refill
    child = os.fork()
    if child == 0:
        os.read(read, 1)
        os._exit(0 if all((one == 1).all() for one in held) else 1)
    refill()
    os.write(write, b"1")
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("let_go", ["meanwhile", "behind it"])
def test_what_is_made_while_another_thread_forks_is_left_alone(let_go: str) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(IN_BETWEEN), let_go],
        env={**os.environ, "PYTHONPATH": str(root)},
        check=False,
    )
    assert done.returncode == 0


def test_a_child_keeps_the_batches_of_num_workers(make_cache: Callable[..., Filled]) -> None:
    cache: Filled = make_cache(shape=(130, 128))
    cache.add(*range(4))
    options: dict[str, Any] = {
        "batch_size": 7,
        "min_samples": 1,
        "num_workers": 1,
        "gather": "thread",
    }
    with EpochLoader(cache.root, transform=functions.augment, **options) as loader:
        batches = [next(iter(loader))]
        child = Forked(batches[0]["large"])
        batches.clear()
        for _ in range(3):
            for _ in loader:
                pass
        assert child.sees_what_it_saw()


@pytest.mark.parametrize(
    "options",
    [{"gather": "thread"}, {"gather": "process", "batch_transform": dict}],
    ids=["thread", "relayed"],
)
def test_a_child_lets_go_of_a_loader_whose_locks_were_taken(
    make_cache: Callable[..., Filled], options: dict[str, Any]
) -> None:
    """Here by a thread of the parent that is where it is for a moment, each time it waits."""
    cache = make_cache()
    cache.add(*range(4))
    taken, over = threading.Event(), threading.Event()
    loader_options = LoaderOptions(path=cache.root, batch_size=7, min_samples=1, **options)
    with closing(Consumer(loader_options)) as loader:
        next(loader.epoch())
        stage = loader.stage
        assert stage is not None

        def take() -> None:
            with stage.demand.changed:
                taken.set()
                over.wait()

        taker = threading.Thread(target=take)
        taker.start()
        taken.wait()
        child = fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which pytest may have taken
            signal.alarm(30)
            stage.close()
            os._exit(0)
        over.set()
        taker.join()
        assert os.waitpid(child, 0)[1] == 0


def test_a_child_reads_the_snapshot_of_its_parent(make_cache: Callable[..., Filled]) -> None:
    """What a thread of the parent held while it opened another would be shut in the child."""
    cache: Filled = make_cache(shape=(4,))
    cache.add(0)
    inside = threading.Event()

    def slowly() -> Iterator[ShardKey]:
        inside.set()
        time.sleep(0.3)
        yield from ()

    thread = threading.Thread(target=lambda: MapPool.of(cache.root).hold(slowly()))
    with Snapshot.take(cache.root) as snapshot:
        thread.start()
        inside.wait()
        child = fork()
        if child == 0:
            exits_with(lambda: len(snapshot[0]) == 0)
        thread.join()
        assert ended(child)


@pytest.mark.parametrize("gather", ["thread", "process"])
def test_an_iterator_of_the_parent_is_refused_in_a_child(
    make_cache: Callable[..., Filled], gather: Any
) -> None:
    cache = make_cache()
    cache.add(*range(4))

    def goes_on() -> int:
        try:
            for _ in range(1000):
                next(iterator)
        except RuntimeError as error:
            return 0 if str(error) == EPOCH_IS_OVER else 2
        return 3

    with EpochLoader(cache.root, batch_size=1, min_samples=1, gather=gather) as loader:
        iterator = iter(loader)
        next(iterator)
        child = fork()
        if child == 0:
            exits_with(goes_on)
        assert ended(child)
        next(iterator)


def test_a_child_counts_what_it_reads_whatever_lock_a_thread_of_its_parent_held(
    make_cache: Callable[..., Filled],
) -> None:
    cache = make_cache()
    cache.add(*range(4))
    taken, over = threading.Event(), threading.Event()

    def take() -> None:
        with report.counter_thread.lock:
            taken.set()
            over.wait()

    taker = threading.Thread(target=take)
    taker.start()
    taken.wait()
    child = fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        with EpochLoader(cache.root, batch_size=7, min_samples=1) as loader:
            next(iter(loader))
        os._exit(0)
    over.set()
    taker.join()
    assert os.waitpid(child, 0)[1] == 0
